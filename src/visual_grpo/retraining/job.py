"""One retraining, from the update of the data to the alias.

Every part can be killed and run again: DVC repeats what is not done, a training goes on from its checkpoint, the gate
comes to the same decision, the version is found by the digest of its weights, and the alias moves last.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from visual_grpo import console
from visual_grpo.config import MonitorConfig
from visual_grpo.config.presets import AUTO
from visual_grpo.datasets import RecordsDataset
from visual_grpo.errors import UserError
from visual_grpo.pipelines.compare import side_of
from visual_grpo.pipelines.promote import gate_settings, judge_differences
from visual_grpo.programs import OutOfTimeError, ProgramError, output_of, run
from visual_grpo.records import drift
from visual_grpo.records.profile import profile_of, read_profile
from visual_grpo.retraining.outcome import Code, DataRefusedError, Outcome
from visual_grpo.retraining.project import Project
from visual_grpo.retraining.stages import TRAIN, Stages, check_branch, commit
from visual_grpo.tracking.registry import Registered, Registry
from visual_grpo.trained_adapters import FACTS, adapter_digest, read_facts

PATIENCE = 600.0
"""Seconds that a stopped command has for its checkpoint: it finishes the step."""
_MONITOR_SECONDS = 600.0
_START, _SEED = "train.start", "train.seed"


class Retraining:
    """A retraining of one environment; `run` does it.

    Args:
        lock: an open file that the commands inherit: they hold its lock on if this process is killed.
    """

    def __init__(self, project: Project, lock: int | None = None) -> None:
        self.project, self.config = project, project.config
        self.reason: str | None = None
        self.stages = Stages(project.stages, self._call)
        self._lock = () if lock is None else (lock,)
        self._began = time.monotonic()

    def run(self) -> Outcome:
        """Retrains if there is a reason to, and judges what was trained.

        Raises:
            UserError, ProgramError, OutOfTimeError, DataRefusedError: the champion stays what it is.
        """
        self._check()
        self.project.write()
        if self.config.retrain.update:
            self.stages.update_imports()
        self.reason = self._changes() or self._trigger()
        if self.reason is not None and not self._train() and self._is_judged():
            console.note("Nothing was trained: what has changed decides neither the training nor the gate.")
            self.reason = self._trigger()
            if self.reason is not None:
                self._train()
        if self.reason is None:
            sentence = "nothing to do: data, code and parameters are those of the last training"
            return self._tidied(self.outcome(Code.DONE, sentence))
        option = [self.project.option] if self.project.option else []
        self._call(sys.executable, "-m", "kedro", "run", "--pipeline=promote", *option)
        decision = self._decision()
        outcome = self.outcome(Code.DONE if decision["promoted"] else Code.NOT_PROMOTED, decision["sentence"])
        outcome.version = decision["version"]
        return self._tidied(outcome)

    def outcome(self, code: int, sentence: str) -> Outcome:
        """An outcome with what is known of this retraining."""
        seconds = round(time.monotonic() - self._began, 1)
        model = self.config.registered_model
        return Outcome(code=code, sentence=sentence, reason=self.reason, model=model, seconds=seconds)

    def _check(self) -> None:
        """Refuses at once what would end the retraining after hours."""
        steps, limit = self.config.grpo.steps, self.config.retrain.max_steps
        if limit is not None and steps > limit:
            raise UserError(f"grpo.steps is {steps}, more than retrain.max_steps = {limit} allows.")
        self.stages.check()
        if self.config.retrain.commit is not None:
            check_branch(Path.cwd(), self.config.retrain.commit)
        self._champion()  # MLflow must answer.

    def _changes(self) -> str | None:
        changed = self.stages.changed()
        if changed and not self.stages.lock.is_file():
            return "nothing was trained by DVC here yet"
        if changed:
            return textwrap.shorten("; ".join(changed), 200, placeholder=" ...")
        return None if self._is_judged() else "the last training was not judged by the present settings"

    def _trigger(self) -> str | None:
        """Returns why to train again though nothing has changed; the training then gets the next seed."""
        settings = self.config.retrain
        score = monitored(settings.monitor)
        if score is not None and score < settings.monitor.floor:
            reason = f"the monitored score is {score:g}, below {settings.monitor.floor:g}"
        elif settings.when == "always":
            reason = "retrain.when is always"
        else:
            return None
        seed = int(self.project.training_params().get(_SEED, self.config.training_seed)) + 1
        self.project.write(**{_SEED: str(seed)})
        return f"{reason}; training seed {seed}"

    def _train(self) -> bool:
        """Runs the stages that have changed; returns whether the training was among them."""
        console.note(f"Reason: {self.reason}")
        facts = Path(self.config.adapters_folder) / FACTS
        before = facts.read_bytes() if facts.is_file() else None
        self.stages.prepare(self._check_data)
        champion = self._champion()
        if self.stages.changed(TRAIN):
            start = champion.uri if champion is not None and self.config.retrain.start == "champion" else None
            self.project.write(**{_START: start})
        self._warn_of_another_reward(champion)
        self.stages.repeat()
        return (facts.read_bytes() if facts.is_file() else None) != before

    def _check_data(self) -> None:
        """Raises DataRefusedError with each limit of ``retrain.data`` that the prepared records exceed."""
        records = RecordsDataset(filepath=str(Path(self.config.output) / "05_model_input/records.parquet")).load()
        champion = self._champion()
        before = None if champion is None else read_profile(champion.adapters())
        problems = drift.check(before, profile_of(records), self.config.retrain.data)
        if problems:
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise DataRefusedError(f"the data were refused, and nothing was trained:\n{listed}\nMend data or limit")

    def _warn_of_another_reward(self, champion: Registered | None) -> None:
        """Says so hours before the gate refuses it."""
        if champion is None or self.config.promotion.new_reward or self.config.reward == AUTO:
            return
        changed = judge_differences(side_of("champion", champion.adapters()), self.config)
        if changed:
            console.note(
                f"Warning: the champion was trained with another reward ({'; '.join(changed)}). What is trained now"
                " will not be promoted; if the change is intended, set promotion.new_reward: true."
            )

    def _is_judged(self) -> bool:
        """Returns whether the gate has decided on the present adapters, by the present settings unless they won."""
        folder = Path(self.config.adapters_folder)
        if not (folder / FACTS).is_file():
            return False
        digest, champion = adapter_digest(folder), self._champion()
        is_champion = champion is not None and champion.digest == digest
        return self._registry.is_judged(digest, "" if is_champion else gate_settings(self.config))

    def _tidied(self, outcome: Outcome) -> Outcome:
        """Deletes what is old and commits dvc.lock; where that fails, the decision stands."""
        outcome.run_id = read_facts(Path(self.config.adapters_folder)).get("mlflow_run_id")
        try:
            outcome.removed = self._delete_old(outcome.run_id)
            outcome.commit = self._commit()
        except (UserError, ProgramError) as error:
            outcome.warning = str(error)
            console.note(f"Warning: {outcome.warning}")
        return outcome

    def _delete_old(self, run_id: str | None) -> list[str]:
        settings, removed = self.config.retrain, []
        if run_id is not None:
            self._registry.mark_run(run_id)
        if settings.keep_versions is not None:
            removed += [f"version {number}" for number in self._registry.delete_old_versions(settings.keep_versions)]
        if settings.keep_runs is not None:
            removed += [f"run {run_id}" for run_id in self._registry.delete_old_runs(settings.keep_runs)]
        return removed

    def _commit(self) -> str | None:
        branch = self.config.retrain.commit
        if branch is None:
            return None
        there = (Path(self.config.output) / "08_reporting/promotion.json").is_file()  # Not where results were pulled.
        message = f"Retrained: {self._decision()['sentence']}" if there else "Retrained"
        return commit(Path.cwd(), branch, [self.stages.lock, self.project.values, self.project.stages], message)

    def _decision(self) -> dict[str, Any]:
        file = Path(self.config.output) / "08_reporting/promotion.json"
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found

    @property
    def _registry(self) -> Registry:
        return Registry.of(self.config)

    def _champion(self) -> Registered | None:
        return self._registry.champion()

    def _call(self, *words: str) -> None:
        """Runs a command within what is left of ``retrain.hours``."""
        hours, left = self.config.retrain.hours, 0.0
        if hours is not None:
            left = self._began + hours * 3600 - time.monotonic()
            if left <= 0:
                raise OutOfTimeError
        try:
            run(*words, at=Path.cwd(), patience=PATIENCE, seconds=left, descriptors=self._lock)
        except ProgramError as error:
            raise ProgramError(f"{' '.join(words[2:])}: {error}") from error


def monitored(monitor: MonitorConfig) -> float | None:
    """Returns the number that ``retrain.monitor.command`` prints as its last line; None without a command.

    Raises:
        UserError: the command failed, or its last line is no number.
    """
    if monitor.command is None:
        return None
    try:
        printed = output_of("/bin/sh", "-c", monitor.command, at=Path.cwd(), seconds=_MONITOR_SECONDS)
    except ProgramError as error:
        raise UserError(f"retrain.monitor.command failed: {monitor.command}\n{error}") from None
    last = printed.strip().rpartition("\n")[2]
    try:
        score = float(last)
    except ValueError:
        score = math.nan
    if math.isnan(score):
        raise UserError(
            f"retrain.monitor.command must print a number as its last line, but printed {last!r}: {monitor.command}"
        )
    return score
