"""What rewards are like on groups of samples: scale, noise between seeds, agreement, cost; before money is spent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from visual_grpo.config import GRPOConfig
from visual_grpo.grpo.losses import variance_shares, zero_variance_groups
from visual_grpo.types import PromptRecord, Sample, Scores

TOTAL = "total"
DROWNED, EQUAL, SAME, UNSCORED = 0.05, 0.5, 0.95, 0.05
"""From where on a finding is told: a share of the advantages, of groups, a correlation, a share of samples."""
PER = 16
"""Samples that the seconds are of."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Groups of samples, and what the rewards say of them."""

    records: Sequence[PromptRecord]
    """[B], the samples of a prompt as neighbours, equally many of each."""
    samples: Sequence[Sample]
    scores: Scores
    again: Scores
    """The same samples, scored a second time."""
    seconds: Mapping[str, float]
    """Of each reward, for all samples."""

    @property
    def size(self) -> int:
        """Samples of a prompt."""
        return len(self.records) // len({record.id for record in self.records})


def measured(found: Scored, config: GRPOConfig) -> pd.DataFrame:
    """A row for each reward, and one for the total.

    Columns: reward, weight, mean, lowest, highest; ``between seeds``, the standard deviation within a group, averaged
    (what a training learns from); ``between prompts``, that of the groups' means; ``share of the advantages``
    (`variance_shares`); ``equal groups``, the share of groups whose scores do not differ; ``unscored``, a share of the
    samples; ``s for 16``, seconds; ``repeat``, the largest difference between two scorings of the same sample.
    """
    shares = variance_shares(
        found.scores.rewards,
        found.scores.weights,
        found.size,
        normalise=config.combine == "gdpo",
        epsilon=config.advantage_epsilon,
    )
    return pd.DataFrame(list(_rows(found, shares)))


def _rows(found: Scored, shares: Mapping[str, float]) -> Iterator[dict[str, object]]:
    pairs = {**found.scores.rewards, TOTAL: found.scores.total}
    again = {**found.again.rewards, TOTAL: found.again.total}
    for name, values in pairs.items():
        groups = values.double().view(-1, found.size)
        scored = values[~values.isnan()].double()
        yield {
            "reward": name,
            "weight": found.scores.weights.get(name, math.nan),
            "mean": _of(scored, torch.mean),
            "lowest": _of(scored, torch.min),
            "highest": _of(scored, torch.max),
            "between seeds": _mean([_deviation(group) for group in groups]),
            "between prompts": _deviation(groups.nanmean(1)),
            "share of the advantages": shares.get(name, math.nan),
            "equal groups": float(zero_variance_groups(values, found.size).float().mean()),
            "unscored": float(values.isnan().float().mean()),
            "s for 16": found.seconds.get(name, sum(found.seconds.values())) * PER / len(values),
            "repeat": _of((values - again[name]).abs()[~(values.isnan() | again[name].isnan())].double(), torch.max),
        }


def correlations(found: Scored) -> pd.DataFrame:
    """Pearson's correlation of the rewards' differences from their group's mean, [rewards, rewards]; NaN = no variance.

    Between prompts rewards agree because some prompts are easy; a training learns from differences within groups.
    """
    away = {name: within_groups(values, found.records).numpy() for name, values in found.scores.rewards.items()}
    return pd.DataFrame(away).corr()


def within_groups(values: Tensor, records: Sequence[PromptRecord]) -> Tensor:
    """[B] differences from the mean of the scored samples of the same prompt; NaN = unscored."""
    groups = values.double().view(-1, len(records) // len({record.id for record in records}))
    return (groups - groups.nanmean(1, keepdim=True)).reshape(-1)


def rows_of(found: Scored) -> pd.DataFrame:
    """A row for each sample: id, prompt, index within its group, total, each reward and its parts."""
    rows = pd.DataFrame(
        {
            "id": [record.id for record in found.records],
            "prompt": [record.prompt for record in found.records],
            "index": [row % found.size for row in range(len(found.records))],
        }
    )
    values = {TOTAL: found.scores.total, **found.scores.rewards, **found.scores.parts}
    return rows.assign(**{name: tensor.numpy() for name, tensor in values.items()})


def findings(table: pd.DataFrame, related: pd.DataFrame, config: GRPOConfig) -> list[str]:
    """What should be thought about before a training, in sentences."""
    rows = {row["reward"]: row for row in table.to_dict("records")}
    told = [sentence for row in rows.values() for sentence in _of_a_reward(row, config.combine)]
    weighted = [name for name, row in rows.items() if row["weight"] and not math.isnan(row["weight"])]
    for i, first in enumerate(weighted):
        for second in weighted[i + 1 :]:
            if abs(related.loc[first, second]) > SAME:
                how = "the same" if related.loc[first, second] > 0 else "the opposite"
                told.append(f"{first} and {second} say {how} of the samples of a prompt: one of them is enough.")
    samples = config.prompts_per_step * config.group_size
    seconds = rows[TOTAL]["s for 16"] * samples / PER
    return [*told, f"Scoring takes about {seconds:.2g} s of a training step with {samples} samples on this machine."]


def _of_a_reward(row: Mapping[Any, Any], combine: str) -> Iterator[str]:
    name, share = row["reward"], row["share of the advantages"]
    counts = name == TOTAL or (not math.isnan(row["weight"]) and row["weight"] != 0)
    if counts and row["equal groups"] >= EQUAL and row["unscored"] < 1:
        yield f"{name}: in {row['equal groups']:.0%} of the groups all samples score the same, which teaches nothing."
    if row["unscored"] > UNSCORED:
        yield f"{name}: {row['unscored']:.0%} of the samples could not be scored."
    if share <= -DROWNED:
        yield f"{name}: the other rewards work against it ({share:.0%} of the advantages)."
    elif share < DROWNED and row["between seeds"] > 0:  # No weight makes equal scores differ.
        remedy = "raise its weight" + (", or set grpo.combine=gdpo" if combine != "gdpo" else "")
        yield f"{name}: drowned by the other rewards ({max(share, 0.0):.0%} of the advantages); {remedy}."
    if name != TOTAL and row["repeat"] > 0:
        yield f"{name}: scored twice, the same sample differs by up to {row['repeat']:.2g}."


def _of(values: Tensor, measure: Callable[[Tensor], Tensor]) -> float:
    return float(measure(values)) if len(values) else math.nan


def _deviation(values: Tensor) -> float:
    """Of the numbers among them; NaN of fewer than two."""
    scored = values[~values.isnan()]
    return float(scored.std()) if len(scored) > 1 else math.nan


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
