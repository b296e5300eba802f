"""One retraining, from the update of the data to the alias.

Every stage can be killed and run again: DVC repeats what is not done, a training goes on from its checkpoint, the gate
comes to the same decision, the version is found by the digest of its weights, and the alias moves last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visual_grpo import console
from visual_grpo.config import Parameters
from visual_grpo.config.presets import AUTO
from visual_grpo.errors import UserError
from visual_grpo.pipelines.compare import side_of
from visual_grpo.pipelines.promote.gate_settings import gate_settings
from visual_grpo.pipelines.promote.same_reward import judge_differences
from visual_grpo.retraining import branch, data_checks, retention
from visual_grpo.retraining.commands import Commands, kedro
from visual_grpo.retraining.monitor import fallen_score
from visual_grpo.retraining.outcome import Code, Outcome
from visual_grpo.retraining.stages import TRAIN, Stages
from visual_grpo.retraining.training_start import TrainingStart
from visual_grpo.tracking.champions import Champions
from visual_grpo.tracking.versions import Registered
from visual_grpo.trained_adapters import FACTS, adapter_digest, read_facts


@dataclass
class Retraining:
    """What a retraining needs to know; `run` does it."""

    config: Parameters
    environment: str | None
    tracking_uri: str
    stages: Stages
    start: TrainingStart
    commands: Commands
    seconds: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    """Why something is to be done, as far as that is known."""

    def run(self) -> Outcome:
        """Retrains if there is a reason to, and judges what was trained.

        Raises:
            UserError, StageFailedError, OutOfTimeError, DataRefusedError: the champion stays what it is.
        """
        self._check()
        if self.config.retrain.update:
            with self._stage("update"):
                self.stages.update_imports()
        self.reason = self._reason()
        if self.reason is not None and not self._train() and self._is_judged():
            console.note("Nothing was trained: what has changed decides neither the training nor the gate.")
            self.reason = self._trigger()
            if self.reason is not None:
                self._train()
        if self.reason is None:
            sentence = "nothing to do: data, code and parameters are those of the last training"
            return self._finished(self.outcome(Code.DONE, sentence))
        with self._stage("gate"):
            decision = self._judge()
        outcome = self.outcome(Code.DONE if decision["promoted"] else Code.NOT_PROMOTED, decision["sentence"])
        outcome.version = decision["version"]
        return self._finished(outcome)

    def _train(self) -> bool:
        """Runs the stages that have changed; whether one of them was the training."""
        console.note(f"Reason: {self.reason}")
        before = self._trained()
        with self._stage("data"):
            self.stages.prepare(lambda: data_checks.check(self.config, self._champion()))
        self._choose_start()
        self._warn_of_another_reward()
        with self._stage("train"):
            self.stages.repeat()
        return self._trained() != before

    def _trained(self) -> bytes | None:
        """What tells the last training from every other; None = there is none."""
        facts = Path(self.config.adapters_folder) / FACTS
        return facts.read_bytes() if facts.is_file() else None

    def _finished(self, outcome: Outcome) -> Outcome:
        """Tidies up; where that fails, the decision stands."""
        outcome.run_id = self._run_id()
        try:
            with self._stage("tidy"):
                outcome.removed, outcome.commit = self._tidy()
            outcome.warning = self._not_committed(outcome.commit)
            if outcome.warning is not None:
                console.note(f"Warning: {outcome.warning}")
        except UserError as error:
            outcome.warning = str(error)
            console.note(f"Warning: {error}")
        return outcome

    def _check(self) -> None:
        """Before anything is done: what would end the retraining after hours."""
        steps, limit = self.config.grpo.steps, self.config.retrain.max_steps
        if limit is not None and steps > limit:
            raise UserError(f"grpo.steps is {steps}, more than retrain.max_steps = {limit} allows.")
        self.stages.check()
        if self.config.retrain.commit is not None:
            branch.check(self.commands.project, self.config.retrain.commit)
        with self._stage("registry"):
            self._champion()  # MLflow must answer.

    def _reason(self) -> str | None:
        """Why something is to be done; None = nothing is."""
        with self._stage("status"):
            changed = self.stages.changed()
        if changed and not self.stages.has_run():
            return "nothing was trained by DVC here yet"
        if changed:
            return "; ".join(changed[:2]) + (f"; and {len(changed) - 2} more" if len(changed) > 2 else "")
        if not self._is_judged():
            return "the last training was not judged by the present settings"
        return self._trigger()

    def _trigger(self) -> str | None:
        """Why to train again though nothing has changed, with the next seed, which the training is given."""
        settings = self.config.retrain
        score = fallen_score(settings.monitor, self.commands.project)
        if score is not None:
            reason = f"the monitored score is {score:g}, below {settings.monitor.floor:g}"
        elif settings.when == "always":
            reason = "retrain.when is always"
        else:
            return None
        return f"{reason}; training seed {self.start.next_seed(self.config.training_seed)}"

    def _choose_start(self) -> None:
        """Where the training is to be repeated anyway: from the present champion, if it is to start there."""
        if not self.stages.changed(TRAIN):
            return
        champion = self._champion() if self.config.retrain.start == "champion" else None
        self.start.set_start(None if champion is None else champion.uri)

    def _warn_of_another_reward(self) -> None:
        """Hours before the gate refuses it."""
        champion = self._champion()
        if champion is None or self.config.promotion.new_reward or self.config.reward == AUTO:
            return
        changed = judge_differences(side_of("champion", champion.adapters()), self.config)
        if changed:
            console.note(
                f"Warning: the champion was trained with another reward ({'; '.join(changed)}). What is trained now"
                " will not be promoted; if the change is intended, set promotion.new_reward: true."
            )

    def _is_judged(self) -> bool:
        """Whether the gate has decided on the adapters that are there, with the present settings; with any, where they
        are the champion's."""
        folder = Path(self.config.adapters_folder)
        if not (folder / FACTS).is_file():
            return False
        digest, champion = adapter_digest(folder), self._champion()
        is_champion = champion is not None and champion.digest == digest
        return self._champions.is_judged(digest, "" if is_champion else gate_settings(self.config))

    def _judge(self) -> dict[str, Any]:
        self.commands.run(*kedro("promote", self.environment))
        decision: dict[str, Any] = json.loads(self._decision_file.read_text(encoding="utf-8"))
        return decision

    @property
    def _decision_file(self) -> Path:
        return Path(self.config.output) / "08_reporting" / "promotion.json"

    def _tidy(self) -> tuple[list[str], str | None]:
        """What was deleted, and the commit; also where a killed retraining left it to be done."""
        settings = self.config.retrain
        removed = retention.apply(
            self.tracking_uri,
            self._model,
            self.config.promotion.alias,
            self._run_id(),
            versions=settings.keep_versions,
            runs=settings.keep_runs,
        )
        if settings.commit is None:
            self._tell_uncommitted()
            return removed, None
        return removed, branch.commit(self.commands.project, settings.commit, self._committed, self._message())

    @property
    def _committed(self) -> list[str]:
        return [self.stages.file.with_name("dvc.lock").as_posix(), self.start.file.as_posix()]

    def _tell_uncommitted(self) -> None:
        changed = branch.changed(self.commands.project, self._committed)
        if changed:
            console.note(
                f"Not committed, so that only this folder knows what the results were made of: {', '.join(changed)}"
                " (retrain.commit=BRANCH does it each time)"
            )

    def _not_committed(self, commit: str | None) -> str | None:
        """What the branch lacks, without which nobody can repeat what it says."""
        left = [] if commit is None else branch.uncommitted(self.commands.project, self._committed)
        if not left:
            return None
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        return (
            f"the branch {self.config.retrain.commit} has dvc.lock, but not what it was made with:"
            f" {', '.join(left[:3])}{more} differ from the commit. Commit them too."
        )

    def _message(self) -> str:
        """Of the commit; the decision is not there on a machine that has pulled the results."""
        if not self._decision_file.is_file():
            return "Retrained"
        return f"Retrained: {json.loads(self._decision_file.read_text(encoding='utf-8'))['sentence']}"

    def _run_id(self) -> str | None:
        run_id: str | None = read_facts(Path(self.config.adapters_folder)).get("mlflow_run_id")
        return run_id

    @property
    def _champions(self) -> Champions:
        return Champions.of(self.config, self.tracking_uri)

    def _champion(self) -> Registered | None:
        return self._champions.champion()

    @property
    def _model(self) -> str:
        return self.config.registered_model

    def outcome(self, code: int, sentence: str) -> Outcome:
        """An outcome with what is known of this retraining."""
        return Outcome(code=code, sentence=sentence, reason=self.reason, model=self._model, seconds=self.seconds)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
