"""Trains the adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from kedro.pipeline import Node, Pipeline

from visual_grpo import provenance
from visual_grpo.common import console
from visual_grpo.common.digests import content_digest
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import new_folder
from visual_grpo.common.types import StepMetrics
from visual_grpo.config import Parameters, flatten
from visual_grpo.config.adapter_folder import adapter_digest, check_base, check_weights, modules_of, read_facts
from visual_grpo.config.presets import pinned
from visual_grpo.data.drift import profile_of, write_profile
from visual_grpo.data.manifest import RecordTable
from visual_grpo.evaluation.alarm import HackingMonitor
from visual_grpo.evaluation.samples import read_scores
from visual_grpo.grpo.distributed import launch, ranks
from visual_grpo.grpo.distributed.policy import RankZeroScorer
from visual_grpo.grpo.two_stage import Trainer
from visual_grpo.models.model import DistributedModel, Model
from visual_grpo.operations.training_command import (
    TrainingCommand,
    complete_adapters,
    show_training,
    training_provenance,
)
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.tracking import lineage
from visual_grpo.tracking.adapter_lookup import start_of
from visual_grpo.tracking.tracker import Tracker, open_logs
from visual_grpo.training import components, resuming
from visual_grpo.training.run import Callbacks, TrainingRun


def create_pipeline() -> Pipeline:
    return Pipeline(
        [
            Node(
                train,
                ["parameters", "base_model", "records", "baseline"],
                ["adapters", "training_history"],
                name="train",
            ),
        ],
        namespace="train",
        prefix_datasets_with_namespace=False,
        tags=["tracked", "distributed", "training", "rewards"],
    )


def train(
    parameters: Parameters, base_model: dict[str, Any], records: RecordTable, baseline: Path
) -> tuple[Path, pd.DataFrame]:
    """Trains the adapters; returns their folder, and one row of metrics a step.

    ``baseline`` must pair, so that the trained adapter can be compared with it.
    """
    tracker, project, model = Tracker.active(), Path.cwd(), base_model["model"]
    components.check_unchanged(base_model, parameters.model.path)
    spec = components.make_run_spec(parameters, model)
    start = start_of(parameters)
    if start is not None:
        _check_start(parameters, list(spec.modules), start, model)
    inputs = provenance.inputs(parameters, base_model, records.digest, None if start is None else adapter_digest(start))
    origin = resuming.origin(parameters.resume, Path(parameters.tracking.checkpoints))
    if origin is not None:  # Before the baseline: its remedy would replace the one that belongs to the checkpoint.
        resuming.refuse_other_inputs(origin, inputs)
    present = provenance.conditions(parameters, spec, base_model, records.digest)
    provenance.require_pair(read_scores(baseline).attrs["facts"], present)
    scorer = components.build_scorer(parameters, spec.modules)
    train_records, eval_records = records.split("train"), records.split("eval")
    scorer.check_records(train_records)
    scorer.check_records(eval_records)
    profile = profile_of(records)  # Before the training, which a missing picture must not end.
    arguments = {
        "train": train_records,
        "evaluation": eval_records,
        "held_out": records.split("held_out"),
        "provenance": training_provenance(parameters, base_model, inputs, project, start),
        "run_id": tracker.run_id,
        "advice": {module: spec.family.modules[module].advice for module in spec.modules},
    }
    every = parameters.evaluation.every or parameters.grpo.steps
    monitor = HackingMonitor(baseline, parameters.alarm, looks=-(-parameters.grpo.steps // every))
    with launch.running_ranks(parameters, train_on_rank, model=model, start=start, arguments=arguments):
        run = _build(parameters, model, start, scorer, monitor=monitor, **arguments)
        if parameters.distributed.processes > 1:
            console.note(f"{parameters.distributed.processes} processes train together.")
        changes = lineage.changes(project)  # Before the training, during which somebody may edit the code.
        # With the run's id, so that two trainings of the same settings stay apart.
        name = tracker.name() or "training"
        with open_logs(parameters.tracking, name, flatten(parameters.public())) as loggers:
            progress = TrainingCommand(run, scorer, tracker, loggers, tuple(spec.modules)).execute()
    loading = {module: spec.family.modules[module].adapter.plain for module in spec.modules}
    adapters = new_folder(Path(parameters.adapters_folder))
    complete_adapters(adapters, run, loading, tracker.run_name, records, start, changes)
    write_profile(profile, adapters)
    show_training(progress, run.trainer.step)
    return adapters, pd.DataFrame(progress.history)


def _check_start(config: Parameters, modules: Sequence[str], start: Path, model: str) -> None:
    """Raises UserError where ``modules`` of ``model`` cannot start from the adapters in the folder ``start``: they are
    damaged, of another base model, or lack a module or have another LoRA on it."""
    check_weights(start)
    check_base(start, model, content_digest(model))
    trained, before = modules_of(start), Parameters.model_validate(pinned(read_facts(start)["parameters"]))
    for module in modules:
        if module not in trained:
            raise UserError(
                f"train.start: {start} has adapters of {', '.join(trained)}, but {module} is to be trained."
            )
        was, now = before.lora_of(module), config.lora_of(module)
        if was != now:
            raise UserError(
                f"train.start: the LoRA of {module} in {start} has {was}, this training has {now}. Give both the same"
                f" policy.lora (or modules.{module}.lora), or start from the base model: train.start=base"
            )


def train_on_rank(config: Parameters, model: str, start: Path | None, arguments: dict[str, Any]) -> None:
    """Trains on every rank but 0: the same, without scores, files and output."""
    run = _build(config, model, start, None, **arguments)

    def on_step(metrics: StepMetrics, row: dict[str, float]) -> None:
        if run.is_picture_due(metrics.step):
            run.shown_samples()
            run.film_samples()

    run.run(Callbacks(on_step=on_step, note=lambda text: None))


def _build(
    config: Parameters, name: str, start: Path | None, scorer: RewardSet | None, **arguments: Any
) -> TrainingRun:
    """Builds the training of this rank from the ``arguments`` of `TrainingRun`; only rank 0 has a ``scorer``."""
    first = RankZeroScorer(scorer)

    def build() -> tuple[Model, Trainer]:
        model = components.build_model(config, name, check_own_family=True)
        spec = components.make_run_spec(config, name)
        return model, components.build_trainer(config, spec, model, first, start=start)

    model, trainer = ranks.run_on_all(build)
    return TrainingRun(config, DistributedModel(model), first, trainer, **arguments)
