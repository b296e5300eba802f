"""Rows of a batch: repeated prompts, distinct records, numbers of sources, and random seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord, Share


def repeated(records: Sequence[PromptRecord], times: int) -> list[PromptRecord]:
    """Each record ``times`` times, in group-major order."""
    return [record for record in records for _ in range(times)]


def distinct(records: Sequence[PromptRecord]) -> tuple[list[PromptRecord], Tensor]:
    """The records with different prompt or sources, and [B] int64: row -> index among them."""
    index: dict[tuple[str, tuple[Path, ...]], int] = {}
    firsts: list[PromptRecord] = []
    rows = []
    for record in records:
        key = (record.prompt, record.source_images)
        if key not in index:
            index[key] = len(firsts)
            firsts.append(record)
        rows.append(index[key])
    return firsts, torch.tensor(rows)


def source_count(records: Sequence[PromptRecord]) -> int:
    """Returns the number of source images of each record of a batch; raises UserError if it differs."""
    first = records[0]
    for record in records:
        if len(record.source_images) != len(first.source_images):
            raise UserError(
                f"the records {first.id!r} and {record.id!r} of one batch have {len(first.source_images)} and"
                f" {len(record.source_images)} source images; a batch holds records with the same number"
            )
    return len(first.source_images)


def rows_by_source_count(records: Sequence[PromptRecord]) -> list[list[int]]:
    """Row numbers grouped by the number of source images: tensors of different groups differ in shape."""
    groups: dict[int, list[int]] = {}
    for row, record in enumerate(records):
        groups.setdefault(len(record.source_images), []).append(row)
    return list(groups.values())


SEED_RANGE = 2**62

START_NOISE = 0x5851F42D
STEP_NOISE = 0x2545F491
"""XORed into a seed, so that tokens (the seed itself), start noise and the noise of stochastic denoising steps are
independent. Below 2^32, since torch's CPU generator reads no higher bit of its seed.
"""


def random_seeds(count: int, generator: torch.Generator, share: Share | None = None) -> list[int]:
    """Makes ``count`` seeds by ``generator``, which thereby decides everything random in a rollout.

    With ``share`` the seeds of the whole rollout are made, and the share's are returned: every process leaves
    its generator in the same state.
    """
    start, total = 0, count
    if share is not None:
        per_prompt = count // share.size
        start, total = share.start * per_prompt, share.total * per_prompt
    seeds: list[int] = torch.randint(SEED_RANGE, (total,), generator=generator).tolist()
    return seeds[start : start + count]
