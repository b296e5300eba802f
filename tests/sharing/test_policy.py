"""A training by several processes is that by one."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.grpo.test_trainer import config
from tests.sharing.build import KINDS, toys
from tests.toys import CountingScorer, records
from visual_grpo.errors import UserError
from visual_grpo.grpo import packing
from visual_grpo.grpo.losses import LOSSES
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.policies.seeds import draw_seeds, share_of_seeds
from visual_grpo.sharing.policy import SharedPolicy
from visual_grpo.sharing.workers import WorkerDiedError, Workers, blocks


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that has ended and that nobody has waited for.
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0] != "Z"


class Crew:
    """Processes that are used for one training after the other; each starts with a new policy of the kind."""

    def __init__(self, kind: str, processes: int, **arguments: str) -> None:
        self.kind = kind
        self.workers = Workers(processes, toys, [{"kind": kind, **arguments}] * (processes - 1))

    def policies(self) -> tuple[Any, Any]:
        own = KINDS[self.kind]()
        return own, SharedPolicy("toy", own, self.workers)


@contextmanager
def crew(kind: str, processes: int, **arguments: str) -> Iterator[Crew]:
    made = Crew(kind, processes, **arguments)
    with made.workers:
        made.workers.wait_until_ready()
        yield made


@pytest.fixture(scope="module", params=[("SeededTokens", 2), ("SeededTokens", 3), ("SeededSteps", 2)], ids=str)
def several(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with crew(*request.param) as made:
        yield made


def trainer(policy: Any, dtype: str = "float32", **changes: Any) -> GRPOTrainer[Any]:
    settings = config(**({"steps": 4, "updates_per_rollout": 2, "kl_weight": 0.1} | changes))
    return GRPOTrainer(policy, CountingScorer(), settings, seed=1, dtype=dtype)


OPTIONS: list[dict[str, Any]] = [
    *({"loss": loss} for loss in sorted(LOSSES)),
    {"micro_batch_size": 4},
    {"prompts_per_step": 5, "rollout_prompts": 3},
    {"prompts_per_step": 1, "max_refills": 3, "group_size": 2, "loss": "dapo"},
    {"advantage_scale": "batch", "combine": "gdpo"},
    {"old_log_probs": "replay", "micro_batch_size": 5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parameters_and_metrics_are_those_of_one_process(several: Crew, options: dict[str, Any]) -> None:
    if options.get("loss") == "gspo" and several.kind == "SeededSteps":
        pytest.skip("gspo needs all steps in one chunk")
    alone = KINDS[several.kind]()
    expected = list(trainer(alone, **options).fit(records(10)))
    own, policy = several.policies()
    found = list(trainer(policy, **options).fit(records(10)))
    assert alone.table.abs().max() > 0.05
    torch.testing.assert_close(own.table, alone.table, rtol=0, atol=1e-6)
    for one, many in zip(expected, found, strict=True):
        for name, value in one.values.items():
            if not name.startswith(("seconds", "speed", "memory")) and name != "entropy":
                assert many.values[name] == pytest.approx(value, abs=2e-5), name
        assert [int(p.id[1:]) for p in many.prompts] == [int(p.id[1:]) for p in one.prompts]


@pytest.mark.parametrize("resumed_with", [1, 3])
def test_a_checkpoint_goes_on_with_another_number_of_processes(resumed_with: int) -> None:
    alone = KINDS["SeededTokens"]()
    list(trainer(alone).fit(records(10)))
    with crew("SeededTokens", 2) as two:
        _, policy = two.policies()
        begun = trainer(policy)
        next(begun.fit(records(10)))
        state = copy.deepcopy(begun.state())
    with crew("SeededTokens", resumed_with) as others:
        own, policy = others.policies()
        resumed = trainer(policy)
        resumed.load_state(*state)
        list(resumed.fit(records(10)))
    torch.testing.assert_close(own.table, alone.table, rtol=0, atol=1e-6)


def test_the_signal_check_sees_the_gradient_of_all(several: Crew) -> None:
    def gradient(policy: Any) -> torch.Tensor:
        return trainer(policy).policy_gradient(records(5), torch.Generator().manual_seed(3))

    torch.testing.assert_close(gradient(several.policies()[1]), gradient(KINDS[several.kind]()), rtol=0, atol=1e-6)


def test_what_a_process_measured_is_put_together() -> None:
    with crew("SeededTokens", 2) as two:
        _, policy = two.policies()
        stats = policy.rollout(records(3), 2, torch.Generator().manual_seed(0)).stats
    assert stats == {"entropy": (4 * 4 + 2 * 2) / 6, "seconds/tokens": 1.0, "speed/tokens_per_second": 4.0}


def test_trajectories_that_nobody_needs_are_dropped_everywhere() -> None:
    with crew("SeededTokens", 2) as two:
        _, policy = two.policies()
        for _ in range(5):
            policy.rollout(records(4), 2, torch.Generator().manual_seed(0))
        policy.new_names()
        assert not policy._held


def test_seeds_of_a_share_are_those_of_the_whole() -> None:
    generators = [torch.Generator().manual_seed(5) for _ in range(3)]
    whole = [draw_seeds(count, generators[0]) for count in (3, 12)]
    parts = []
    for generator, (start, own) in zip(generators[1:], blocks(3, 2), strict=True):
        with share_of_seeds(start, own, 3):
            parts.append([draw_seeds(count * own // 3, generator) for count in (3, 12)])
    assert [one + other for one, other in zip(*parts, strict=True)] == whole
    assert len({draw_seeds(1, generator)[0] for generator in generators}) == 1


@pytest.mark.parametrize(("count", "parts"), [(7, 3), (2, 4), (8, 2)])
def test_blocks_are_even_and_cover_everything(count: int, parts: int) -> None:
    found = blocks(count, parts)
    assert [place for start, number in found for place in range(start, start + number)] == list(range(count))
    assert max(number for _, number in found) - min(number for _, number in found) <= 1


@pytest.mark.parametrize(
    ("where", "kind", "said"),
    [
        ("rollout user", UserError, "process 2: the disk is full"),
        ("rollout memory", UserError, "process 2: Out of memory"),
        ("replay", RuntimeError, "ZeroDivisionError: a bug"),
    ],
)
def test_an_error_of_another_process_ends_the_training_here(where: str, kind: type[Exception], said: str) -> None:
    with crew("Failing", 2, where=where) as two:
        _, policy = two.policies()
        with pytest.raises(kind, match=said):
            list(trainer(policy).fit(records(10)))


def test_a_trajectory_that_cannot_be_sent_is_told_as_such() -> None:
    with crew("Unpackable", 2) as two:
        _, policy = two.policies()
        with pytest.raises(RuntimeError, match=r"a builtins\.object cannot be written"):
            policy.rollout(records(4), 2, torch.Generator().manual_seed(0))


def test_a_model_that_cannot_be_built_is_told_before_anything_begins() -> None:
    workers = Workers(2, toys, [{"kind": "SeededTokens", "where": "build"}])
    with workers, pytest.raises(UserError, match="process 2: no such model"):
        workers.wait_until_ready()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_has_just_started_is_not_stopped_by_a_signal(number: signal.Signals) -> None:
    """A terminal sends Ctrl-C to all processes; the first one decides."""
    workers = Workers(2, toys, [{"kind": "SeededTokens"}])
    os.kill(workers.others[0].pid, number)
    with workers:
        workers.wait_until_ready()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "nothing is held back here"


@pytest.mark.parametrize("phase", ["idle", "rollout"])
def test_a_killed_process_ends_the_training_and_leaves_none(phase: str) -> None:
    with crew("SeededTokens", 3) as three:
        _, policy = three.policies()
        pids = [other.pid for other in three.workers.others]
        fit = trainer(policy, steps=10_000).fit(records(10))
        next(fit)
        kill = threading.Timer(0.0 if phase == "idle" else 0.2, os.kill, (pids[1], signal.SIGKILL))
        kill.start()
        if phase == "idle":
            kill.join()
        started = time.monotonic()
        with pytest.raises(WorkerDiedError, match=r"Process 3 of this command \(pid \d+\) was ended by SIGKILL"):
            list(fit)
    assert time.monotonic() - started < 30
    assert not any(is_there(pid) for pid in pids)


def test_processes_end_with_the_first_one(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(
        "import os, signal, sys\n"
        "from tests.sharing.build import toys\n"
        "from visual_grpo.sharing.workers import Workers\n"
        "if __name__ == '__main__':\n"
        "    workers = Workers(3, toys, [{'kind': 'SeededTokens'}] * 2)\n"
        "    workers.wait_until_ready()\n"
        "    print(*[other.pid for other in workers.others], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": "."},
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 20
    while any(is_there(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_there(pid) for pid in pids)


def test_nothing_that_is_sent_can_be_executed() -> None:
    with pytest.raises(packing.CannotPackError):
        packing.pack({"do": print})
