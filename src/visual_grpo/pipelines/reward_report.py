"""The node that draws groups of samples, scores them twice, and says what the rewards are like."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.config import Parameters
from visual_grpo.errors import UserError, counted
from visual_grpo.records.table import RecordTable

if TYPE_CHECKING:
    from PIL.Image import Image

    from visual_grpo.evaluation.reward_report import Scored
    from visual_grpo.policies.family_settings import Plan
    from visual_grpo.rewards.combine import RewardSet
    from visual_grpo.types import PromptRecord, Sample

_BESIDE = 4
"""Samples of each reward in the picture, of the best and of the worst."""


def report_rewards(
    parameters: Parameters, starter_report: dict[str, Any], records: RecordTable, reward_report_draft: Path
) -> Path:
    """The folder with tables of the rewards and of the samples, and a picture of what each reward likes."""
    from visual_grpo import components, console
    from visual_grpo.evaluation.reward_report import correlations, findings, measured, rows_of

    components.check_unchanged(starter_report)
    plan = components.make_plan(parameters, starter_report["model"])
    scorer = components.build_scorer(parameters, plan.modules)
    prompts = _prompts(parameters, records)
    scorer.check_records(prompts)
    asked, samples = _draw(parameters, starter_report["model"], plan, prompts)
    found = _score(scorer, asked, samples)
    table, related = measured(found, parameters.grpo), correlations(found)
    table.to_csv(reward_report_draft / "rewards.csv", index=False)
    related.to_csv(reward_report_draft / "correlations.csv")
    rows_of(found).to_csv(reward_report_draft / "samples.csv", index=False)
    _sheet(found, scorer).save(reward_report_draft / "sheet.png")
    drawn = f"{counted(len(samples), 'sample')} of {counted(len(prompts), 'training prompt')}"
    console.table(f"{drawn}, {parameters.reward_report.sampler} sampler", list(_COLUMNS), _cells(table))
    if len(related) > 1:
        console.table("Correlation within groups", ["", *related], _correlation_cells(related))
    for sentence in findings(table, related, parameters.grpo):
        console.note(sentence)
    return reward_report_draft


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


def _prompts(parameters: Parameters, records: RecordTable) -> list[PromptRecord]:
    from visual_grpo.evaluation.generate import distinct_prompts

    found = distinct_prompts(records.split("train"), parameters.reward_report.prompts)
    if len(found) < 2:
        raise UserError(
            "reward_report needs at least two training prompts; lower data.eval_share or data.held_out_share"
        )
    return found


def _draw(
    parameters: Parameters, model_path: str, plan: Plan, prompts: Sequence[PromptRecord]
) -> tuple[list[PromptRecord], list[Sample]]:
    """Group by group; each sample depends on its prompt, its number and ``evaluation.seed``."""
    from visual_grpo import components, console
    from visual_grpo.evaluation.generate import check_samples, image_seed

    settings, size = parameters.reward_report, parameters.evaluation.batch_size
    model = components.build_model(parameters, model_path)
    asked = [record for record in prompts for _ in range(settings.samples)]
    seeds = [image_seed(parameters.evaluation.seed, r.id, i % settings.samples) for i, r in enumerate(asked)]
    samples: list[Sample] = []
    with console.progress("Drawing", len(asked)) as bar:
        for start in range(0, len(asked), size):
            chosen = asked[start : start + size]
            drawn = model.generate(chosen, seeds[start : start + size], plan.samplers[settings.sampler])
            check_samples(drawn, chosen)
            samples += drawn
            bar.advance(len(drawn))
    return asked, samples


def _score(scorer: RewardSet, asked: Sequence[PromptRecord], samples: Sequence[Sample]) -> Scored:
    """Every reward by itself, and then all again, to see whether they say the same."""
    from visual_grpo import console
    from visual_grpo.evaluation.reward_report import Scored

    outputs, seconds = {}, {}
    with console.progress("Scoring", 2 * len(scorer.functions)) as bar:
        for name, function in scorer.functions.items():
            began = time.perf_counter()
            outputs[name] = function(asked, samples)
            seconds[name] = time.perf_counter() - began
            bar.advance(1)
        again = scorer(asked, samples)
        bar.advance(len(scorer.functions))
    return Scored(records=asked, samples=samples, scores=scorer.combined(outputs), again=again, seconds=seconds)


def _cells(table: Any) -> list[list[Any]]:
    return [
        [None if row[column] != row[column] else form.format(row[column]) for column, form in _COLUMNS.items()]
        for row in table.to_dict("records")
    ]


def _correlation_cells(related: Any) -> list[list[Any]]:
    return [
        [name, *(None if value != value else f"{value:z.2f}" for value in row)]
        for name, row in zip(related.index, related.to_numpy(), strict=True)
    ]


def _sheet(found: Scored, scorer: RewardSet) -> Image:
    """A row for each reward: the samples that are furthest above, and below, the mean of their group."""
    from visual_grpo.evaluation.pictures import caption, grid, of_sample
    from visual_grpo.evaluation.reward_report import within_groups

    pictures, captions = [], []
    for name, values in found.scores.rewards.items():
        away = within_groups(values, found.records).nan_to_num(0.0)
        order = away.argsort(descending=True, stable=True).tolist()
        for row in [*order[:_BESIDE], *order[-_BESIDE:]]:
            pictures.append(of_sample(found.records[row], found.samples[row], scorer))
            text = caption(found.records[row].prompt, found.records[row].id)
            captions.append(f"{name} {float(values[row]):z.3g} ({float(away[row]):+.2g})\n{text}")
    return grid(pictures, captions, columns=2 * _BESIDE)
