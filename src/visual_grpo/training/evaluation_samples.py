"""Generates and scores the samples that results are judged by, of the base model and of trained adapters."""

from __future__ import annotations

from pathlib import Path

from visual_grpo.common import console
from visual_grpo.data.manifest import RecordTable
from visual_grpo.evaluation.samples import (
    SPLITS,
    Asked,
    generate_and_score,
    generate_batches,
    plan_images,
    write_no_scores,
)
from visual_grpo.grpo.distributed import launch, ranks
from visual_grpo.models.model import DistributedModel
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.training import components


def generate_samples(
    folder: Path,
    spec: RunSpec,
    records: RecordTable,
    *,
    adapters: Path | None,
    title: str,
) -> None:
    """Generates and scores every eval and held-out sample into ``folder``; without adapters also the controls'.

    Samples depend on parameters, model, records and adapters only, so that baseline and trained ones pair. Records are
    checked against the rewards before the model is loaded.
    """
    scorer, splits = components.build_scorer(spec), {split: records.split(split) for split in SPLITS}
    for split in splits.values():
        scorer.check_records(split)
    asked = plan_images(splits, spec.config.evaluation, spec.samplers, spec.controls if adapters is None else {})
    if not any(requests for _, requests in asked.values()):
        console.note("There is nothing to generate: no prompt is held out or in eval.")
        write_no_scores(scorer, folder)
        return
    with (
        launch.running_ranks(spec, generate_on_rank, adapters=adapters, asked=asked),
        console.progress(title, sum(len(requests) for _, requests in asked.values())) as bar,
    ):
        generate_and_score(
            _load(spec, adapters),
            scorer,
            asked,
            folder,
            batch_size=_batch_size(spec),
            advance=bar.advance,
        )


def generate_on_rank(spec: RunSpec, adapters: Path | None, asked: Asked) -> None:
    """Generates this rank's part of a baseline or an evaluation, which rank 0 scores and saves."""
    loaded = _load(spec, adapters)
    for sampler, requests in asked.values():
        for _ in generate_batches(loaded, requests, sampler, _batch_size(spec)):
            pass


def _load(spec: RunSpec, adapters: Path | None) -> DistributedModel:
    return DistributedModel(ranks.run_on_all(lambda: components.build_model(spec, adapters)))


def _batch_size(spec: RunSpec) -> int:
    return spec.config.evaluation.batch_size * spec.config.distributed.processes
