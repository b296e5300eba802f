"""How a command ends that is stopped from outside, in each phase, and that what it prints then goes on from there."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest

from tests.small_project import environment, paste, small_project
from visual_grpo.grpo.metrics import is_timing

pytestmark = pytest.mark.slow

ENDLESS = "grpo.steps=500,grpo.learning_rate=2e-4"
PHASES = {
    "starter": ("Pretraining", "--pipeline=starter --params=output=data/other,starter.dit_steps=100000"),
    "baseline": ("generate_baseline", "--pipeline=baseline"),
    "signal check": ("Signal check:", "--pipeline=train --params=policy.signal_check.rollouts=100000"),
    "training": ("train ", f"--pipelines=baseline,train --params={ENDLESS}"),
    "evaluation": ("generate_trained", "--pipeline=evaluate"),
}
"""Phase -> what is printed when it has begun, and the command."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small project after its first whole run."""
    folder = small_project(tmp_path_factory.mktemp("finished") / "project")
    done = paste(".venv/bin/kedro run", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def started(project: Path, arguments: str, begun: str) -> tuple[subprocess.Popen[bytes], Path]:
    """A command that has printed ``begun``, and the file with all that it prints."""
    log = project / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [".venv/bin/kedro", "run", *arguments.split()],
            cwd=project,
            env=environment(project),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + 300
    while begun not in log.read_text() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return process, log


def stopped(project: Path, arguments: str, begun: str, number: signal.Signals) -> tuple[int, str]:
    """The exit code of a command that gets a signal once it has printed ``begun``, and all that it has printed."""
    process, log = started(project, arguments, begun)
    process.send_signal(number)
    return process.wait(timeout=300), log.read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("phase", PHASES)
def test_the_exit_code_says_which_signal_it_was(project: Path, phase: str, number: signal.Signals, code: int) -> None:
    begun, arguments = PHASES[phase]
    ended, printed = stopped(project, arguments, begun, number)
    assert ended == code, printed
    assert "Traceback" not in printed
    assert printed.splitlines()[-1] == "Stopped."
    assert ("Start again with: " in printed) == (phase == "signal check")
    assert ("Go on with: " in printed) == (phase == "training")
    assert not (project / "data/.lock").exists()


def test_what_is_printed_at_a_stop_goes_on_when_it_is_pasted(project: Path) -> None:
    given = "--params=grpo.steps=48,grpo.learning_rate=2e-4,grpo.updates_per_rollout=3,seed=0"
    assert paste(f".venv/bin/kedro run --pipeline=train {given}", project).returncode == 0
    whole = contents(project)
    code, printed = stopped(project, f"--pipeline=train {given}", "train ", signal.SIGTERM)
    assert code == 143
    [line] = [line for line in printed.splitlines() if line.startswith("Go on with: ")]
    refused = paste(".venv/bin/kedro run --pipeline=train --params=resume=auto,grpo.group_size=3,seed=1", project)
    assert refused.returncode == 1
    assert "grpo.group_size (was 2, is 3), seed (was 0, is 1)" in refused.stderr
    pasted = paste(line.removeprefix("Go on with: "), project)
    assert pasted.returncode == 0, pasted.stdout + pasted.stderr
    assert "Resuming after step " in pasted.stdout
    assert contents(project) == whole


def contents(project: Path) -> dict[str, object]:
    """Weights and metrics of the adapters, but for times."""
    adapters = project / "data/06_models/adapters"
    history = pd.read_csv(adapters / "training.csv")
    rows = history[[name for name in history if not is_timing(str(name))]].to_csv()
    weights = {str(path.relative_to(adapters)): path.read_bytes() for path in adapters.rglob("*.safetensors")}
    return {"columns": list(history), "rows": rows, **weights}


def test_a_second_command_in_the_folder_is_refused_before_anything_is_touched(project: Path) -> None:
    first, _ = started(project, f"--pipeline=train --params={ENDLESS}", "train ")
    try:
        untouched = {path: path.stat().st_mtime_ns for path in (project / "data/07_model_output").rglob("*")}
        second = paste(".venv/bin/kedro run --pipeline=baseline", project)
        assert second.returncode == 1
        assert f"data is in use by another command, process {first.pid}" in second.stderr
        assert {path: path.stat().st_mtime_ns for path in (project / "data/07_model_output").rglob("*")} == untouched
        beside = paste(".venv/bin/kedro run --pipeline=generate --params=generate.prompt=circle", project)
        assert beside.returncode == 0, beside.stderr
        other = paste(".venv/bin/kedro run --pipeline=starter --params=output=data/another", project)
        assert other.returncode == 0, other.stderr
    finally:
        first.kill()
        first.wait()
    third = paste(".venv/bin/kedro run --pipeline=baseline", project)
    assert third.returncode == 0, third.stderr
