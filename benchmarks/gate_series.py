"""Simulates years of promotion gates whose candidates all equal the champion, and single gates of better candidates.

Real scores of a finished project (its baseline and its trained model, eval sampler, held-out prompts) give the world:

- A prompt is one of the real ones, drawn with replacement, with the trained model's mean score and the deviations of
  its single images from that mean.
- A training moves each prompt's mean by a random amount whose expectation is 0, so that all trainings are equal. The
  prompts that training moved most from the baseline are moved most. ``--spread`` is the variance of the difference of
  two trainings at a prompt.
- All trainings draw with the same seeds. So images of a seed are correlated within a prompt as those of baseline and
  trained model are.

In each series every gate of the year sees the same prompts and seeds; a candidate that is promoted, falsely, is the
champion of the next gate. The bound is `paired.t_interval`, as in `gate.decide`; every promotion and one more gate a
week are judged by `gate.decide` itself, and the two must agree.

Other tables say how many prompts a gain needs, and how often one gate promotes a candidate that is as good as the
champion on average because it gains a little on most prompts and fails on few.

    python benchmarks/gate_series.py
    python benchmarks/gate_series.py --folder CLONE/data/07_model_output --series 500 --prompts 34
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import binomtest

from visual_grpo.config import GateRule
from visual_grpo.evaluation.comparison import EVAL_SAMPLER, join
from visual_grpo.evaluation.gate import decide
from visual_grpo.evaluation.paired import POWER, detectable_gain, t_interval, units_needed
from visual_grpo.evaluation.samples import read_scores

Values = NDArray[np.float64]
PLAIN = GateRule(error=0.025, gates_per_year=1)
"""A two-sided 95% interval above 0, as if the gate were the only one."""
SINGLE_GATES = 10_000
"""How many gates the simulated gain is a quantile of."""
GAINS = (0.01, 0.02, 0.05)
RARE, SMALL_GAIN = 0.05, 0.02
"""Share of prompts on which a candidate fails, and what it gains on each of the others."""


@dataclass(frozen=True)
class World:
    """What a series is drawn from: P real prompts with m images each."""

    means: Values
    """[P] the trained model's mean score."""
    deviations: Values
    """[P, m] of single images from the mean, scaled to the variance of an image."""
    effects: Values
    """[P] standard deviation of what one training does to a prompt's mean."""
    correlation: float
    """Of images of the same seed and prompt from two models."""

    @classmethod
    def of(cls, folder: Path, spread: float) -> World:
        pairs = join(read_scores(folder / "baseline"), read_scores(folder / "trained"))
        pairs = pairs[(pairs["sampler"] == EVAL_SAMPLER) & (pairs["split"] == "held_out")].sort_values(["id", "index"])
        images = pairs["index"].nunique()
        before, after = (
            pairs[f"total_{side}"].to_numpy(np.float64).reshape(-1, images) for side in ("baseline", "trained")
        )
        if np.isnan(before).any() or np.isnan(after).any():
            raise SystemExit(f"{folder}: some samples could not be scored, and the simulation needs every score")
        own, base = (side - side.mean(1, keepdims=True) for side in (after, before))
        moved = np.abs((after - before).mean(1) - (after - before).mean())
        return cls(
            means=after.mean(1),
            deviations=own * math.sqrt(images / (images - 1)),
            effects=moved * math.sqrt(spread / 2 / np.mean(moved**2)),
            correlation=float(np.corrcoef(own.ravel(), base.ravel())[0, 1]),
        )


class Prompts:
    """The held-out prompts of S independent series, n each, and how trainings score on them."""

    def __init__(self, world: World, series: int, prompts: int, generator: np.random.Generator) -> None:
        self.world, self.generator = world, generator
        self.ids = generator.integers(len(world.means), size=(series, prompts))
        self.seeds = self._deviations()

    def training(self) -> Values:
        """[S, n, m] scores of another training.

        Each image takes the deviation of its seed or one of its own, so often that two trainings have the real
        correlation.
        """
        own = self._deviations()
        of_seed = self.generator.random(own.shape) < math.sqrt(max(self.world.correlation, 0.0))
        effects = self.world.effects[self.ids] * self.generator.standard_normal(self.ids.shape)
        return (self.world.means[self.ids] + effects)[..., None] + np.where(of_seed, self.seeds, own)

    def _deviations(self) -> Values:
        images = self.world.deviations.shape[1]
        drawn = self.generator.integers(images, size=(*self.ids.shape, images))
        return self.world.deviations[self.ids[..., None], drawn]


def main() -> None:
    arguments = _arguments()
    rule = GateRule(error=arguments.error, gates_per_year=arguments.gates)
    print(
        f"| prompts | variance between trainings | years with a false promotion, gates at 95% |"
        f" at {rule.error:.0%} / {rule.gates_per_year} [95%] | gain detected in {POWER:.0%}, simulated | formula |\n"
        "|---|---|---|---|---|---|"
    )
    spreads, failing = {}, []
    for spread in arguments.spread:
        world = World.of(arguments.folder, spread)
        for prompts in arguments.prompts:
            generator = np.random.default_rng([arguments.seed, prompts, round(spread * 1e6)])
            plain, false = false_promotions(world, prompts, arguments.series, rule, generator)
            gain, sd = simulated_gain(world, prompts, rule, generator)
            spreads[spread] = sd
            formula = detectable_gain(sd, prompts, rule.alpha)
            cells = [
                f"{prompts} | {spread}",
                f"{plain / arguments.series:.3f} | {_share(false, arguments.series)}",
                f"{gain:.3f} | {formula:.3f}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
            promoted = promoted_with_rare_failures(world, prompts, rule, generator)
            failing.append(f"| {cells[0]} | {_share(promoted, SINGLE_GATES)} |")
    print(f"\n{needed(spreads, rule)}\n")
    change = f"+{SMALL_GAIN} on {1 - RARE:.0%} of the prompts and {-_loss():.2f} on the others"
    head = f"| prompts | variance between trainings | gates that promote {change} [95%] |"
    print("\n".join([head, "|---|---|---|", *failing]))


def false_promotions(
    world: World, prompts: int, series: int, rule: GateRule, generator: np.random.Generator
) -> tuple[int, int]:
    """In how many of the series a candidate was promoted: with gates as of `PLAIN`, and as of ``rule``."""
    drawn = Prompts(world, series, prompts, generator)
    first = drawn.training()
    champions, false = [first.copy(), first], [np.zeros(series, bool), np.zeros(series, bool)]
    for _ in range(rule.gates_per_year):
        candidate = drawn.training()
        for number, (each, champion) in enumerate(zip((PLAIN, rule), champions, strict=True)):
            bounds = lower_bounds(candidate, champion, each)
            promoted = bounds > each.margin
            if each is rule:
                for one in {*np.flatnonzero(promoted), int(generator.integers(series))}:
                    check(candidate[one], champion[one], rule, bounds[one])
            champion[promoted] = candidate[promoted]
            false[number] |= promoted
    return int(false[0].sum()), int(false[1].sum())


def simulated_gain(world: World, prompts: int, rule: GateRule, generator: np.random.Generator) -> tuple[float, float]:
    """The gain that single gates detect with a probability of `POWER`, and the standard deviation of a prompt's
    difference.

    A gain for every image raises the bound by exactly that, so a quantile of the bounds of equals is enough.
    """
    bounds, variances = [], []
    for candidate, champion in _single_gates(world, prompts, generator):
        bounds.append(lower_bounds(candidate, champion, rule))
        variances.append((candidate - champion).mean(-1).var(-1, ddof=1))
    return float(np.quantile(-np.concatenate(bounds), POWER)), math.sqrt(np.mean(variances))


def promoted_with_rare_failures(world: World, prompts: int, rule: GateRule, generator: np.random.Generator) -> int:
    """How many of `SINGLE_GATES` candidates are promoted that gain `SMALL_GAIN` on most prompts and lose as much in all
    on the others."""
    promoted = 0
    for candidate, champion in _single_gates(world, prompts, generator):
        fails = generator.random(candidate.shape[:2]) < RARE
        changed = candidate + np.where(fails, -_loss(), SMALL_GAIN)[..., None]
        promoted += int((lower_bounds(changed, champion, rule) > rule.margin).sum())
    return promoted


def _loss() -> float:
    return SMALL_GAIN * (1 - RARE) / RARE


def _single_gates(world: World, prompts: int, generator: np.random.Generator) -> Iterator[tuple[Values, Values]]:
    """Scores of equals, [1000, n, m] each, `SINGLE_GATES` in all."""
    for _ in range(SINGLE_GATES // 1000):
        drawn = Prompts(world, 1000, prompts, generator)
        yield drawn.training(), drawn.training()


def lower_bounds(candidate: Values, champion: Values, rule: GateRule) -> Values:
    """[S] from scores [S, n, m]: of each series the bound that `decide` would have."""
    return t_interval((candidate - champion).mean(-1), 1 - 2 * rule.alpha)[0]


def check(candidate: Values, champion: Values, rule: GateRule, bound: float) -> None:
    """Raises an error unless `decide` has the same bound and decision."""
    decision = decide(_table(candidate), {"champion": _table(champion)}, rule)
    if decision.promoted != (bound > rule.margin) or not math.isclose(
        decision.conditions[0].bound, bound, abs_tol=1e-9
    ):
        raise RuntimeError(f"the simulated bound is {bound}, but the gate says: {decision.sentence}")


def _table(scores: Values) -> pd.DataFrame:
    """Scores [n, m] as `read_scores` gives them."""
    prompts, images = scores.shape
    ids = [f"p{number}" for number in range(prompts)]
    table = pd.DataFrame({"id": np.repeat(ids, images), "index": np.tile(np.arange(images), prompts)})
    table = table.assign(sampler=EVAL_SAMPLER, split="held_out", prompt=table["id"], seed=table["index"])
    table["total"] = table["reward/simulated"] = scores.ravel()
    table.attrs = {"weights": {"simulated": 1.0}}
    return table


def needed(spreads: dict[float, float], rule: GateRule) -> str:
    """Prompts that a gain needs, for a single gate at 95% and for the year's gates."""
    lines = [
        f"| gain | variance between trainings | prompts for a single gate at 95% |"
        f" for {rule.gates_per_year} gates at {rule.error:.0%} / {rule.gates_per_year} |",
        "|---|---|---|---|",
    ]
    for gain in GAINS:
        for spread, sd in spreads.items():
            single, repeated = (units_needed(gain, sd, each.alpha) for each in (PLAIN, rule))
            lines.append(f"| {gain} | {spread} | {single} | {repeated} |")
    return "\n".join(lines)


def _share(count: int, of: int) -> str:
    interval = binomtest(count, of).proportion_ci()
    return f"{count / of:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("data/07_model_output"), help="with the scores in baseline/ and trained/"
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=[34, 100, 400])
    parser.add_argument(
        "--spread",
        type=float,
        nargs="+",
        default=[0.0011, 0.0041],
        help="variance of the difference of two trainings at a prompt; default: measured on the demo with another"
        " training seed, and with another base model too",
    )
    parser.add_argument("--series", type=int, default=2000, help="simulated years")
    parser.add_argument("--gates", type=int, default=52, help="gates a year")
    parser.add_argument("--error", type=float, default=0.05, help="probability of a false promotion in a year")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
