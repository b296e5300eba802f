"""`make gpu-bench` as far as a CPU can tell: every part runs on small models, and none ends another."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
KIT = ROOT / "benchmarks/gpu"
TABLES = {
    "versions",
    "card",
    "a layer of SD3.5 medium",
    "against diffusers",
    "checks",
    "trainings",
    "SAM 2 against the CPU",
    "phases",
    "loading",
    "metrics",
    "steps beside a plain loop",
    "plain loop's ratios",
    "single changes",
    "kedro run",
}


def run(script: Path, folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Runs the driver; returns how it ended, and its results."""
    command = [sys.executable, "-W", "ignore", str(script), "--device", "cpu", "--out", str(folder / "out"), *words]
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done, json.loads((folder / "out/results.json").read_text(encoding="utf-8"))


def table(results: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if row["table"] == name]


@pytest.mark.slow
def test_every_part_runs_on_small_models(tmp_path: Path) -> None:
    done, results = run(KIT / "run.py", tmp_path, "--tiny", "--seconds", "3000")
    assert table(results, "errors") == []
    assert table(results, "findings") == []
    assert [row for row in results["ended"] if row["end"] != 0] == []
    assert {row["table"] for row in results["rows"]} == TABLES
    for row in table(results, "trainings"):
        same = {row[name] for name in ("again", "resumed", "checkpointing", "offload") if name in row}
        assert (row["finite"], same) == ("yes", {0.0}), row
    assert {row["passed"] for row in table(results, "against diffusers")} == {"7 of 7 checks"}
    steps = [row for row in table(results, "phases") if row["phase"].startswith("step of")]
    assert [row["model"] for row in steps] == ["sd3", "qwen_vl_3b", "flux2_klein", "glm", "z_image"]
    assert all(row["seconds"] > 0 and row["planned"] > 0 for row in steps)
    # The log-probs of the plain loop's replay are those of its sampler.
    assert all(row["largest_log_ratio"] < 1e-2 for row in table(results, "plain loop's ratios"))
    assert done.returncode == 0, done.stderr
    assert "0 errors; 0 of" in done.stdout


BROKEN = """
    import os, signal, sys, time
    sys.path[:0] = [{kit!r}, {here!r}]
    import run

    def fine(rows, machine, job):
        rows.add("fine", job=job, left=machine.left())

    def fails(rows, machine, job):
        raise ValueError("as told")

    def crashes(rows, machine, job):
        os.kill(os.getpid(), signal.SIGSEGV)

    def hangs(rows, machine, job):
        rows.add("before it hangs", value=1.0)
        time.sleep(600)

    if __name__ == "__main__":
        run.PRELOADED = []
        run.PARTS = {{n: run.Part(f"broken:{{n}}", 20, (n,)) for n in ("fails", "crashes", "hangs", "fine")}}
        run.main()
"""


@pytest.mark.slow
def test_a_part_that_fails_crashes_or_hangs_ends_alone(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(dedent(BROKEN).format(kit=str(KIT), here=str(tmp_path)), encoding="utf-8")
    done, results = run(script, tmp_path, "--seconds", "300", "--parts", "fails,crashes,hangs,fine")
    assert [(row["part"], row["end"]) for row in results["ended"]] == [
        ("fails", 0),
        ("crashes", -11),
        ("hangs", "killed: its time was over"),
        ("fine", 0),
    ]
    assert [row["error"] for row in table(results, "errors")] == ["ValueError: as told"]
    assert len(table(results, "before it hangs")) == len(table(results, "fine")) == 1
    assert "1 errors; 2 of 4 processes did not come to their end" in done.stdout
    assert done.returncode == 1


def test_what_travels_has_a_locked_version() -> None:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    locked = {match[1] for line in lines if (match := re.match(r"([a-z0-9-]+)==", line))}
    carried = (KIT / "carried.txt").read_text(encoding="utf-8").split()
    assert {"diffusers", "peft", "transformers"} <= set(carried) <= locked
