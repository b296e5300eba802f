"""Trains the adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from kedro.pipeline import Node, Pipeline

from visual_grpo import provenance
from visual_grpo.adapter_folder import BASELINE, DATA_COMMIT, adapter_digest
from visual_grpo.common import console
from visual_grpo.common.files import from_here
from visual_grpo.common.types import StepMetrics
from visual_grpo.config import Parameters, flatten
from visual_grpo.data.drift import profile_of, write_profile
from visual_grpo.data.manifest import RecordTable
from visual_grpo.data.splits import OPEN
from visual_grpo.evaluation.alarm import HackingMonitor
from visual_grpo.grpo.distributed import launch, ranks
from visual_grpo.grpo.distributed.rollouts import RankZeroScorer
from visual_grpo.grpo.two_stage import Trainer
from visual_grpo.models.model import DistributedModel, Model
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.operations.training_command import (
    TrainingCommand,
    complete_adapters,
    show_mixed,
    show_replaced,
    show_training,
)
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.tracking import run_context
from visual_grpo.tracking.adapter_lookup import start_digest, start_of_training
from visual_grpo.tracking.sync import DIGEST
from visual_grpo.tracking.tracker import open_logs
from visual_grpo.training import components, made_with, resuming
from visual_grpo.training.run import Callbacks, TrainingRun


def create_pipeline() -> Pipeline:
    """``path:adapters`` and ``draft`` are places, which `OutputHooks` gives to the node."""
    return Pipeline(
        [
            Node(
                train,
                [
                    "params:run_spec",
                    "params:run_context",
                    "base_model",
                    "records",
                    "baseline",
                    "path:adapters",
                    "draft",
                ],
                ["adapters", "training_history"],
                name="train",
            ),
        ],
        tags=["tracked", "distributed", "training", "rewards"],
    )


def train(
    spec: RunSpec,
    context: run_context.RunContext,
    base_model: dict[str, Any],
    records: RecordTable,
    baseline: Path,
    latest: Path,
    draft: Path,
) -> tuple[Path, pd.DataFrame]:
    """Trains the adapters; returns their folder, and one row of metrics a step.

    ``baseline`` must pair, so that the trained adapter can be compared with it. ``latest`` is where the adapters will
    be, and those of an earlier training are.
    """
    config, tracker = spec.config, context.tracker
    components.check_unchanged(base_model, spec)
    start = _start(spec, latest)
    now = made_with.of(spec, base_model, records.digest, start_digest(start))
    # Before the baseline is checked: the advice to make that again would lose the one that belongs to the checkpoint.
    resumed = resuming.resumed_run(config, now)
    before = provenance.read(baseline, "baseline")
    provenance.require_pair(before, now)
    scorer = components.build_scorer(spec)
    data = {split: records.split(split) for split in OPEN}
    for split in ("train", "eval"):
        scorer.check_records(data[split])
    profile = profile_of(records)  # Now: after hours of training, a missing picture would end the command.
    command = context.facts(read=[config.data.path, now["model"], from_here(records.path.parent), from_here(baseline)])
    facts = made_with.of_training(config, now, command, start, resumed) | {
        BASELINE: {name: before["parameters"]["evaluation"][name] for name in ("images_per_prompt", "max_prompts")},
        **({DATA_COMMIT: commit} if (commit := records.report.get("commit")) else {}),
    }
    show_replaced(latest, config.grpo.steps, tracker.run_id)
    show_mixed(facts)
    changes = run_context.changes(context.project)  # Before the training, during which somebody may edit the code.
    run_arguments = {
        "data": data,
        "provenance": facts,
        "changes": changes,
        "resumed": resumed,
        "run_id": tracker.run_id,
    }
    with launch.running_ranks(spec, train_on_rank, start=start, arguments=run_arguments):
        run = _build(spec, start, scorer, monitor=_monitor(config, baseline, scorer), **run_arguments)
        if config.distributed.processes > 1:
            console.note(f"{config.distributed.processes} processes train together.")
        # With the run's id, so that two trainings of the same settings stay apart.
        with open_logs(config.tracking, tracker.name() or "training", flatten(config.public())) as loggers:
            progress = TrainingCommand(run, scorer, tracker, loggers).execute()
    complete_adapters(draft, run, tracker.run_name, records, start)
    write_profile(profile, draft)
    tracker.own(DIGEST, adapter_digest(draft))
    show_training(progress, run.trainer.step)
    return draft, pd.DataFrame(progress.history)


def _start(spec: RunSpec, latest: Path) -> Path | None:
    """Returns the adapters or the LoRA to start from, checked; None = fresh adapters."""
    named = spec.config.train.start
    start = start_of_training(named, latest)
    if start is not None:
        components.check_start(spec, start)
        if start.is_file():
            console.note(
                f"train.start: training continues from the LoRA {named} (sha256 {str(start_digest(start))[:12]})."
                " Baseline, controls and KL are of the base model without it."
            )
    return start


def _monitor(config: Parameters, baseline: Path, scorer: RewardSet) -> HackingMonitor:
    looks = -(-config.grpo.steps // (config.evaluation.every or config.grpo.steps))
    return HackingMonitor(baseline, config.alarm, looks, scorer.weights)


def train_on_rank(spec: RunSpec, start: Path | None, arguments: dict[str, Any]) -> None:
    """Trains on every rank but 0: the same, without scores, files and output."""
    run = _build(spec, start, None, **arguments)

    def on_step(metrics: StepMetrics, row: dict[str, float]) -> None:
        if run.is_picture_due(metrics.step):
            run.shown_samples()
            run.film_samples()

    run.run(Callbacks(on_step=on_step, note=lambda text: None))


def _build(spec: RunSpec, start: Path | None, scorer: RewardSet | None, **arguments: Any) -> TrainingRun:
    """Builds the training of this rank from the ``arguments`` of `TrainingRun`; only rank 0 has a ``scorer``."""
    on_rank_zero = RankZeroScorer(scorer)

    def build() -> tuple[Model, Trainer]:
        model = components.build_model(spec, check_own_family=True)
        return model, components.build_trainer(spec, model, on_rank_zero, start=start)

    model, trainer = ranks.run_on_all(build)
    return TrainingRun(spec, DistributedModel(model), on_rank_zero, trainer, **arguments)
