"""The command that users type: `kedro run` of all pipelines with a small model, on the device."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from recording import Machine, Recorder

from visual_grpo.config import flatten

ROOT = Path(__file__).resolve().parents[2]
LITTLE = {
    "starter": {"records_per_prompt": 1, "vae_steps": 5, "dit_steps": 5, "ar_steps": 5},
    "grpo": {"steps": 2, "prompts_per_step": 2, "group_size": 4},
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


def run(rows: Recorder, machine: Machine, _: str) -> None:
    given = {**flatten(LITTLE), "model.device": machine.device, "output": machine.work / "output"}
    params = ",".join(f"{name}={value}" for name, value in given.items())
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{machine.work / 'mlflow.db'}", "DO_NOT_TRACK": "1"}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _KEDRO, "run", f"--params={params}"],
        cwd=ROOT,
        env=os.environ | store,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout, flush=True)
    seconds = time.monotonic() - started
    if done.returncode:
        raise RuntimeError(f"kedro run ended with {done.returncode}: {done.stdout.strip()[-500:]}")
    rows.add("kedro run", pipelines="all, small GLM-Image", seconds=seconds)
