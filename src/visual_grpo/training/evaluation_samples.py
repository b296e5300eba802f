"""Draws and scores the samples that results are judged by, of the base model and of trained adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from visual_grpo.common import console
from visual_grpo.config import Parameters, SamplerConfig
from visual_grpo.data.manifest import RecordTable
from visual_grpo.evaluation.samples import SPLITS, Request, generate_and_score, generate_batches, held_out, plan_images
from visual_grpo.grpo.distributed import launch, ranks
from visual_grpo.models.model import DistributedModel
from visual_grpo.provenance import conditions
from visual_grpo.training import components


def generate_samples(
    folder: Path,
    config: Parameters,
    base_model: dict[str, Any],
    records: RecordTable,
    *,
    adapters: Path | None,
    title: str,
) -> None:
    """Draws and scores every eval and held-out sample into ``folder``; without adapters also those of the controls.

    Samples depend on parameters, model, records and adapters only, so that baseline and trained ones pair. Records are
    checked against the rewards before the model is loaded.
    """
    components.check_unchanged(base_model, config.model.path)
    spec = components.make_run_spec(config, base_model["model"])
    scorer = components.build_scorer(config, spec.modules)
    splits = {split: records.split(split) for split in SPLITS}
    for split in splits.values():
        scorer.check_records(split)
    requests = plan_images(
        splits,
        seed=config.evaluation.seed,
        images_per_prompt=config.evaluation.images_per_prompt,
        max_prompts=config.evaluation.max_prompts,
    )
    controls = spec.controls if adapters is None else {}
    asked = [requests] * len(spec.samplers) + [held_out(requests)] * len(controls)
    batches = list(zip([*spec.samplers.values(), *controls.values()], asked, strict=True))
    model = base_model["model"]
    with (
        launch.running_ranks(config, generate_on_rank, model=model, adapters=adapters, batches=batches),
        console.progress(title, sum(map(len, asked))) as bar,
    ):
        generate_and_score(
            _load(config, model, adapters),
            scorer,
            requests,
            spec.samplers,
            folder,
            batch_size=_batch_size(config),
            controls=controls,
            conditions=conditions(config, spec, base_model, records.digest),
            advance=bar.advance,
        )


def generate_on_rank(
    config: Parameters, model: str, adapters: Path | None, batches: Sequence[tuple[SamplerConfig, Sequence[Request]]]
) -> None:
    """Generates this rank's part of a baseline or an evaluation, which rank 0 scores and saves."""
    loaded = _load(config, model, adapters)
    for sampler, requests in batches:
        for _ in generate_batches(loaded, requests, sampler, _batch_size(config)):
            pass


def _load(config: Parameters, model: str, adapters: Path | None) -> DistributedModel:
    return DistributedModel(ranks.run_on_all(lambda: components.build_model(config, model, adapters)))


def _batch_size(config: Parameters) -> int:
    return config.evaluation.batch_size * config.distributed.processes
