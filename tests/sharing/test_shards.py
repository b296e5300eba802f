"""A model of which each process has a part trains as one that every process has whole."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.sharing.build import LayeredTokens, LayeredWhole, toys
from tests.sharing.test_policy import OPTIONS, is_there, trainer
from tests.test_training import parameters
from tests.toys import records
from visual_grpo.errors import UserError
from visual_grpo.policies.families import find_family
from visual_grpo.policies.family_settings import check_family
from visual_grpo.sharing.policy import SharedPolicy
from visual_grpo.sharing.workers import WorkerDiedError, Workers


@contextmanager
def crew(processes: int) -> Iterator[tuple[LayeredTokens, Any, Workers]]:
    """The first process's own policy, and the one that all share."""
    given = {"kind": "LayeredTokens", "device": "cpu"}
    with Workers(processes, toys, [given] * (processes - 1), sharded_on="cpu") as workers:
        own = LayeredTokens()
        workers.wait_until_ready()
        yield own, SharedPolicy("toy", own, workers), workers


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_parameters_are_those_of_one_process_with_the_whole_model(processes: int) -> None:
    with crew(processes) as (own, _, workers):
        weight: Any = own.layers[0].weight
        assert isinstance(weight, DTensor)
        assert (weight.shape, weight.to_local().shape) == ((5, 5), (-(-5 // processes), 5))
        start = own.table.detach().clone()
        for options in OPTIONS:
            alone = LayeredWhole()
            list(trainer(alone, **options).fit(records(10)))
            own.table.data = start.clone()
            list(trainer(SharedPolicy("toy", own, workers), **options).fit(records(10)))
            assert all(isinstance(value, DTensor) for value in own.network.parameters()), "some layers are left whole"
            assert (alone.table - start).abs().max() > 0.05
            torch.testing.assert_close(own.table, alone.table, rtol=0, atol=1e-6)


def test_a_checkpoint_of_one_process_goes_on_in_parts() -> None:
    alone = LayeredTokens()
    begun = trainer(alone)
    steps = begun.fit(records(10))
    next(steps)
    state = copy.deepcopy(begun.state())
    list(steps)
    with crew(2) as (own, policy, _):
        resumed = trainer(policy)
        resumed.load_state(*state)
        list(resumed.fit(records(10)))
    torch.testing.assert_close(own.table, alone.table, rtol=0, atol=1e-6)


def test_an_answer_that_is_larger_than_what_a_pipe_holds_waits_for_nobody() -> None:
    with crew(2) as (_, policy, _):
        rollout = policy.rollout(records(4), 5000, torch.Generator().manual_seed(0))
    assert len(rollout.samples) == 20_000


def test_an_error_in_the_first_process_keeps_no_other_waiting() -> None:
    with crew(2) as (own, policy, workers):

        def fails(*_: object) -> Any:
            raise UserError("the disk is full")

        own.rollout = fails  # type: ignore[method-assign, assignment]
        with pytest.raises(UserError, match="the disk is full"):
            policy.rollout(records(4), 2, torch.Generator().manual_seed(0))
        started = time.monotonic()
        workers.wait_until_ready()
        assert time.monotonic() - started < 10


@pytest.mark.parametrize("after", [0.0, 0.3])
def test_a_killed_process_ends_the_training(after: float) -> None:
    killed: list[float] = []
    with pytest.raises(WorkerDiedError, match=r"Process 3 of this command \(pid \d+\) was ended by SIGKILL"):
        _train_until_killed(after, killed)
    at, *pids = killed
    assert time.monotonic() - at < 30
    assert not any(is_there(int(pid)) for pid in pids)


def _train_until_killed(after: float, killed: list[float]) -> None:
    """Appends when the third process was killed, and the numbers of all."""
    with crew(3) as (_, policy, workers):
        pids = [other.pid for other in workers.others]
        fit = trainer(policy, steps=10_000).fit(records(10))
        next(fit)
        threading.Timer(after, os.kill, (pids[1], signal.SIGKILL)).start()
        killed += [time.monotonic(), *pids]
        list(fit)


def test_a_process_that_is_killed_before_all_are_there_ends_it_at_once() -> None:
    given = {"kind": "LayeredTokens", "device": "cpu"}
    workers = Workers(3, toys, [given] * 2, sharded_on="cpu")
    os.kill(workers.others[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"Process 3 .* was ended by SIGKILL"), workers:
        pass
    assert not any(is_there(other.pid) for other in workers.others)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"offload": "phases"}}, "nothing that could take turns"),
        ({"model": {"base_weights": "4bit"}}, "not codes of fewer bits"),
        ({"policy": {"kv_cache": "static"}}, "Set policy.kv_cache to growing"),
    ],
)
def test_what_parts_of_a_model_cannot_do_is_refused(
    changes: dict[str, dict[str, Any]], said: str, tmp_path: Path
) -> None:
    distributed = {"processes": 2, "sharded": True}
    config = parameters(tmp_path, distributed=distributed)
    config = config.model_copy(
        update={name: getattr(config, name).model_copy(update=own) for name, own in changes.items()}
    )
    with pytest.raises(UserError, match=said):
        check_family(find_family("glm_image"), config)


def test_one_process_has_nobody_to_share_a_model_with(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sharded needs processes of at least 2"):
        parameters(tmp_path, distributed={"sharded": True})
