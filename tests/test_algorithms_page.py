"""docs/algorithms.md: tables and formulas as they stand there, in plain loops, compared with the code."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from visual_grpo.common import decisions
from visual_grpo.common.decisions import GaussianLikelihoods
from visual_grpo.common.types import Rollout, Scores, TrainBatch
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo import signal_check
from visual_grpo.grpo.losses import LOSSES
from visual_grpo.grpo.optimizer import learning_rate_factor
from visual_grpo.grpo.policy_loss import PolicyLoss

PAGE = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text(encoding="utf-8")
S = 5
BETA = 0.3
Array = NDArray[np.float64]


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return scale * np.random.default_rng(seed).normal(size=shape)


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float32)


def rows_of_table(first: str) -> list[list[str]]:
    """The cells of the table whose head begins with ``first``, without backticks."""
    lines = PAGE.split(f"| {first} |", 1)[1].splitlines()[2:]
    table = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


@pytest.mark.parametrize("name", ["grpo", "gspo", "dppo", "dr_grpo", "dapo"])
def test_the_losses_and_their_aggregation(name: Any) -> None:
    rows = 6
    old, new = drawn(rows, S), drawn(rows, S) + drawn(rows, S, seed=1, scale=0.3)
    kl, advantages = abs(drawn(rows, S, seed=2)), drawn(rows, seed=3)
    moved = abs(drawn(rows, S, seed=5, scale=1e-5))
    mask = drawn(rows, S, seed=4) > -0.5
    mask[0] = False  # A row without a counted decision.
    kind: Any = LOSSES[name]
    counted: list[list[int]] = [np.flatnonzero(row).tolist() for row in mask]

    def loss(i: int, t: int) -> float:
        steps = counted[i] if kind.whole_rows else [t]
        ratio = np.exp(np.mean([new[i, s] - old[i, s] for s in steps]))
        if name == "dppo":
            farther = (ratio > 1 and advantages[i] > 0) or (ratio < 1 and advantages[i] < 0)
            surrogate = 0 if farther and moved[i, t] > 1e-5 else ratio * advantages[i]
        else:
            clipped = np.clip(ratio, 1 - kind.clip_low, 1 + kind.clip_high)
            surrogate = min(ratio * advantages[i], clipped * advantages[i])
        return float(-surrogate + BETA * kl[i, t])

    sums = [math.fsum(loss(i, t) for t in steps) for i, steps in enumerate(counted)]
    by_row = [total / len(steps) for total, steps in zip(sums, counted, strict=True) if len(steps)]
    want = {
        "grpo": np.mean(by_row),
        "gspo": np.mean(by_row),
        "dppo": np.mean(by_row),
        "dr_grpo": sum(sums) / (rows * S),
        "dapo": sum(sums) / mask.sum(),
    }[name]
    rollout: Rollout[None] = Rollout(
        prompts=(), samples=(), trajectory=None, log_probs=tensor(old), mask=torch.tensor(mask)
    )
    scores = Scores(total=torch.zeros(rows), rewards={}, parts={}, weights={})
    batch = TrainBatch(
        rollout=rollout,
        scores=scores,
        rows=torch.arange(rows),
        advantages=tensor(advantages),
        old_log_probs=tensor(old),
    )
    config = GRPOConfig(
        loss=name,
        steps=1,
        prompts_per_step=1,
        group_size=rows,
        learning_rate=1,
        kl_weight=BETA,
    )
    chunk = GaussianLikelihoods(
        steps=slice(0, S), log_probs=tensor(new), kl=tensor(kl), divergence=lambda: tensor(moved)
    )
    policy_loss = PolicyLoss(config, [batch])
    assert float(policy_loss(batch.compared(chunk, batch.rows), batch, batch.rows)[0]) == pytest.approx(want)


def test_the_tables() -> None:
    assert [row[0] for row in rows_of_table("scale")] == ["group", "batch", "batch_centred", "none"]
    stated = {row[0]: row[1:5] for row in rows_of_table("`grpo.loss`")}
    assert set(stated) == set(LOSSES)
    for name, kind in LOSSES.items():
        clips = [vars(kind()).get(clip) for clip in ("clip_low", "clip_high")]
        shown = ["none" if clip is None else f"{clip:f}".rstrip("0").rstrip(".") for clip in clips]
        ratio = "none" if name == "nft" else "per row" if kind.whole_rows else "per decision"
        assert stated[name] == [ratio, *shown, kind.advantage_scale]
    assert f"Log-ratios above {decisions.MAX_LOG_RATIO:g} are cut to {decisions.MAX_LOG_RATIO:g}" in PAGE


def test_the_signal_checks_cosine_and_its_error() -> None:
    g = drawn(7, 11) + drawn(11, seed=1, scale=0.3)
    scaled = g / (np.sqrt((g**2).mean(0)) + 1e-8)

    def mean_cosine(vectors: list[Array]) -> float:
        pairs = itertools.permutations(vectors, 2)
        return float(np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs]))

    without = np.array([mean_cosine([v for j, v in enumerate(scaled) if j != m]) for m in range(7)])
    error = np.sqrt(6 / 7 * ((without - without.mean()) ** 2).sum())
    got = signal_check.mean_of_pairs(signal_check.update_cosines(tensor(g)))
    assert got == pytest.approx((mean_cosine(list(scaled)), error), rel=1e-4)


def test_the_learning_rate() -> None:
    W, U = 3, 10
    assert [learning_rate_factor(u, U, W, "cosine") for u in range(W)] == [(u + 1) / W for u in range(W)]
    for u in range(W, U):
        p = (u - W) / (U - W)
        assert learning_rate_factor(u, U, W, "constant") == 1
        assert learning_rate_factor(u, U, W, "linear") == pytest.approx(1 - p)
        assert learning_rate_factor(u, U, W, "cosine") == pytest.approx((1 + np.cos(np.pi * p)) / 2)
