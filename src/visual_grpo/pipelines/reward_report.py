"""Generates groups of samples and says what the rewards are like: scale, noise between seeds, agreement, cost; before
money is spent."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from kedro.pipeline import Node, Pipeline
from PIL.Image import Image

from visual_grpo.common import console
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.files import write_csv
from visual_grpo.common.types import PromptRecord, Sample, Scores
from visual_grpo.config import GRPOConfig
from visual_grpo.data.manifest import RecordTable
from visual_grpo.evaluation.pictures import beside, caption, grid, of_sample
from visual_grpo.evaluation.samples import distinct_prompts, generate_batches, requests
from visual_grpo.grpo.advantages import zero_variance_share
from visual_grpo.grpo.metrics import variance_shares
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training import components


def create_pipeline() -> Pipeline:
    return Pipeline(
        [
            Node(
                report_rewards,
                ["params:run_spec", "base_model", "records", "draft"],
                "reward_report",
                name="report_rewards",
            )
        ],
        tags=["apart", "training", "rewards"],
    )


TOTAL = "total"
DROWNED, EQUAL, SAME, UNSCORED = 0.05, 0.5, 0.95, 0.05
"""Thresholds of the findings: a share of the advantages, of groups, a correlation, a share of samples."""
PER = 16
"""Samples that the seconds are of."""
_BESIDE = 4
"""Samples of each reward in the picture, of the best and of the worst."""
_COLUMNS = {
    "reward": "{}",
    "weight": "{:g}",
    "mean": "{:z.3g}",
    "between seeds": "{:z.2g}",
    "between prompts": "{:z.2g}",
    "share of the advantages": "{:z.0%}",
    "equal groups": "{:.0%}",
    "unscored": "{:.0%}",
    "s for 16": "{:.2g}",
}


def report_rewards(spec: RunSpec, base_model: dict[str, Any], records: RecordTable, draft: Path) -> Path:
    """Writes tables of the rewards and of the samples, and a picture of what each reward prefers."""
    components.check_unchanged(base_model, spec)
    scorer, parameters = components.build_scorer(spec), spec.config
    settings = parameters.reward_report
    prompts = distinct_prompts(records.split("train"), settings.prompts)
    if len(prompts) < 2:
        raise UserError(
            f"reward_report needs at least two training prompts, and the data have {len(prompts)}. Add records with"
            " other prompts"
        )
    scorer.check_records(prompts)
    model = components.build_generator(spec, None, settings.sampler)
    asked = requests(prompts, settings.samples, parameters.evaluation.seed)
    samples: list[Sample] = []
    with console.progress("Generating samples", len(asked)) as bar:
        sampler = spec.sampler(settings.sampler)
        for batch, generated in generate_batches(model, asked, sampler, parameters.evaluation.batch_size):
            samples += generated
            bar.advance(len(batch))
    scored = score_twice(scorer, [request.record for request in asked], samples)
    table, related = reward_table(scored, parameters.grpo), correlations(scored)
    write_csv(draft / "rewards.csv", table)
    write_csv(draft / "correlations.csv", related, index=True)
    write_csv(draft / "samples.csv", sample_rows(scored))
    _sheet(scored, scorer).save(draft / "sheet.png")
    title = f"{counted(len(samples), 'sample')} of {counted(len(prompts), 'training prompt')}"
    cells = [[_cell(row[name], form) for name, form in _COLUMNS.items()] for row in table.to_dict("records")]
    console.table(f"{title}, {settings.sampler} sampler", list(_COLUMNS), cells)
    if len(related) > 1:
        rows = [[name, *(_cell(value, "{:z.2f}") for value in row)] for name, *row in related.itertuples()]
        console.table("Correlation within groups (the samples of one prompt)", ["", *related], rows)
    for sentence in findings(table, related, parameters.grpo):
        console.note(sentence)
    return draft


@dataclass(frozen=True, kw_only=True)
class ScoredGroups:
    """Groups of samples with their scores."""

    records: Sequence[PromptRecord]
    """[B], the samples of a prompt as neighbours, equally many of each."""
    samples: Sequence[Sample]
    scores: Scores
    again: Scores
    """The same samples, scored a second time."""
    seconds: Mapping[str, float]
    """Reward -> seconds for all samples."""
    judges: Collection[str] = ()
    """Rewards that score no rollout."""

    @property
    def ids(self) -> list[str]:
        return [record.id for record in self.records]

    @property
    def size(self) -> int:
        """Samples of a prompt."""
        return len(self.records) // len(set(self.ids))

    @staticmethod
    def values(scores: Scores) -> pd.DataFrame:
        """[B, rewards and the total] float64."""
        judged = {**scores.rewards, TOTAL: scores.total}
        return pd.DataFrame({name: values.double().numpy() for name, values in judged.items()})


def score_twice(scorer: RewardSet, asked: Sequence[PromptRecord], samples: Sequence[Sample]) -> ScoredGroups:
    """Scores with each reward alone, and then with all again, to see whether they repeat."""
    outputs, seconds = {}, {}
    with console.progress("Scoring", 2 * len(scorer.functions)) as bar:
        for name, function in scorer.functions.items():
            started = time.perf_counter()
            outputs[name] = function(asked, samples)
            seconds[name] = time.perf_counter() - started
            bar.advance(1)
        again = scorer(asked, samples)
        bar.advance(len(scorer.functions))
    return ScoredGroups(
        records=asked,
        samples=samples,
        scores=scorer.combined(outputs),
        again=again,
        seconds=seconds,
        judges=scorer.judges,
    )


def reward_table(scored: ScoredGroups, config: GRPOConfig) -> pd.DataFrame:
    """Returns a row for each reward, and one for the total.

    Columns: reward, weight, mean, lowest, highest; ``between seeds``, the standard deviation within a group, averaged
    (what a training learns from); ``between prompts``, the spread of the groups' means; ``share of the advantages``
    (`variance_shares`); ``equal groups``, the share of scored groups whose scores do not differ; ``unscored``, a share
    of the samples; ``s for 16``, seconds, the total's without judges; ``repeat``, the largest difference between two
    scorings of the same sample.
    """
    scores, gdpo = scored.scores, config.combine == "gdpo"
    shares = variance_shares(
        scores.rewards, scores.weights, scored.size, normalise=gdpo, epsilon=config.advantage_epsilon
    )
    equal = {
        name: zero_variance_share(values, scored.size)
        for name, values in {**scores.rewards, TOTAL: scores.total}.items()
    }
    values = scored.values(scores)
    groups = values.groupby(scored.ids, sort=False)
    in_training = [spent for name, spent in scored.seconds.items() if name not in scored.judges]
    seconds = pd.Series({**scored.seconds, TOTAL: sum(in_training)})
    columns = {
        "weight": pd.Series(scores.weights),
        "mean": values.mean(),
        "lowest": values.min(),
        "highest": values.max(),
        "between seeds": groups.std().mean(),
        "between prompts": groups.mean().std(),
        "share of the advantages": pd.Series(shares, dtype=float),
        "equal groups": pd.Series(equal),
        "unscored": values.isna().mean(),
        "s for 16": seconds * PER / len(values),
        "repeat": (values - scored.values(scored.again)).abs().max(),
    }
    return pd.DataFrame(columns, index=list(values)).rename_axis("reward").reset_index()


def correlations(scored: ScoredGroups) -> pd.DataFrame:
    """Returns Pearson's correlation [rewards, rewards] of differences from the group's mean; NaN = no variance.

    Between prompts rewards agree because some prompts are easy; a training learns from differences within groups.
    """
    return within_groups(scored).corr()


def within_groups(scored: ScoredGroups) -> pd.DataFrame:
    """[B, rewards] differences from the mean of the scored samples of the same group; NaN = unscored."""
    values = scored.values(scored.scores).drop(columns=TOTAL)
    return values - values.groupby(scored.ids, sort=False).transform("mean")


def sample_rows(scored: ScoredGroups) -> pd.DataFrame:
    """Returns a row for each sample: id, prompt, index within its group, total, each reward and its parts."""
    rows = pd.DataFrame(
        {
            "id": scored.ids,
            "prompt": [record.prompt for record in scored.records],
            "index": [row % scored.size for row in range(len(scored.records))],
        }
    )
    values = {TOTAL: scored.scores.total, **scored.scores.rewards, **scored.scores.parts}
    return rows.assign(**{name: tensor.numpy() for name, tensor in values.items()})


def findings(table: pd.DataFrame, related: pd.DataFrame, config: GRPOConfig) -> list[str]:
    """Returns sentences on what to change before a training."""
    rows = {row["reward"]: row for row in table.to_dict("records")}
    sentences = [sentence for row in rows.values() for sentence in _reward_findings(row, config.combine)]
    weighted = [name for name, row in rows.items() if row["weight"] and not math.isnan(row["weight"])]
    for i, first in enumerate(weighted):
        for second in weighted[i + 1 :]:
            if abs(related.loc[first, second]) > SAME:
                how = "the same" if related.loc[first, second] > 0 else "the opposite"
                sentences.append(
                    f"{first} and {second} say {how} about the samples of a prompt: one of them is enough."
                )
    samples = config.prompts_per_step * config.group_size
    seconds = rows[TOTAL]["s for 16"] * samples / PER
    return [
        *sentences,
        f"Scoring takes about {seconds:.2g} s of a training step with {samples} samples on this machine.",
    ]


def _reward_findings(row: Mapping[Any, Any], combine: str) -> Iterator[str]:
    name, share = row["reward"], row["share of the advantages"]
    counts = name == TOTAL or (not math.isnan(row["weight"]) and row["weight"] != 0)
    if counts and row["equal groups"] >= EQUAL:
        equal = f"{row['equal groups']:.0%} of the scored groups"
        yield f"{name}: in {equal} all samples score the same, which teaches nothing."
    if row["unscored"] > UNSCORED:
        yield f"{name}: {row['unscored']:.0%} of the samples could not be scored."
    if share <= -DROWNED:
        yield f"{name}: the other rewards work against it ({share:.0%} of the advantages)."
    elif share < DROWNED and row["between seeds"] > 0:  # No weight makes equal scores differ.
        advice = "raise its weight" + (", or set grpo.combine=gdpo" if combine != "gdpo" else "")
        yield f"{name}: drowned by the other rewards ({max(share, 0.0):.0%} of the advantages); {advice}."
    if name != TOTAL and row["repeat"] > 0:
        yield f"{name}: scored twice, the same sample differs by up to {row['repeat']:.2g}."


def _sheet(scored: ScoredGroups, scorer: RewardSet) -> Image:
    """Renders a row for each reward: the samples that are furthest above, and below, the mean of their group."""
    pictures, captions, sources = [], [], []
    for name, away in within_groups(scored).fillna(0.0).items():
        order = away.sort_values(ascending=False, kind="stable").index
        for row in [*order[:_BESIDE], *order[-_BESIDE:]]:
            record = scored.records[row]
            pictures.append(of_sample(record, scored.samples[row], scorer))
            sources.append(beside(record, scored.samples[row]))
            text = caption(record.prompt, record.id)
            captions.append(f"{name} {float(scored.scores.rewards[str(name)][row]):z.3g} ({away[row]:+.2g})\n{text}")
    return grid(pictures, captions, 2 * _BESIDE, sources)


def _cell(value: Any, form: str) -> str | None:
    return None if pd.isna(value) else form.format(value)
