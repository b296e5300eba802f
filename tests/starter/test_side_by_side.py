"""Processes that report, fail, and never outlive their caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import ProcessRaisedException

from tests.starter import tasks
from visual_grpo.starter.side_by_side import run_side_by_side

ROOT = Path(__file__).parents[2]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: object, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("at_once", [1, 2])
def test_every_task_runs_and_reports_in_order(at_once: int) -> None:
    seen: dict[str, list[int]] = {"a": [], "b": []}
    both = [partial(tasks.count, name, 3) for name in seen]
    run_side_by_side(both, at_once, lambda name, done: seen[name].append(done))
    assert seen == {"a": [1, 2, 3], "b": [1, 2, 3]}


def test_a_failure_is_raised_with_its_traceback_and_ends_the_others(tmp_path: Path) -> None:
    other = partial(tasks.tell_pid_and_go_on, tmp_path / "pid")

    def fail_once_the_other_runs(name: str, done: int) -> None:
        raise InterruptedError

    with pytest.raises(ProcessRaisedException, match="the ink has run out"):
        run_side_by_side([tasks.fail], 2, lambda name, done: None)
    with pytest.raises(InterruptedError):
        run_side_by_side([other], 2, fail_once_the_other_runs)
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_process_that_dies_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"ended without a result .*exit code 9.*too little memory"):
        run_side_by_side([tasks.die], 2, lambda name, done: None)


def heed_ctrl_c() -> None:
    """A shell's background jobs, and so their children, start with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_a_stopped_caller(tmp_path: Path, how: signal.Signals) -> None:
    file = tmp_path / "pid"
    caller = tmp_path / "caller.py"
    caller.write_text(
        "from functools import partial\nfrom pathlib import Path\n"
        "from tests.starter import tasks\nfrom visual_grpo.starter.side_by_side import run_side_by_side\n"
        "if __name__ == '__main__':\n"
        f"    task = partial(tasks.tell_pid_and_go_on, Path({str(file)!r}))\n"
        "    run_side_by_side([task], 1, lambda name, done: None)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    command = [sys.executable, str(caller)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, preexec_fn=heed_ctrl_c) as process:
        assert wait_until(lambda: file.is_file() and file.read_text())
        process.send_signal(how)
        try:
            process.wait(timeout=30)
        finally:
            process.kill()
    assert wait_until(lambda: not is_running(int(file.read_text())))
