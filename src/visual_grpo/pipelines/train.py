"""Wires records, policy, rewards and trainer together and shows what happens."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from PIL.Image import Image
from torch import Tensor

from visual_grpo.common import console
from visual_grpo.common.errors import counted
from visual_grpo.common.images import read_image
from visual_grpo.common.processes import Stopped
from visual_grpo.common.types import Judge, PromptRecord, Sample, StepMetrics
from visual_grpo.config import Parameters, flatten
from visual_grpo.config.adapter_folder import (
    ADJUSTED,
    CHANGES,
    FACTS,
    HELD_OUT,
    read_facts,
)
from visual_grpo.config.command import Command, is_stage_of_dvc
from visual_grpo.data.drift import profile_of, write_profile
from visual_grpo.data.table import SEALED, RecordTable, SeenPrompts
from visual_grpo.evaluation import compare
from visual_grpo.evaluation.alarm import HackingMonitor, picture_of
from visual_grpo.evaluation.draw import read_scores
from visual_grpo.evaluation.pictures import caption, grid, of_sample, scaled, table
from visual_grpo.grpo.distributed import group, launch
from visual_grpo.grpo.distributed.policy import DistributedModel, FirstScores
from visual_grpo.grpo.two_stage import Trainer
from visual_grpo.models.family import Model
from visual_grpo.operations.training_inputs import check_start, find_start, identity, start_facts
from visual_grpo.pipelines.baseline import conditions
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.tracking import Tracker, lineage
from visual_grpo.tracking.extra_loggers import Log, open_logs
from visual_grpo.tracking.model_card import CARD, model_card
from visual_grpo.tracking.sync import RUN_NAME, tracked
from visual_grpo.training import components, resuming
from visual_grpo.training.checkpoints import Progress
from visual_grpo.training.run import SHOWN_EACH, Callbacks, Shown, TrainingRun
from visual_grpo.training.runtime_fingerprint import runtime_fingerprint

READ = ("05_model_input", "06_models/starter.json", "07_model_output/baseline")
"""Outputs of other pipelines that the training depends on."""
_PICTURES = 8
"""Of an alarm."""
_AFTER = {
    "warn": "Look at the pictures (MLflow: alarm). alarm.action=stop or rollback would end the training.",
    "stop": "The training ends here.",
    "rollback": "The training ends here, with the best adapter of the evaluations before.",
}


def train(
    parameters: Parameters, starter_report: dict[str, Any], records: RecordTable, baseline: Path, adapters_draft: Path
) -> tuple[Path, pd.DataFrame]:
    """Trains the adapters; returns their folder, and one row of metrics a step.

    ``baseline`` must pair, so that the trained adapter can be compared with it.
    """
    tracker, project, model = Tracker.active(), Path.cwd(), starter_report["model"]
    components.check_unchanged(starter_report)
    spec = components.make_run_spec(parameters, model)
    start = find_start(parameters)
    if start is not None:
        check_start(parameters, list(spec.modules), start, model)
    known = identity(parameters, starter_report, records)
    origin = resuming.origin(parameters.resume, Path(parameters.tracking.checkpoints))
    if origin is not None:  # Before the baseline: its remedy would replace the one that belongs to the checkpoint.
        resuming.refuse_another_origin(origin.checkpoint, origin.facts, known)
    facts = read_scores(baseline).attrs["facts"]
    compare.check_facts(facts, conditions(parameters, spec, starter_report, records))
    scorer = components.build_scorer(parameters, spec.modules)
    train_records, eval_records = records.split("train"), records.split("eval")
    scorer.check_records(train_records)
    scorer.check_records(eval_records)
    profile = profile_of(records)  # Before the training, which a missing picture must not end.
    given = {
        "train": train_records,
        "evaluation": eval_records,
        "held_out": records.split("held_out"),
        "identity": known,
        "run_id": tracker.run_id,
        "advice": {module: spec.family.modules[module].advice for module in spec.modules},
        "lineage": _lineage(parameters, starter_report, project, start),
    }
    every = parameters.evaluation.every or parameters.grpo.steps
    watch = HackingMonitor(baseline, parameters.alarm, looks=-(-parameters.grpo.steps // every))
    with launch.ranks(parameters, train_on_rank, model=model, start=start, given=given):
        run = _build(parameters, model, start, scorer, watch=watch, **given)
        if parameters.distributed.processes > 1:
            console.note(f"{parameters.distributed.processes} processes train together.")
        changes = lineage.changes(project)  # Before the training, during which somebody may edit the code.
        # With the run's id, so that two trainings of the same settings stay apart.
        name = tracker.name() or "training"
        with open_logs(parameters.tracking, name, flatten(parameters.public())) as others:
            progress = _Report(run, scorer, tracker, [tracker, *others], tuple(spec.modules)).execute()
    run.write_adapters(adapters_draft)
    if changes:
        (adapters_draft / CHANGES).write_text(changes, encoding="utf-8")
    never_seen = sorted({record.prompt for record in records.split("held_out", SEALED)})
    (adapters_draft / HELD_OUT).write_text(json.dumps(never_seen, ensure_ascii=False), encoding="utf-8")
    seen = SeenPrompts.of(record.prompt for record in records.split("train", "eval"))
    (seen if start is None else seen | SeenPrompts.read(start)).write(adapters_draft)
    write_profile(profile, adapters_draft)
    finished = datetime.now(UTC).isoformat(" ", timespec="minutes")
    facts = read_facts(adapters_draft) | {RUN_NAME: tracker.run_name, "finished": finished}
    (adapters_draft / FACTS).write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")
    (adapters_draft / CARD).write_text(model_card(facts, spec.modules), encoding="utf-8")
    _show_training(progress, run.trainer.step)
    return adapters_draft, pd.DataFrame(progress.history)


def train_on_rank(config: Parameters, model: str, start: Path | None, given: dict[str, Any]) -> None:
    """Trains on every rank but the first: the same, without scores, files and output."""
    run = _build(config, model, start, None, **given)

    def on_step(metrics: StepMetrics, row: dict[str, float]) -> None:
        if run.is_picture_due(metrics.step):
            run.shown_samples()
            run.film_samples()

    run.run(Callbacks(on_step=on_step, note=lambda text: None))


def _build(config: Parameters, name: str, start: Path | None, scorer: RewardSet | None, **given: Any) -> TrainingRun:
    """The training of this rank; ``given`` are arguments of `TrainingRun`. Only the first rank has a ``scorer``."""
    first = FirstScores(scorer)

    def build() -> tuple[Model, Trainer]:
        model = components.build_model(config, name)
        spec = components.make_run_spec(config, name)
        return model, components.build_trainer(config, spec, model, first, start=start)

    model, trainer = group.together(build)
    return TrainingRun(config, DistributedModel(model), first, trainer, **given)


def _lineage(config: Parameters, starter_report: dict[str, Any], project: Path, start: Path | None) -> dict[str, str]:
    """Where the adapter comes from, with the commands that it was resumed by."""
    now = {"command": lineage.command()}
    if starter_report.get("content") is not None:
        now["model_content"] = starter_report["content"]
    now |= lineage.git_tags(project) | lineage.version_tags() | runtime_fingerprint(config)
    inputs = [config.data.path, starter_report["model"], *(f"{config.output}/{name}" for name in READ)]
    now |= lineage.dvc_tags(project, inputs)
    if start is not None:
        now |= start_facts(start)
    origin = resuming.origin(config.resume, Path(config.tracking.checkpoints))
    if origin is None:
        return lineage.resumed({}, now)
    adjusted = [*origin.lineage.get(ADJUSTED, "").splitlines(), *resuming.adjusted(origin, config)]
    return lineage.resumed(origin.lineage, now) | ({ADJUSTED: "\n".join(adjusted)} if adjusted else {})


class _Report:
    """Shows a run while it trains: metrics and pictures in the logs, progress and notes on the console."""

    def __init__(
        self, run: TrainingRun, judge: Judge, tracker: Tracker, logs: Sequence[Log], modules: tuple[str, ...]
    ) -> None:
        self.run, self.judge, self.tracker, self.logs, self.modules = run, judge, tracker, logs, modules

    def execute(self) -> Progress:
        run = self.run
        try:
            done = run.checkpoints.completed_steps()
            with console.progress("train", run.config.grpo.steps, completed=done) as self.bar:
                progress = run.run(Callbacks(on_step=self._on_step, note=self.bar.note, on_alarm=self._on_alarm))
            if run.stopped_by is not None:
                raise Stopped(run.stopped_by)
        except KeyboardInterrupt:
            try:
                self.tracker.end("KILLED")
            finally:  # Another Ctrl-C ends the wait for MLflow.
                console.note(_where_it_stopped(run))
            raise
        except Exception:
            if run.checkpoints.newest is not None:
                console.note(_where_it_stopped(run, "Once the cause of the error is gone, go on with"))
            raise
        return progress

    def _on_step(self, metrics: StepMetrics, row: dict[str, float]) -> None:
        for log in self.logs:
            log.metrics(tracked(row, self.modules, list(self.run.config.rewards)), metrics.step)
        if self.run.is_picture_due(metrics.step):
            self._show_samples(metrics.step)
        names = {"reward/total": "reward", "kl": "kl", "ar/kl": "kl", "eval/total": "eval"}
        self.bar.advance(1, **{shown: row[name] for name, shown in names.items() if name in row})

    def _show_samples(self, step: int) -> None:
        """Shows samples of eval prompts, and keeps those of held-out prompts for the report's film."""
        grid_of_samples = _grid(*self.run.shown_samples(), self.judge, SHOWN_EACH)
        self._show(grid_of_samples, f"samples-{step:06d}.png", "samples", step)
        drawn = zip(self.run.film_prompts, self.run.film_samples(), strict=True)
        film = [[scaled(of_sample(record, sample, self.judge))] for record, sample in drawn]
        if film:
            table(film).save(self.run.checkpoints.folder / f"film-{step:06d}.png")

    def _on_alarm(self, step: int, sentence: str, shown: Shown) -> None:
        """Tells that the reward is taken to be cheated, and shows by what."""
        self._show(self._before_and_after(shown), picture_of(step), "alarm", step)
        self.tracker.tags({"alarm": f"step {step}: {sentence}"})
        after = _AFTER[self.run.config.alarm.action]
        self.bar.note(f"Alarm at step {step}: {sentence}. Is the reward cheated? {after}")

    def _before_and_after(self, shown: Shown) -> Image:
        """The base model's pictures of the first eval prompts, and what they have become."""
        assert self.run.watch is not None
        files = self.run.watch.files(shown.records)
        pairs = [(row, file) for row, file in enumerate(files) if file is not None][:_PICTURES]
        before = [read_image(file) for _, file in pairs]
        after = [of_sample(shown.records[row], shown.samples[row], self.judge) for row, _ in pairs]
        named = [f"{caption(shown.records[row].prompt, shown.records[row].id)}\nbase model" for row, _ in pairs]
        now = [f"now, reward {float(shown.total[row]):z.2f}" for row, _ in pairs]
        return grid([*before, *after], [*named, *now], columns=len(pairs))

    def _show(self, picture: Image, file: str, name: str, step: int) -> None:
        """In the logs, and beside the checkpoints, so that a resumed run has it."""
        folder = self.run.checkpoints.folder
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / file)
        for log in self.logs:
            log.image(picture, name, step)


def _where_it_stopped(run: TrainingRun, and_now: str = "Go on with") -> str:
    """The last checkpoint of a run that was stopped, and the command that goes on from it."""
    command = Command.current()
    newest, folder = run.checkpoints.newest, run.checkpoints.folder
    if newest is None:
        return f"Stopped before the first checkpoint. Start again with: {command.for_pipeline('train')}"
    stopped = f"Stopped after step {run.trainer.step} of {run.config.grpo.steps}; the checkpoint is {newest}\n"
    if is_stage_of_dvc():
        return f"{stopped}{and_now} the command that called DVC: the stage goes on from the checkpoint."
    return f"{stopped}{and_now}: {command.resuming(run.config.resume, folder)}"


def _show_training(progress: Progress, steps: int) -> None:
    """The verdict of a training, which only an evaluation can complete."""
    first, last = (progress.history[row]["reward/total"] for row in (0, -1))
    best = f"; on eval prompts {progress.best_score:z.3f} at step {progress.best_step}" if progress.best_step else ""
    console.note(
        f"Trained {counted(steps, 'step')}: mean reward of the training samples {first:z.3f} at the first step,"
        f" {last:z.3f} at the last{best}. Held-out prompts are judged by evaluate."
    )


def _grid(
    records: Sequence[PromptRecord], samples: Sequence[Sample], rewards: Tensor, judge: Judge, columns: int
) -> Image:
    captions = [
        f"{caption(record.prompt, record.id)}\n" + ("unscored" if math.isnan(reward) else f"reward {reward:z.2f}")
        for record, reward in zip(records, rewards.tolist(), strict=True)
    ]
    pictures = [of_sample(record, sample, judge) for record, sample in zip(records, samples, strict=True)]
    return grid(pictures, captions, columns=columns)
