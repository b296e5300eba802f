"""One training run from start, or from its checkpoint, to its adapters: no Kedro and no MLflow here."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from visual_grpo.adapter_folder import FACTS, HISTORY, weight_sums
from visual_grpo.common.errors import UserError
from visual_grpo.common.processes import StopRequest, stop_request
from visual_grpo.common.types import PromptRecord, Sample, Scores, StepMetrics
from visual_grpo.evaluation.alarm import HackingMonitor, InterimAnalysis
from visual_grpo.evaluation.samples import distinct_prompts, requests
from visual_grpo.grpo.distributed import ranks
from visual_grpo.grpo.distributed.rollouts import RankZeroScorer
from visual_grpo.grpo.signal_check import check_signal, measure_signal, useful_cosine
from visual_grpo.grpo.two_stage import Trainer
from visual_grpo.models.model import DistributedModel, Model
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training.ema import AdapterAverage
from visual_grpo.training.likely_mistakes import equal_rewards, likely_mistakes
from visual_grpo.training.prompt_checks import (
    require_evaluations,
    require_separate_groups,
    require_training_records,
)
from visual_grpo.training.resuming import ResumedRun
from visual_grpo.training.run_checkpoints import PICTURES, Progress, RunCheckpoints

SHOWN_PROMPTS, SHOWN_EACH = 4, 4
STOPPING = "Stopping after this step, with a checkpoint; press Ctrl-C again to stop at once and drop the step."


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Eval prompts with a sample of each, at the eval sampler and fixed seeds, and what the rewards say."""

    records: Sequence[PromptRecord]
    samples: Sequence[Sample]
    total: Tensor
    """[B]."""
    rewards: Mapping[str, Tensor]
    """Each [B]."""

    @property
    def mean(self) -> float:
        """Mean of the scored totals."""
        return float(self.total[~self.total.isnan()].double().mean())


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Called with the run's events."""

    on_step: Callable[[StepMetrics, dict[str, float]], None]
    """A step's metrics, and the row that goes into the history."""
    note: Callable[[str], None]
    on_probe: Callable[[str, int, int], None] = lambda module, done, needed: None
    """A module's rollouts of the signal check: how many are generated, and how many its next look needs."""
    on_alarm: Callable[[int, str, Shown], None] = lambda step, sentence, shown: None
    """The step, why the reward is taken to be cheated, and what it judged."""


class TrainingRun:
    """Trains, evaluates now and then, and checkpoints; ``stopped_by`` is the signal that ended it, None if none did."""

    def __init__(
        self,
        spec: RunSpec,
        model: Model | DistributedModel,
        scorer: RewardSet | RankZeroScorer,
        trainer: Trainer,
        *,
        data: Mapping[str, Sequence[PromptRecord]],
        provenance: Mapping[str, Any],
        run_id: str | None,
        resumed: ResumedRun | None = None,
        changes: bytes = b"",
        monitor: HackingMonitor | None = None,
    ) -> None:
        """
        Args:
            data: records by split. Held-out ones are for the report's film: no reward sees them, they decide nothing.
            provenance: of the adapters, with commands, commits and versions: for ``training.json`` and checkpoints.
            run_id: of the MLflow run.
            resumed: the run to resume; None = start at step 1.
            changes: how the code differs from its commit, as a patch.
            monitor: compares the evaluations with the base model's samples.
        """
        self.spec, self.config, self.model, self.scorer, self.trainer = spec, spec.config, model, scorer, trainer
        self.train_prompts = data["train"]
        self.eval_prompts = distinct_prompts(data["eval"], self.config.evaluation.prompts)
        filmed = min(SHOWN_PROMPTS, self.config.evaluation.max_prompts or SHOWN_PROMPTS)  # The baseline has them, too.
        self.film_prompts = distinct_prompts(data.get("held_out", ()), filmed)
        self.provenance, self.run_id, self.monitor = provenance, run_id, monitor
        self.progress, self.average = Progress(), AdapterAverage(trainer, self.config.train.ema_decay)
        self.checkpoints = RunCheckpoints(
            self.config,
            trainer,
            self.progress,
            self.average,
            provenance=provenance,
            run_id=run_id,
            resumed=resumed,
            changes=changes,
        )
        self.stopped_by: signal.Signals | None = None

    def run(self, callbacks: Callbacks) -> Progress:
        """Trains until ``grpo.steps`` or until a signal asks to stop; a checkpoint is written at the end of both."""
        require_training_records(self.train_prompts)
        units, monitor = self._units(), self.monitor
        drawn = ranks.broadcast(lambda: monitor and monitor.files(self.eval_prompts))  # Only rank 0 has a monitor.
        compared = [unit for unit, file in zip(units, drawn or units, strict=True) if file]
        require_evaluations(self.config, units, compared)
        if self.scorer.without_judges().needs_whole_groups:
            require_separate_groups(self.spec, self.train_prompts)
        if not self.checkpoints.resume(callbacks.note):
            for warning in likely_mistakes(self.spec, self.model, self.train_prompts, self.eval_prompts):
                callbacks.note(f"Warning: {warning}")
            if self.config.sampling.rollout.size():
                sizes = (self.spec.rollout_settings, self.spec.settings)
                trained, judged = (" x ".join(map(str, [*filter(None, [s.frames]), *s.size])) for s in sizes)
                callbacks.note(f"Training samples are {trained} (sampling.rollout); evaluation samples are {judged}.")
            self._check_signal(callbacks)
            self.checkpoints.begin(callbacks.note)
        with stop_request(lambda: callbacks.note(STOPPING)) as stop:
            self._train(callbacks, stop)
        self.stopped_by = stop.by
        self.checkpoints.save_if_changed()
        return self.progress

    def _train(self, callbacks: Callbacks, stop: StopRequest) -> None:
        if (why := self._why_ended()) is not None:
            callbacks.note(f"The training ended after step {self.trainer.step}: {why}.")
            return
        for metrics in self.trainer.fit(self.train_prompts):
            # A checkpoint holds the rows before it: the time that it takes is in the next.
            spent = {"seconds/checkpoint": self.checkpoints.take_seconds()}
            row = {"step": float(metrics.step)} | dict(metrics.values) | spent | self._evaluate_if_due(callbacks)
            self.progress.history.append(row)
            callbacks.on_step(metrics, row)
            for warning in equal_rewards(self.spec, self.progress.history):
                callbacks.note(f"Warning: {warning}")
            due, stopped = ranks.broadcast(lambda: (self.checkpoints.due(), stop.by is not None))
            if due or stopped:
                self.checkpoints.save()
            if stopped or self._why_ended() is not None:
                return

    def write_adapters(self, folder: Path, about: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Writes the adapters of the best and the last step into ``best`` and ``last``, a folder per trained module.

        Those that ``evaluation.adapter`` names are also in ``folder`` itself, where evaluate reads them, with the
        facts of the run and ``about``, which it returns, in ``training.json`` and its metrics in ``training.csv``.
        """
        with self.average.in_place():
            last = self.model.adapters.state()
            self.model.adapters.save(folder / "last")
            self.model.adapters.load_state(self.progress.best_adapter or last)
            self.model.adapters.save(folder / "best")
            self.model.adapters.load_state(last)
        chosen = self._chosen()
        shutil.copytree(folder / chosen, folder, dirs_exist_ok=True)
        for pattern in PICTURES:
            for picture in self.checkpoints.folder.glob(pattern):
                shutil.copyfile(picture, folder / picture.name)
        facts = {
            "seed": self.config.training_seed,
            "steps": self.trainer.step,
            "best_step": self.progress.best_step or self.trainer.step,
            "best_eval_total": self.progress.best_score if self.progress.best_step else None,
            "adapter": chosen,
            "alarms": self.progress.alarms,
            "stopped_early": self.stopped_early,
            "film": [record.id for record in self.film_prompts],
            "samples": int(sum(row["samples"] for row in self.progress.history)),
            "mlflow_run_id": self.run_id,
            **self.provenance,
            "sums": weight_sums(folder),
            **about,
        }
        (folder / FACTS).write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")
        pd.DataFrame(self.progress.history).to_csv(folder / HISTORY, index=False)
        return facts

    def _chosen(self) -> str:
        if not self.progress.alarms or self.config.alarm.action != "rollback":
            return self.config.evaluation.adapter
        if not self.progress.best_step:
            first = self.progress.alarms[0]
            remedy = "Change" if first["step"] == 1 else "Evaluate earlier (a smaller evaluation.every), or change"
            raise UserError(
                f"The first evaluation, after step {first['step']}, raised the alarm:"
                f" {first['sentence']}. So alarm.action=rollback has no earlier adapter. {remedy} the reward."
            )
        return "best"

    def _check_signal(self, callbacks: Callbacks) -> None:
        """Stops a run that has nothing to learn, before its first step."""
        steps = self.config.grpo.steps
        most, useful = self.config.policy.signal_check.most(steps), useful_cosine(steps)
        if not most:
            return
        signals = {
            module: measure_signal(
                trainer,
                self.train_prompts,
                most=most,
                useful=useful,
                note=callbacks.note,
                advance=partial(callbacks.on_probe, module),
            )
            for module, trainer in self.trainer.modules.items()
        }
        advice = {module: self.spec.family.modules[module].advice for module in self.spec.modules}
        summary = check_signal(signals, useful, advice)
        callbacks.note(f"Signal check (cosine between policy gradients): {summary}")

    def _evaluate_if_due(self, callbacks: Callbacks) -> dict[str, float]:
        """Mean total reward on fixed seeds at the eval sampler, what the monitor says, and the best adapter so far."""
        step, every = self.trainer.step, self.config.evaluation.every
        if not self.eval_prompts or not (step == self.config.grpo.steps or (every and step % every == 0)):
            return {}
        shown, monitor = self.evaluate(), self.monitor
        look = ranks.broadcast(  # Only rank 0 has a monitor.
            lambda: None if monitor is None else monitor.look(shown.records, shown.samples, shown.total, shown.rewards)
        )
        if look is not None and look.alarm is not None:
            self.progress.alarms.append({"step": step, "sentence": look.alarm})
            callbacks.on_alarm(step, look.alarm, shown)
        self._keep_best(shown, look)
        if patience := self.config.train.early_stopping_patience:
            self.progress.gains.look(step, shown.total.tolist(), self._units(), patience)
            if self.stopped_early is not None:
                callbacks.note(f"Early stopping after step {step} of {self.config.grpo.steps}: {self.stopped_early}.")
        return {"eval/total": shown.mean} | ({} if look is None else look.metrics())

    def _keep_best(self, shown: Shown, look: InterimAnalysis | None) -> None:
        """Keeps the adapter of the highest score, unless this evaluation ends the training by an alarm.

        The best score of a reward that is cheated is the worst adapter. An alarm waits for proof, so that the policy
        has learned to cheat some evaluations before it: a rollback prefers the least suspicious evaluation.
        """
        progress, totals = self.progress, shown.total.tolist()
        if self._is_ended_by_alarm() or math.isnan(shown.mean):
            return
        suspicion, better = 0.0 if look is None else look.suspicion, progress.is_best(totals, shown.mean)
        if self.config.alarm.action == "rollback" and suspicion != progress.best_suspicion:
            better = suspicion < progress.best_suspicion
        if better or not progress.best_step:
            progress.best_score, progress.best_totals, progress.best_step = shown.mean, totals, self.trainer.step
            with self.average.in_place():
                progress.best_adapter, progress.best_suspicion = self.model.adapters.state(), suspicion

    def _why_ended(self) -> str | None:
        """States why the training ends before ``grpo.steps``; None while it goes on."""
        return f"alarm: {self.progress.alarms[-1]['sentence']}" if self._is_ended_by_alarm() else self.stopped_early

    def _is_ended_by_alarm(self) -> bool:
        return bool(self.progress.alarms) and self.config.alarm.action != "warn"

    @property
    def stopped_early(self) -> str | None:
        """States since when there was no gain where that ends the training before its last step; else None."""
        gains, patience = self.progress.gains, self.config.train.early_stopping_patience
        is_early = patience is not None and gains.without >= patience and self.trainer.step < self.config.grpo.steps
        return gains.sentence if is_early else None

    def _units(self) -> list[str]:
        """Returns what is judged as one case: records that are held out together, such as queries about an image."""
        return [record.split_group or record.id for record in self.eval_prompts]

    def evaluate(self) -> Shown:
        """Generates one sample of each eval prompt, at the eval sampler and fixed seeds.

        Where a reward compares the samples of a prompt, as many are generated and scored as the baseline has; the first
        of each prompt is returned.
        """
        samples, scores = list[Sample](), list[Scores]()
        each = self.config.evaluation.images_per_prompt if self.scorer.needs_whole_groups else 1
        size = max(1, self.config.evaluation.batch_size * self.config.distributed.processes // each)
        for start in range(0, len(self.eval_prompts), size):
            records, generated = self._generate(self.eval_prompts[start : start + size], each)
            samples += generated[::each]
            scores.append(self.scorer(records, generated))
        names = scores[0].rewards
        return Shown(
            records=self.eval_prompts,
            samples=samples,
            total=torch.cat([batch.total[::each] for batch in scores]),
            rewards={name: torch.cat([batch.rewards[name][::each] for batch in scores]) for name in names},
        )

    def is_picture_due(self, step: int) -> bool:
        every = self.config.tracking.images_every
        return every > 0 and (step in (1, self.config.grpo.steps) or step % every == 0)

    def shown_samples(self) -> tuple[list[PromptRecord], Sequence[Sample], Tensor]:
        """Records, samples and total rewards [B] of the same few prompts and seeds at every step, for a picture.

        `SHOWN_PROMPTS` eval prompts (training prompts, if there are none) x `SHOWN_EACH` samples, at the eval sampler.
        """
        prompts = self.eval_prompts[:SHOWN_PROMPTS] or list(self.train_prompts[:SHOWN_PROMPTS])
        records, samples = self._generate(prompts, SHOWN_EACH)
        return records, samples, self.scorer.without_judges()(records, samples).total

    def film_samples(self) -> Sequence[Sample]:
        """Generates one sample of each of ``film_prompts`` at the eval sampler and the baseline's seeds."""
        return self._generate(self.film_prompts)[1] if self.film_prompts else []

    def _generate(self, prompts: Sequence[PromptRecord], each: int = 1) -> tuple[list[PromptRecord], Sequence[Sample]]:
        """Generates at the eval sampler and fixed seeds, with the average of the adapters; a record for each sample."""
        asked = requests(prompts, each, self.config.evaluation.seed)
        samples, size = list[Sample](), self.config.evaluation.batch_size * self.config.distributed.processes
        with self.average.in_place():
            for start in range(0, len(asked), size):
                records, seeds = zip(*((one.record, one.seed) for one in asked[start : start + size]), strict=True)
                samples += self.model.generate(records, seeds, self.config.sampling.eval)
        return [one.record for one in asked], samples
