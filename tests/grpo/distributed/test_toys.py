"""A training by several processes is that by one; an error or the end of any ends all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.grpo.distributed import toys
from visual_grpo.common.errors import LostRankError
from visual_grpo.common.types import Rollout
from visual_grpo.grpo.distributed import ranks, torchrun
from visual_grpo.grpo.distributed.rollouts import _joined
from visual_grpo.grpo.losses import LOSSES

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that has ended and that nobody has waited for.
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0] != "Z"


def run(folder: Path, processes: int, *jobs: toys.Job) -> None:
    program = [sys.executable, str(toys.command(folder, processes, jobs))]
    done = subprocess.run(program, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def run_until_killed(folder: Path, victim: int, processes: int, *jobs: toys.Job) -> None:
    """Runs the jobs, and then one in which process ``victim`` is killed, which ends all."""
    with pytest.raises(AssertionError) as raised:
        run(folder, processes, *jobs, toys.Job(toys.wait, {"victim": victim, "notes": str(folder)}))
    pids = [int((folder / str(rank)).read_text()) for rank in range(processes)]
    assert not any(is_there(pid) for pid in pids)
    last = str(raised.value).partition("\nassert ")[0].strip().splitlines()[-1]
    told = f"Process {victim + 1} of this command (pid {pids[victim]}) terminated with signal"
    assert f"{told} SIGKILL. The system sends it if memory runs out" in last


def test_a_joined_rollout_has_the_turns_of_its_parts_and_means_over_all_their_rows() -> None:
    def part(rows: int, number: float) -> Rollout[None]:
        samples: Any = [torch.zeros(3, 1, 1)] * rows
        stats = dict.fromkeys(("seconds/tokens", "speed/tokens_per_second", "entropy"), number)
        ones: Any = {"log_probs": torch.zeros(rows, 2), "mask": torch.ones(rows, 2) > 0}
        return Rollout(prompts=(), samples=samples, trajectory=None, stats=stats, turns=[[0], [1]], **ones)

    joined = _joined([part(3, 1.0), part(1, 5.0)], None)
    assert joined.turns == [[0], [1]]
    assert joined.stats == {"seconds/tokens": 5.0, "speed/tokens_per_second": 6.0, "entropy": 2.0}


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_listen_on_the_loopback_give_the_results_of_one_and_end_together(
    processes: int, tmp_path: Path
) -> None:
    """Also those of a sharded model, the error of a single rank, and where they listen: processes start in seconds."""
    losses = ["gspo"] if processes == 2 else sorted(LOSSES)  # Whole rows; dapo, of all tokens, is one of the options.

    def train(kind: str, sharded: bool = False) -> toys.Job:
        return toys.Job(toys.train_every_way, {"kind": kind, "losses": losses}, sharded)

    kinds = ["SeededTokens"] if processes == 2 else ["SeededTokens", "SeededSteps"]
    jobs = [*map(train, kinds), toys.Job(toys.signal_gradient), train("LayeredTokens", True)]
    *alone, gradient, whole = [job.compute(None, **job.arguments) for job in jobs]
    more = toys.Job(toys.listening), toys.Job(toys.an_error_that_is_caught)
    run_until_killed(tmp_path, 1, processes, *jobs, *more)
    *together, same, sharded, listening, told = toys.results(tmp_path)
    assert re.fullmatch(rf"the disk is full\nProcess 2 of {processes} failed:\nTraceback (?s:.*)", told)
    for (one, _), (many, _) in zip(whole, sharded, strict=True):
        torch.testing.assert_close(many, one, rtol=0, atol=1e-6)
    loopback = ("0100007F:", "00000000000000000000000001000000:")  # 127.0.0.1 and ::1: nobody else may connect.
    assert len(listening) == processes + 1
    assert all(address.startswith(loopback) for own in listening.values() for address in own), listening
    torch.testing.assert_close(same, gradient, rtol=0, atol=1e-6)
    for one, many in zip(chain(*alone), chain(*together), strict=True):
        assert one[0].abs().max() > 0.05
        torch.testing.assert_close(many[0], one[0], rtol=0, atol=1e-6)
        for step, other in zip(one[1], many[1], strict=True):
            for name, value in step.values.items():
                if not name.startswith(("seconds", "speed", "memory")) and name != "entropy":
                    assert other.values[name] == pytest.approx(value, abs=2e-5), name
            assert [prompt.id for prompt in other.prompts] == [prompt.id for prompt in step.prompts]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("user", "UserError: the disk is full"),
        ("memory", "MemoryError: no more"),
        ("bug", "ZeroDivisionError: a bug"),
        ("alone", "UserError: only here"),
    ],
)
def test_an_error_of_any_rank_ends_all(how: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=said) as raised:
        run(tmp_path, 2, toys.Job(toys.fail, {"how": how}))
    if how == "alone":
        assert re.search(r"Process 2 of this command \(pid \d+\) ended with exit code 1\.\n", str(raised.value))
    else:
        assert str(raised.value).count("Process 2 of 2 failed") == 1


@pytest.mark.slow
def test_a_silent_process_is_told_of_and_given_up(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as raised:
        run(tmp_path, 2, toys.Job(toys.say_nothing, {"seconds": 8}))
    told = re.findall(r"Other processes of this command have not answered for \d s", str(raised.value))
    assert told
    assert "has ended, or does not answer: " in str(raised.value)
    assert "Timed out waiting 4000ms" in str(raised.value)


@pytest.mark.slow
def test_another_killed_process_ends_all(tmp_path: Path) -> None:
    """The first, while one waits and one computes; the second: above."""
    run_until_killed(tmp_path, 0, 3)


@pytest.mark.slow  # What is said: below.
def test_the_output_of_a_process_that_aborts_is_shown_and_memory_is_not_blamed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as raised:
        run(tmp_path, 2, toys.Job(toys.abort))
    assert "terminate called: a broken pipe" in str(raised.value)
    assert re.search(r"Process 2 of this command \(pid \d+\) terminated with signal SIGABRT\.\n", str(raised.value))
    assert "memory" not in str(raised.value).partition("\nassert ")[0]


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (-signal.SIGABRT, "terminated with signal SIGABRT."),
        (-signal.SIGKILL, "terminated with signal SIGKILL. The system sends it if memory runs out: each process has"),
        (3, "ended with exit code 3."),
    ],
)
def test_how_a_process_ended_is_said_with_its_own_output(
    code: int, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run/attempt/1").mkdir(parents=True)
    (tmp_path / "run/attempt/1/stderr.log").write_text("a broken pipe")
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=code, error_file="")
    with pytest.raises(LostRankError, match=re.escape(f"Process 2 of this command (pid 7) {how}")) as raised:
        torchrun._report(ChildFailedError("kedro", {1: failure}), tmp_path)
    assert ("memory" in str(raised.value)) == (code == -signal.SIGKILL)
    assert capsys.readouterr().err == "a broken pipe"


@pytest.mark.parametrize(("number", "parts"), [(7, 3), (2, 4), (8, 2)])
def test_blocks_are_even_and_cover_everything(number: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "count", lambda: parts)
    found = []
    for rank in range(parts):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        found.append(list(range(number))[ranks.block(number)])
    assert [place for own in found for place in own] == list(range(number))
    assert max(map(len, found)) - min(map(len, found)) <= 1
