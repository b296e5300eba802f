"""Runs a training as a command: its progress, metrics and pictures, and the files next to its weights."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from PIL.Image import Image

from visual_grpo import provenance
from visual_grpo.adapter_folder import CHANGES, FACTS, HELD_OUT, read_facts
from visual_grpo.common import console
from visual_grpo.common.digests import file_digest
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.phases import Watcher, watched_by
from visual_grpo.common.processes import Stopped
from visual_grpo.common.types import StepMetrics
from visual_grpo.data.manifest import RecordTable, read_seen, write_seen
from visual_grpo.data.splits import SEALED, SPLITS
from visual_grpo.evaluation.alarm import picture_of
from visual_grpo.evaluation.pictures import beside, caption, grid, of_file, of_sample, scaled, table
from visual_grpo.operations.command import APART, Command, is_stage_of_dvc
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.tracking.adapter_lookup import training_run
from visual_grpo.tracking.model_card import CARD, model_card
from visual_grpo.tracking.sync import RUN_NAME, TRAINING_DIGEST, tracked
from visual_grpo.tracking.tracker import ExtraLog, Tracker
from visual_grpo.training.run import SHOWN_EACH, Callbacks, Shown, TrainingRun
from visual_grpo.training.run_checkpoints import Progress

_MOST_PICTURES, _PAIRS_IN_A_ROW = 8, 4  # Of an alarm.
_LONG_STEP = 60.0  # Seconds.
_AFTER = {
    "warn": "Look at the pictures (MLflow: alarm). alarm.action=stop or rollback would end the training.",
    "stop": "The training ends here.",
    "rollback": "The training ends here, with the best adapter of the earlier evaluations.",
}


class StepWatcher(Watcher):
    """Shows what a step is doing that takes longer than `_LONG_STEP`."""

    def __init__(self, bar: console.Bar, clock: Callable[[], float] = time.monotonic) -> None:
        self.bar, self.clock, self.began, self.name = bar, clock, clock(), ""

    def next_step(self, **fields: console.Value) -> None:
        self.bar.advance(1, now=None, **fields)
        self.began = self.clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self.name = self.name, name
        try:
            yield
        finally:
            self.name = before

    def begins(self, number: int, total: int) -> None:
        if self.clock() - self.began > _LONG_STEP:
            self.bar.advance(0, now=f"{self.name} {number}/{total}")


class TrainingCommand:
    """Reports a run while it trains: metrics and pictures to the loggers, progress and notes to the console."""

    def __init__(
        self,
        run: TrainingRun,
        scorer: RewardSet,
        tracker: Tracker,
        logs: Sequence[ExtraLog],
    ) -> None:
        self.run, self.scorer, self.tracker = run, scorer, tracker
        self.logs: list[Tracker | ExtraLog] = [tracker, *logs]

    def execute(self) -> Progress:
        """Trains to the end; after an error or Ctrl-C says how to go on."""
        run = self.run
        try:
            done = run.checkpoints.completed_steps()
            bar = console.progress("train", run.config.grpo.steps, completed=done)
            with bar as self.bar, watched_by(StepWatcher(self.bar)) as self.watcher:
                callbacks = Callbacks(
                    on_step=self._on_step, note=self.bar.note, on_probe=self._on_probe, on_alarm=self._on_alarm
                )
                progress = run.run(callbacks)
            if run.stopped_by is not None:
                raise Stopped(run.stopped_by)
        except KeyboardInterrupt:
            console.note(_where_it_stopped(run))
            raise
        except Exception:
            if run.checkpoints.newest is not None:
                console.note(_where_it_stopped(run))
            raise
        return progress

    def _on_probe(self, module: str, done: int, needed: int) -> None:
        """Shows when the signal check is likely to end: most modules pass at the first look."""
        if done == 1:
            self.probes = self.bar.below(f"Signal check: {module}", needed)
        self.probes.expect(needed)
        self.probes.advance()
        if done == 2:  # The first two say how long a rollout takes.
            self.probes.print()

    def _on_step(self, metrics: StepMetrics, row: dict[str, float]) -> None:
        for log in self.logs:
            log.metrics(tracked(row, self.run.spec.modules, list(self.run.config.rewards)), metrics.step)
        if self.run.is_picture_due(metrics.step):
            self._show_samples(metrics.step)
        names = {"reward/total": "reward", "kl": "kl", "ar/kl": "kl", "eval/total": "eval"}
        values = {shown: row[name] for name, shown in names.items() if name in row}
        self.watcher.next_step(**{n: value if n == "kl" else f"{value:z.3f}" for n, value in values.items()})

    def _show_samples(self, step: int) -> None:
        """Shows samples of eval prompts, and keeps samples of held-out prompts for the report's film."""
        records, samples, rewards = self.run.shown_samples()
        captions = [
            f"{caption(record.prompt, record.id)}\n" + ("unscored" if math.isnan(reward) else f"reward {reward:z.2f}")
            for record, reward in zip(records, rewards.tolist(), strict=True)
        ]
        pictures = [of_sample(record, sample, self.scorer) for record, sample in zip(records, samples, strict=True)]
        sources = [beside(record, sample) for record, sample in zip(records, samples, strict=True)]
        self._show(grid(pictures, captions, SHOWN_EACH, sources), f"samples-{step:06d}.png", "samples", step)
        drawn = zip(self.run.film_prompts, self.run.film_samples(), strict=True)
        film = [[scaled(of_sample(record, sample, self.scorer))] for record, sample in drawn]
        if film:
            table(film).save(self.run.checkpoints.folder / f"film-{step:06d}.png")

    def _on_alarm(self, step: int, sentence: str, shown: Shown) -> None:
        """Tells that the reward is taken to be cheated, and shows by what."""
        self._show(self._before_and_after(shown), picture_of(step), "alarm", step)
        self.tracker.tags({"alarm": f"step {step}: {sentence}"})
        after = _AFTER[self.run.config.alarm.action]
        self.bar.note(f"Alarm at step {step}: {sentence}. Is this reward hacking? {after}")

    def _before_and_after(self, shown: Shown) -> Image:
        """The base model's pictures of the first eval prompts, each beside what it has become."""
        assert self.run.monitor is not None
        files = self.run.monitor.files(shown.records)
        pairs = [(row, file) for row, file in enumerate(files) if file is not None][:_MOST_PICTURES]
        pictures, captions, sources = [], [], []
        for row, file in pairs:
            record, sample = shown.records[row], shown.samples[row]
            pictures += [of_file(file), of_sample(record, sample, self.scorer)]
            now = f"now, reward {float(shown.total[row]):z.2f}"
            captions += [f"{caption(record.prompt, record.id)}\nbase model", now]
            sources += [beside(record, sample)] * 2
        return grid(pictures, captions, columns=2 * min(len(pairs), _PAIRS_IN_A_ROW), sources=sources)

    def _show(self, picture: Image, file: str, name: str, step: int) -> None:
        """Logs a picture, and saves it next to the checkpoints, so that a resumed run has it."""
        folder = self.run.checkpoints.folder
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / file)
        for log in self.logs:
            log.image(picture, name, step)


def show_replaced(folder: Path, steps: int, run_id: str | None) -> None:
    """Says which adapters in ``folder`` a training of ``steps`` will replace, and whether MLflow keeps them.

    ``run_id`` is its own MLflow run. Of a run that goes on, the adapters of its earlier part are replaced silently.
    """
    try:
        facts = read_facts(folder)
    except UserError:  # There are none, or nobody can use them.
        return
    before, run = facts.get("steps", 0), None
    with suppress(UserError):  # MLflow does not answer.
        run = training_run(facts)
    is_own = run_id is not None and run_id in (facts.get("mlflow_run_id"), run.info.run_id if run else None)
    if is_own and before <= steps:
        return
    if run is None or is_own or run.data.tags.get(TRAINING_DIGEST) != file_digest(folder / FACTS):
        kept = "MLflow does not keep it: copy the folder before this training ends."
    else:
        kept = f"MLflow keeps it: adapter={run.info.run_id}"
    known = ", ".join(str(facts[name]) for name in (RUN_NAME, "finished") if facts.get(name))
    console.note(
        f"This training replaces the adapter of {counted(before, 'step')} in {folder}"
        f"{f' ({known})' if known else ''}. {kept}"
    )


def show_mixed(facts: Mapping[str, Any]) -> None:
    """Says of a resumed training with this provenance what keeps `reproduce` from repeating it."""
    if mixed := provenance.mixed_parts(facts):
        console.note(
            f"Warning: this run goes on with different {'; '.join(mixed)}, so `reproduce` will not be able to repeat"
            " it. To train what it can repeat, start at step 1 (resume=never)."
        )


def complete_adapters(
    folder: Path,
    run: TrainingRun,
    run_name: str | None,
    records: RecordTable,
    start: Path | None,
) -> None:
    """Writes the adapters with their facts, what they have seen, held-out prompts, uncommitted changes, model card."""
    # The line that loads each adapter without this package.
    loading = {module: run.spec.family.modules[module].adapter.plain for module in run.spec.modules}
    finished = datetime.now(UTC).isoformat(" ", timespec="minutes")
    counts = {split: len(records.split(split)) for split in SPLITS}
    about = {RUN_NAME: run_name, "finished": finished, "loading": loading, "records": counts}
    facts = run.write_adapters(folder, about)
    if run.checkpoints.changes:
        (folder / CHANGES).write_bytes(run.checkpoints.changes)
    never_seen = sorted({record.prompt for record in records.split("held_out", SEALED)})
    (folder / HELD_OUT).write_text(json.dumps(never_seen, ensure_ascii=False), encoding="utf-8")
    earlier = frozenset() if start is None or start.is_file() else read_seen(start)
    write_seen(records.split("train", "eval").rows(), folder, earlier)
    judged_by = str(Command.current().for_pipeline("evaluate"))
    (folder / CARD).write_text(model_card(facts, list(loading), judged_by=judged_by), encoding="utf-8")


def show_training(progress: Progress, steps: int) -> None:
    """Prints the rewards of the first and the last step, and the best evaluation."""
    first, last = (f"{progress.history[row]['reward/total']:z.3f}" for row in (0, -1))
    both = f"{first} at the first step, {last} at the last (each step has its own prompts)"
    means = both if len(progress.history) > 1 else last
    best = f"; on eval prompts {progress.best_score:z.3f} at step {progress.best_step}" if progress.best_step else ""
    console.note(
        f"Trained {counted(steps, 'step')}: mean reward of the training samples {means}{best}."
        f" Held-out prompts are judged by evaluate."
    )


def _where_it_stopped(run: TrainingRun) -> str:
    """Says where the last checkpoint of a stopped run is, and which command goes on from it."""
    command = Command.current()
    newest, folder = run.checkpoints.newest, run.checkpoints.folder
    if newest is None:
        return f"Stopped before the first checkpoint. Start again with: {command.for_pipeline('train')}"
    stopped = f"Stopped after step {run.trainer.step} of {run.config.grpo.steps}; the checkpoint is {newest}\n"
    if APART in os.environ:
        return f"Stopped after step {run.trainer.step} of {run.config.grpo.steps}."
    if is_stage_of_dvc():
        return f"{stopped}Repeat the command that called DVC: the stage continues from the checkpoint."
    return f"{stopped}Go on with: {command.resuming(run.config.resume, folder)}"
