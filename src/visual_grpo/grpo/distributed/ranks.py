"""Collectives of the ranks, which all make these calls in the same order; a single process just computes."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from visual_grpo.common.device import in_thread
from visual_grpo.common.errors import LostRankError
from visual_grpo.grpo.distributed import sharding, silence

R = TypeVar("R")
TIMEOUT = timedelta(minutes=30)
"""After which a rank that does not answer counts as lost. Rank 0 may score for minutes while the other ranks wait."""


def count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def all_gather(compute: Callable[[], R]) -> list[R]:
    """Returns what ``compute`` gives on each rank; raises on all what it raises on any.

    Raises:
        LostRankError: a rank has ended, or does not answer within `TIMEOUT`.
    """
    own: list[R] = []
    with gathering(own) as answers:
        own.append(compute())
    return [value for (value,) in answers]


@contextmanager
def gathering(own: R) -> Iterator[list[R]]:
    """Gives the ``own`` of each rank as it is after the block; raises on all what the block raises on any.

    Raises:
        LostRankError: as `all_gather`.
    """
    gathered: list[R] = []
    error: Exception | None = None
    try:
        yield gathered
    except Exception as raised:
        error = raised
    if count() == 1:
        if error is not None:
            raise error
        gathered.append(own)
        return
    sharding.serve_gathers()
    # accelerate's gather_object asks its own state, which takes gloo's ranks for single processes by default.
    answers: list[Any] = [None] * count()
    collective(lambda: dist.all_gather_object(answers, (own, error and _sendable(error))))
    for number, (_, failed) in enumerate(answers):
        if failed is not None:
            raise error if error and number == rank() else failed
    gathered += [found for found, _ in answers]


def run_on_all(compute: Callable[[], R]) -> R:
    """Runs `all_gather`, but each rank keeps its value, which need not be sendable."""
    kept: list[R] = []
    all_gather(lambda: kept.append(compute()))
    return kept[0]


def broadcast(compute: Callable[[], R]) -> R:
    """Returns what ``compute`` gives on rank 0, the only one that calls it."""
    return all_gather(compute if rank() == 0 else lambda: None)[0]  # type: ignore[return-value]


def all_reduce(values: torch.Tensor) -> None:
    """Sums ``values`` over the ranks, in place."""
    collective(lambda: dist.all_reduce(values))


def block(number: int) -> slice:
    """This rank's block of ``number`` things; blocks are neighbours, as even as possible, empty ones last."""
    size, rest = divmod(number, count())
    start = rank() * size + min(rank(), rest)
    return slice(start, start + size + (rank() < rest))


def _sendable(error: Exception) -> Exception:
    told = f"Process {rank() + 1} of {count()} failed:\n{''.join(traceback.format_exception(error))}"
    error.add_note(told)
    try:
        copy.deepcopy(error)  # As pickling does, it fails where a constructor takes other arguments.
    except Exception:
        return RuntimeError(told)
    return error


def collective(call: Callable[[], object]) -> None:
    """Runs ``call`` in a thread, so that signals reach the main one while it waits; raises LostRankError."""
    try:
        with silence.waiting():
            in_thread(call, "collective").result()
    except RuntimeError as error:
        told = f"Another process of this command has ended, or does not answer: {str(error).splitlines()[0]}"
        raise LostRankError(f"{told}. How it ended is in its own output.") from error
