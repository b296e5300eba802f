"""Learning at size: `kedro run` of all pipelines with the model of at_size.py, from pretraining to the verdict."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recording import Machine, Recorder

from visual_grpo.config import flatten
from visual_grpo.evaluation.verdict import lines

ROOT = Path(__file__).resolve().parents[2]
LARGE: Mapping[str, Any] = {
    "starter": {"world": "benchmarks.gpu.at_size:LARGE", "vae_steps": 800, "dit_steps": 1200},
    "model": {"dtype": "float16"},
    # The adapter moves as far in a step as conf/sd3_small's, which has a third of the layers.
    "grpo": {"steps": 60, "learning_rate": 4e-4, "ratio_tolerance": 0.5},
    "policy": {"denoise_batch": 64, "decode_batch": 64},
    "evaluation": {"every": 20, "images_per_prompt": 4},
}
TINY: Mapping[str, Any] = {
    "starter": {"world": "benchmarks.gpu.at_size:TINY", "records_per_prompt": 1, "vae_steps": 5, "dit_steps": 5},
    "grpo": {"steps": 2, "prompts_per_step": 2, "group_size": 4, "ratio_tolerance": 0.5},
    "evaluation": {"every": 0, "prompts": 2, "max_prompts": 2, "images_per_prompt": 1, "bootstrap_samples": 100},
    "policy": {"signal_check": {"rollouts": 0}},
    "tracking": {"images_every": 0},
}
_KEDRO = """
from visual_grpo.common.quiet_libraries import silence_libraries
silence_libraries()
from kedro.framework.cli.cli import main
main()
"""
"""The entry point of the command, which wheels in a folder do not put on the PATH."""
SPARE = 10.0
"""Seconds that are left for the results of a run that does not come to its end."""


def run(rows: Recorder, machine: Machine, _: str) -> None:
    output = machine.work / "output"
    given = {**flatten(TINY if machine.tiny else LARGE), "model.device": machine.device, "output": output}
    params = ",".join(f"{name}={value}" for name, value in given.items())
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{machine.work / 'mlflow.db'}", "DO_NOT_TRACK": "1"}
    started = time.monotonic()
    command = [sys.executable, "-c", _KEDRO, "run", "--env=sd3_small", f"--params={params}"]
    try:  # Its lines go into this process's log as they come: a kill leaves them.
        seconds = machine.left() - SPARE
        done = subprocess.run(command, cwd=ROOT, env=os.environ | store, timeout=seconds, check=False)
        ended = str(done.returncode)
    except subprocess.TimeoutExpired:
        ended = "a kill: its time was over"
    seconds, reporting = time.monotonic() - started, output / "08_reporting"
    if reporting.is_dir():
        shutil.copytree(reporting, machine.out / "learning", dirs_exist_ok=True)
    if ended != "0":
        log = machine.work / "log"
        last = log.read_text(errors="replace").strip()[-500:] if log.is_file() else ""
        raise RuntimeError(f"kedro run ended with {ended} after {seconds:.0f} s: {last}")
    rows.add("kedro run", pipelines="all, with pretraining", seconds=seconds)
    rows.add("learning", **json.loads((reporting / "result.json").read_text(encoding="utf-8")))
    headline = json.loads((reporting / "evaluation.json").read_text(encoding="utf-8"))["headline"]
    for number, line in enumerate(lines(headline), 1):
        rows.add("verdict", verdict=headline["verdict"] if number == 1 else "", line=line)
