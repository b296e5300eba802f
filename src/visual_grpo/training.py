"""One training run from start, or from its checkpoint, to its adapters: no Kedro and no MLflow here."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from visual_grpo.config import Parameters, flatten
from visual_grpo.errors import UserError
from visual_grpo.evaluation.generate import distinct_prompts
from visual_grpo.evaluation.seeds import image_seed
from visual_grpo.folders import replace_folder
from visual_grpo.grpo import checkpoint
from visual_grpo.grpo.signal_check import Signal, SignalRule, check_signal, describe, measure_signal
from visual_grpo.grpo.trainer import Trainer
from visual_grpo.stopping import stop_request
from visual_grpo.trained_adapters import FACTS, HISTORY
from visual_grpo.types import AdaptedModel, PromptRecord, Sample, Scorer, StepMetrics

# Changing these in a resumed run changes nothing of the steps already taken or still to come.
FREE_ON_RESUME = {"resume", "tracking", "output", "adapter"}

SHOWN_PROMPTS, SHOWN_EACH = 4, 4
NOTE_SECONDS = 15.0
"""Between two notes on how far the signal check is."""


@dataclass(kw_only=True)
class Progress:
    """What a run has to show so far; goes into every checkpoint."""

    history: list[dict[str, float]] = field(default_factory=list)
    """One row of metrics a step."""
    best_score: float = float("-inf")
    """Mean total reward of the best adapter on the eval prompts at the stock sampler."""
    best_step: int = 0
    best_adapter: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """How the run tells the outside what happens."""

    on_step: Callable[[StepMetrics, dict[str, float]], None]
    """A step's metrics, and the row that goes into the history."""
    note: Callable[[str], None]


class TrainingRun:
    """Trains, evaluates now and then, and checkpoints; ``stopped`` tells whether a signal ended it."""

    def __init__(
        self,
        config: Parameters,
        model: AdaptedModel,
        scorer: Scorer,
        trainer: Trainer,
        *,
        train: Sequence[PromptRecord],
        evaluation: Sequence[PromptRecord],
        identity: dict[str, str],
        run_id: str | None,
        advice: Mapping[str, str] = MappingProxyType({}),
        lineage: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            identity: what the run depends on beside the parameters: model and data digests.
            lineage: where the run comes from (command, commit, versions), for ``training.json``.
            advice: module -> what to change where the signal check finds nothing to learn for it.
        """
        self.config, self.model, self.scorer, self.trainer = config, model, scorer, trainer
        self.train_prompts = train
        self.eval_prompts = distinct_prompts(evaluation, config.evaluation.prompts)
        self.identity, self.run_id, self.advice, self.lineage = identity, run_id, advice, lineage
        self.folder = Path(config.tracking.checkpoints)
        self.progress = Progress()
        self.stopped = False

    def completed_steps(self) -> int:
        """Steps that an earlier run has done and this one will not do again."""
        latest = self._checkpoint()
        return int(latest.name.removeprefix("step-")) if latest is not None else 0

    def run(self, callbacks: Callbacks) -> Progress:
        """Trains until ``grpo.steps`` or until a signal asks to stop; a checkpoint is written at the end of both."""
        if not len(self.train_prompts):
            raise UserError("The dataset has no training records; lower data.held_out_share or data.eval_share.")
        self._start(callbacks)
        saved = self.trainer.step
        with stop_request(
            lambda: callbacks.note("Stopping after this step; press Ctrl-C again to stop at once.")
        ) as stop:
            for metrics in self.trainer.fit(self.train_prompts):
                row = {"step": float(metrics.step)} | dict(metrics.values) | self._evaluate_if_due()
                self.progress.history.append(row)
                callbacks.on_step(metrics, row)
                if self._due(self.config.tracking.checkpoint_every) or stop.asked:
                    self.save()
                    saved = self.trainer.step
                if stop.asked:
                    break
        self.stopped = stop.asked and self.trainer.step < self.config.grpo.steps
        if saved != self.trainer.step:
            self.save()
        return self.progress

    def save(self) -> None:
        """Writes a checkpoint of everything a bit-exact continuation needs."""
        state, facts = self.trainer.state()
        tensors = {f"trainer/{name}": value for name, value in state.items()}
        tensors |= {f"best/{name}": value for name, value in self.progress.best_adapter.items()}
        random_tensors, random_facts = checkpoint.random_states()
        tensors |= random_tensors
        facts = {
            "trainer": facts,
            "random": random_facts,
            "history": self.progress.history,
            "best_step": self.progress.best_step,
            "best_score": self.progress.best_score if self.progress.best_step else None,
            "parameters": _decisive(self.config),
            "identity": self.identity,
            "public": {"mlflow_run_id": self.run_id},
        }
        checkpoint.save_checkpoint(
            self.folder, self.trainer.step, tensors, facts, keep=self.config.tracking.keep_checkpoints
        )

    def write_adapters(self, folder: Path) -> None:
        """Writes the adapters of the best and the last step into ``best`` and ``last``, a folder per trained module.

        Those that ``evaluation.adapter`` names are also in ``folder`` itself, where evaluate reads them, with the
        facts of the run in ``training.json`` and its metrics in ``training.csv``.
        """
        last = self.model.adapters.state()
        self.model.adapters.save(folder / "last")
        self.model.adapters.load_state(self.progress.best_adapter or last)
        self.model.adapters.save(folder / "best")
        self.model.adapters.load_state(last)
        shutil.copytree(folder / self.config.evaluation.adapter, folder, dirs_exist_ok=True)
        facts = {
            "seed": self.config.seed,
            "steps": self.trainer.step,
            "best_step": self.progress.best_step or self.trainer.step,
            "best_eval_total": self.progress.best_score if self.progress.best_step else None,
            "adapter": self.config.evaluation.adapter,
            "samples": int(sum(row["samples"] for row in self.progress.history)),
            "mlflow_run_id": self.run_id,
            **self.identity,
            **self.lineage,
            "parameters": self.config.public(),
        }
        (folder / FACTS).write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")
        pd.DataFrame(self.progress.history).to_csv(folder / HISTORY, index=False)

    def _start(self, callbacks: Callbacks) -> None:
        latest = self._checkpoint()
        if latest is not None:
            self._resume(latest)
            callbacks.note(f"Resuming after step {self.trainer.step} of {self.config.grpo.steps} from {latest}")
            return
        if self.config.resume == "auto":
            callbacks.note(f"No checkpoint in {self.folder}: starting at step 1")
        self._warn_of_another_guidance(callbacks)
        self._check_signal(callbacks)
        _set_aside(self.folder)

    def _warn_of_another_guidance(self, callbacks: Callbacks) -> None:
        rollout, stock = (s.guidance_scale for s in (self.config.sampling.rollout, self.config.sampling.stock))
        if rollout is not None and stock is not None and rollout != stock:
            callbacks.note(
                f"Warning: training samples are drawn with guidance {rollout:g}, the stock sampler has {stock:g}. What"
                " is learned at one overshoots or falls short at the other; let sampling.rollout.guidance_scale and"
                " sampling.stock.guidance_scale agree."
            )

    def _check_signal(self, callbacks: Callbacks) -> None:
        """Stops a run that has nothing to learn, before its first step."""
        check = self.config.policy.signal_check
        if not check.rollouts:
            return
        rule = SignalRule.of(check, self.config.grpo.steps)
        signals: dict[str, Signal] = {}
        for module, trainer in self.trainer.modules.items():

            def unclear(signal: Signal, module: str = module) -> None:
                callbacks.note(f"Signal check: {module} {signal} cannot tell yet; drawing more")

            signals[module] = measure_signal(
                trainer,
                self.train_prompts,
                most=check.rollouts,
                rule=rule,
                drawn=_now_and_then(
                    callbacks.note, f"Signal check: {module} {{}} of at most {check.rollouts} rollouts"
                ),
                unclear=unclear,
            )
        callbacks.note(f"Signal check (cosine between policy gradients): {describe(signals, rule)}")
        check_signal(signals, rule, self.advice)

    def _checkpoint(self) -> Path | None:
        return checkpoint.latest_checkpoint(self.folder) if self.config.resume == "auto" else None

    def _resume(self, latest: Path) -> None:
        tensors, facts = checkpoint.load_checkpoint(latest)
        _refuse_changes(latest, facts.get("parameters"), _decisive(self.config))
        _refuse_changes(latest, facts.get("identity"), self.identity)
        self.progress.best_adapter = {k[5:]: v for k, v in tensors.items() if k.startswith("best/")}
        self.progress.best_step = facts["best_step"]
        if self.progress.best_step:
            self.progress.best_score = facts["best_score"]
        self.progress.history = facts["history"]
        own = {k.removeprefix("trainer/"): v for k, v in tensors.items() if k.startswith("trainer/")}
        self.trainer.load_state(own, facts["trainer"])
        checkpoint.restore_random_states(tensors, facts["random"])

    def _due(self, every: int) -> bool:
        return every > 0 and self.trainer.step % every == 0

    def _evaluate_if_due(self) -> dict[str, float]:
        """Mean total reward on fixed seeds at the stock sampler, and the best adapter so far."""
        last = self.trainer.step == self.config.grpo.steps
        if not self.eval_prompts or not (last or self._due(self.config.evaluation.every)):
            return {}
        total = self.evaluate()
        if total > self.progress.best_score:
            self.progress.best_score, self.progress.best_step = total, self.trainer.step
            self.progress.best_adapter = self.model.adapters.state()
        return {"eval/total": total}

    def evaluate(self) -> float:
        """Mean total reward over one sample of each eval prompt, at the stock sampler and fixed seeds."""
        totals = []
        size = self.config.evaluation.batch_size
        for start in range(0, len(self.eval_prompts), size):
            records = self.eval_prompts[start : start + size]
            seeds = [image_seed(self.config.evaluation.seed, record.id, 0) for record in records]
            samples = self.model.generate(records, seeds, self.config.sampling.stock)
            totals.append(self.scorer(records, samples).total)
        scores = torch.cat(totals)
        return float(scores[~scores.isnan()].double().mean())

    def shown_samples(self) -> tuple[list[PromptRecord], Sequence[Sample], Tensor]:
        """Records, samples and total rewards [B] of the same few prompts and seeds at every step, for a picture.

        `SHOWN_PROMPTS` eval prompts (training prompts, if there are none) x `SHOWN_EACH` samples, at the stock sampler.
        """
        prompts = self.eval_prompts[:SHOWN_PROMPTS] or [self.train_prompts[i] for i in range(SHOWN_PROMPTS)]
        records = [record for record in prompts for _ in range(SHOWN_EACH)]
        seeds = [image_seed(self.config.evaluation.seed, record.id, i % SHOWN_EACH) for i, record in enumerate(records)]
        samples = self.model.generate(records, seeds, self.config.sampling.stock)
        return records, samples, self.scorer(records, samples).total


def _now_and_then(note: Callable[[str], None], text: str, every: float = NOTE_SECONDS) -> Callable[[int], None]:
    """Notes ``text`` with a count at the first call, and then at most once in ``every`` seconds."""
    noted = float("-inf")

    def count(number: int) -> None:
        nonlocal noted
        if time.monotonic() - noted >= every:
            noted = time.monotonic()
            note(text.format(number))

    return count


def _set_aside(folder: Path) -> None:
    """Keeps an earlier run's checkpoints in ``<folder>.previous`` until the next run that starts at step 1."""
    if folder.exists():
        replace_folder(folder, folder.with_name(f"{folder.name}.previous"))


def check_resumable(config: Parameters) -> None:
    """Raises UserError if there is a checkpoint that was made with other parameters."""
    latest = checkpoint.latest_checkpoint(Path(config.tracking.checkpoints))
    if latest is not None:
        _refuse_changes(latest, checkpoint.load_facts(latest).get("parameters"), _decisive(config))


def _decisive(config: Parameters) -> dict[str, Any]:
    """The parameters by their dotted names that a resumed run must share with its checkpoint."""
    tree = config.public()
    return flatten({name: block for name, block in tree.items() if name not in FREE_ON_RESUME})


def _refuse_changes(latest: Path, before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    if before is None:
        raise UserError(f"The checkpoint {latest} is of another version; start again without resume=auto.")
    changed = [
        f"{name} (was {before.get(name)!r}, is {now.get(name)!r})"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise UserError(
            f"The checkpoint {latest} was made with other values of {', '.join(changed)}: going on would mix two"
            " runs. Use the same, or start again without resume=auto."
        )
