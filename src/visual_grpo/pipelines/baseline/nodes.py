"""Draws the reference policy's samples for the eval and held-out prompts and scores them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.config import Parameters

if TYPE_CHECKING:
    from visual_grpo.records.table import RecordTable


def draw_baseline(
    parameters: dict[str, Any], starter_report: dict[str, Any], records: RecordTable
) -> Callable[[Path], None]:
    """What fills the baseline's folder: pictures and scores of the policy without an adapter."""
    config = Parameters.model_validate(parameters)
    return image_writer(config, starter_report, records, adapters=None, title="baseline")


def image_writer(
    config: Parameters,
    starter_report: dict[str, Any],
    records: RecordTable,
    *,
    adapters: Path | None,
    title: str,
) -> Callable[[Path], None]:
    """Checks that the samples can be drawn and scored; returns what draws them into a folder.

    They depend on parameters, model, records and adapter only, so that baseline and trained ones pair.
    """
    from visual_grpo import components
    from visual_grpo.evaluation import generate

    scorer = components.build_scorer(config)
    splits = {split: records.split(split) for split in generate.SPLITS}
    for split in splits.values():
        scorer.check_records(split)
    requests = generate.plan_images(
        splits,
        seed=config.seed,
        images_per_prompt=config.evaluation.images_per_prompt,
        max_prompts=config.evaluation.max_prompts,
    )
    facts = generate.conditions(config, model=starter_report["digest"], dataset=records.digest)

    def write(folder: Path) -> None:
        from visual_grpo import console

        samplers = config.judged_samplers
        policy = components.build_model(config, starter_report["model"], adapters)
        with console.progress(title, len(requests) * len(samplers)) as bar:
            generate.draw_and_score(
                policy,
                scorer,
                requests,
                samplers,
                folder,
                batch_size=config.evaluation.batch_size,
                facts=facts,
                advance=bar.advance,
            )

    return write
