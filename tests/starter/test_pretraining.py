"""The optimiser loop, and processes that report, fail, and never outlive their caller."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from tests.starter import tasks
from visual_grpo.common.errors import UserError
from visual_grpo.starter import pretraining
from visual_grpo.starter.pretraining import Job, minimise, run_side_by_side, write_dataset, write_once

ROOT = Path(__file__).parents[2]
CALLER = """
import sys
from functools import partial
from pathlib import Path
from tests.starter import tasks
from visual_grpo.starter.pretraining import run_side_by_side

if __name__ == "__main__":
    run_side_by_side([partial(tasks.tell_pid_and_go_on, Path(sys.argv[1]))], 1, lambda name, done: None)
"""


def has_ended(file: Path) -> bool:
    """Whether the process whose id is in the file has ended."""
    try:
        os.kill(int(file.read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(condition: Callable[[], object], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("place", ["photos", "photos/0.png"])
def test_what_the_starter_has_not_written_is_never_replaced(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    photo = tmp_path / "photos/0.png"
    photo.parent.mkdir()
    photo.write_bytes(b"a photo")
    with pytest.raises(UserError, match=r"The starter would replace .*photos"):
        write_dataset(tmp_path / place, {}, (), lambda fresh: [])
    with pytest.raises(UserError, match=r"data\.path or model\.path"):
        write_once(tmp_path / place, {}, lambda fresh: {}, even_if_there=True)
    assert photo.read_bytes() == b"a photo"
    photo.unlink()
    write_dataset(tmp_path / "photos", {}, (), lambda fresh: [])  # An empty folder, and the starter's own.
    assert not capsys.readouterr().out
    write_dataset(tmp_path / "photos", {"seed": 1}, (), lambda fresh: [])
    assert "photos, which it made with other parameters" in capsys.readouterr().out


def test_a_task_tells_its_steps_in_order_until_ctrl_c_ends_its_process(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def noted(name: str, done: int) -> None:
        seen.append((name, done))
        if len(seen) > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_side_by_side([partial(tasks.tell_pid_and_go_on, tmp_path / "pid")], 1, noted)
    assert seen == [("endless", step) for step in range(4)]
    assert has_ended(tmp_path / "pid")


@pytest.mark.slow  # As below, with real processes.
def test_a_failure_is_raised_with_its_traceback_and_ends_the_others(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    both = [partial(tasks.tell_pid_and_go_on, file), partial(tasks.fail_once_there, file)]
    with pytest.raises(ProcessRaisedException, match="the ink has run out"):
        run_side_by_side(both, 2, lambda name, done: None)
    assert has_ended(file)


@pytest.mark.slow  # As below, with a real process.
def test_a_process_that_dies_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"ended without a result .*SIGKILL.* if memory runs out"):
        run_side_by_side([partial(tasks.die, signal.SIGKILL)], 2, lambda name, done: None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_memory_is_blamed_for_no_other_signal_than_sigkill(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def join(poll: float) -> bool:
        raise ProcessExitedException(
            "process 0", error_index=0, error_pid=7, exit_code=-number, signal_name=number.name
        )

    ended = SimpleNamespace(join=join, processes=[])
    monkeypatch.setattr(pretraining, "start_processes", lambda *args, **settings: ended)
    with pytest.raises(RuntimeError, match="ended without a result") as told:
        run_side_by_side([partial(tasks.count, "a", 1)], 1, lambda name, done: None)
    assert ("if memory runs out" in str(told.value)) == (number == signal.SIGKILL)


def test_tasks_start_in_their_order_and_a_failure_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    started, other = list[Any](), Mock()
    joined = Mock(side_effect=[True, ProcessRaisedException("the ink has run out", 0, 7)])

    def start(run: object, arguments: Any, **settings: Any) -> Mock:
        started.append(arguments[0])
        return Mock(join=joined, processes=[other])

    monkeypatch.setattr(pretraining, "start_processes", start)
    of_a, of_b, of_c = (partial(tasks.count, name, 1) for name in "abc")
    with pytest.raises(ProcessRaisedException, match="the ink has run out"):
        run_side_by_side([of_a, of_b, of_c], 2, lambda name, done: None)
    assert started == [[of_a, of_b], [of_c]]
    assert [call[0] for call in other.method_calls] == ["terminate", "join"] * 2


def test_a_process_ends_after_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(is_alive=lambda: False))
    monkeypatch.setattr(os, "_exit", sys.exit)
    messages: Any = queue.SimpleQueue()
    with pytest.raises(SystemExit):
        pretraining._run(0, [partial(tasks.count, "a", 1)], messages)
    assert messages.empty()


@pytest.mark.slow  # As above, without real processes.
def test_no_process_outlives_a_killed_caller(tmp_path: Path) -> None:
    file, caller = tmp_path / "pid", tmp_path / "caller.py"
    caller.write_text(CALLER)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    with subprocess.Popen(
        [sys.executable, str(caller), str(file)], env=environment, stderr=subprocess.DEVNULL
    ) as process:
        assert wait_until(lambda: file.is_file() and file.read_text())
        process.kill()
    assert wait_until(lambda: has_ended(file))


def test_the_learning_rate_rises_and_falls_and_every_step_is_reported() -> None:
    weight, unused, reported = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1)), list[tuple[str, int]]()
    moves: list[float] = []

    def backward() -> None:
        moves.append(weight.item())
        (-1000 * weight).sum().backward()

    job = Job(folder=Path("unused"), height=32, width=32, seed=0, steps={"dit": 4})
    minimise(
        backward, [weight, unused], job, "dit", lambda *done: reported.append(done), peak_learning_rate=0.1, warmup=2
    )
    assert reported == [("dit", step) for step in (1, 2, 3, 4)]
    # Adam moves by the learning rate where the gradient never changes: 0.1 * rise * (1 - 0.97 * step / 4).
    steps = torch.tensor([*moves, weight.item()]).diff()
    expected = [0.1 * 0.5, 0.1 * (1 - 0.97 / 4), 0.1 * (1 - 0.97 / 2), 0.1 * (1 - 0.97 * 3 / 4)]
    assert steps.tolist() == pytest.approx(expected, rel=2e-2)
    assert unused.item() == 1
