"""One retraining, from the update of the data to the alias.

Every stage can be killed and run again: DVC repeats what is not done, a training goes on from its checkpoint, the gate
comes to the same decision, the version is found by the digest of its weights, and the alias moves last.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from visual_grpo import console
from visual_grpo.config import MonitorConfig
from visual_grpo.config.presets import AUTO
from visual_grpo.datasets import RecordsDataset
from visual_grpo.errors import UserError
from visual_grpo.pipelines.compare import side_of
from visual_grpo.pipelines.promote.nodes import gate_settings
from visual_grpo.pipelines.promote.same_reward import judge_differences
from visual_grpo.programs import OutOfTimeError, ProgramError, output_of, run
from visual_grpo.records import drift
from visual_grpo.records.profile import profile_of, read_profile
from visual_grpo.retraining import branch
from visual_grpo.retraining.outcome import Code, DataRefusedError, Outcome
from visual_grpo.retraining.project import Project
from visual_grpo.retraining.stages import TRAIN, Stages
from visual_grpo.tracking.champions import Champions
from visual_grpo.tracking.cleaning import delete_runs, delete_versions, mark_run
from visual_grpo.tracking.lineage import DECISIVE
from visual_grpo.tracking.versions import Registered
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
        self.seconds: dict[str, float] = {}
        self.reason: str | None = None
        self.stages = Stages(project.stages, self._call)
        self._lock = () if lock is None else (lock,)
        hours = self.config.retrain.hours
        self._deadline = None if hours is None else time.monotonic() + hours * 3600

    def run(self) -> Outcome:
        """Retrains if there is a reason to, and judges what was trained.

        Raises:
            UserError, ProgramError, OutOfTimeError, DataRefusedError: the champion stays what it is.
        """
        self._check()
        self.project.write()
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
            option = self.project.option
            self._call(sys.executable, "-m", "kedro", "run", "--pipeline=promote", *filter(None, [option]))
        decision = self._decision()
        outcome = self.outcome(Code.DONE if decision["promoted"] else Code.NOT_PROMOTED, decision["sentence"])
        outcome.version = decision["version"]
        return self._finished(outcome)

    def outcome(self, code: int, sentence: str) -> Outcome:
        """An outcome with what is known of this retraining."""
        model = self.config.registered_model
        return Outcome(code=code, sentence=sentence, reason=self.reason, model=model, seconds=self.seconds)

    def _check(self) -> None:
        """Refuses before anything is done what would end the retraining after hours."""
        steps, limit = self.config.grpo.steps, self.config.retrain.max_steps
        if limit is not None and steps > limit:
            raise UserError(f"grpo.steps is {steps}, more than retrain.max_steps = {limit} allows.")
        self.stages.check()
        if self.config.retrain.commit is not None:
            branch.check(Path.cwd(), self.config.retrain.commit)
        with self._stage("registry"):
            self._champion()  # MLflow must answer.

    def _reason(self) -> str | None:
        """Why something is to be done; None = nothing is."""
        with self._stage("status"):
            changed = self.stages.changed()
        if changed and not self.stages.lock.is_file():
            return "nothing was trained by DVC here yet"
        if changed:
            return "; ".join(changed[:2]) + (f"; and {len(changed) - 2} more" if len(changed) > 2 else "")
        if not self._is_judged():
            return "the last training was not judged by the present settings"
        return self._trigger()

    def _trigger(self) -> str | None:
        """Why to train again though nothing has changed; the training then gets the next seed."""
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
        with self._stage("data"):
            self.stages.prepare(self._check_data)
        champion = self._champion()
        if self.stages.changed(TRAIN):
            starts_there = champion is not None and self.config.retrain.start == "champion"
            self.project.write(**{_START: champion.uri if champion is not None and starts_there else None})
        self._warn_of_another_reward(champion)
        with self._stage("train"):
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
            raise DataRefusedError(
                f"the data were refused, and nothing was trained:\n{listed}\nPut them right or, if this is what they"
                " are to be like now, raise the limit."
            )

    def _warn_of_another_reward(self, champion: Registered | None) -> None:
        """Hours before the gate refuses it."""
        if champion is None or self.config.promotion.new_reward or self.config.reward == AUTO:
            return
        changed = judge_differences(side_of("champion", champion.adapters()), self.config)
        if changed:
            console.note(
                f"Warning: the champion was trained with another reward ({'; '.join(changed)}). What is trained now"
                " will not be promoted; if the change is intended, set promotion.new_reward: true."
            )

    def _is_judged(self) -> bool:
        """Whether the gate has decided on the present adapters, with the present settings unless they are champion."""
        folder = Path(self.config.adapters_folder)
        if not (folder / FACTS).is_file():
            return False
        digest, champion = adapter_digest(folder), self._champion()
        is_champion = champion is not None and champion.digest == digest
        return self._champions.is_judged(digest, "" if is_champion else gate_settings(self.config))

    def _finished(self, outcome: Outcome) -> Outcome:
        """Deletes what is old and commits dvc.lock; where that fails, the decision stands."""
        outcome.run_id = read_facts(Path(self.config.adapters_folder)).get("mlflow_run_id")
        try:
            with self._stage("tidy"):
                outcome.removed = self._delete_old(outcome.run_id)
                outcome.commit, outcome.warning = self._commit()
        except (UserError, ProgramError) as error:
            outcome.warning = str(error)
        if outcome.warning is not None:
            console.note(f"Warning: {outcome.warning}")
        return outcome

    def _delete_old(self, run_id: str | None) -> list[str]:
        """Deletes versions and runs beyond ``retrain.keep_versions`` and ``keep_runs``; returns what was deleted."""
        settings, uri, model = self.config.retrain, self.project.tracking_uri, self.config.registered_model
        removed = []
        if run_id is not None:
            mark_run(uri, run_id, model)
        if settings.keep_versions is not None:
            old = delete_versions(uri, model, self.config.promotion.alias, keep=settings.keep_versions)
            removed += [f"version {number}" for number in old]
        if settings.keep_runs is not None:
            removed += [f"run {run_id}" for run_id in delete_runs(uri, model, keep=settings.keep_runs)]
        return removed

    def _commit(self) -> tuple[str | None, str | None]:
        """The commit with dvc.lock, if one was made, and what it lacks."""
        files = [self.stages.lock, self.project.values, self.project.stages]
        name = self.config.retrain.commit
        if name is None:
            if changed := branch.changed(Path.cwd(), files):
                console.note(
                    "Not committed, so that only this folder knows what the results were made of:"
                    f" {', '.join(changed)} (retrain.commit=BRANCH does it each time)"
                )
            return None, None
        there = (Path(self.config.output) / "08_reporting/promotion.json").is_file()  # Not where results were pulled.
        message = f"Retrained: {self._decision()['sentence']}" if there else "Retrained"
        made = branch.commit(Path.cwd(), name, files, message)
        left = [] if made is None else sorted(set(branch.changed(Path.cwd(), DECISIVE)) - {str(file) for file in files})
        if not left:
            return made, None
        return made, (
            f"the branch {name} has dvc.lock, but not what it was made with: {', '.join(left[:3])} differ from the"
            " commit. Commit them too."
        )

    def _decision(self) -> dict[str, Any]:
        file = Path(self.config.output) / "08_reporting/promotion.json"
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found

    @property
    def _champions(self) -> Champions:
        return Champions.of(self.config, self.project.tracking_uri)

    def _champion(self) -> Registered | None:
        return self._champions.champion()

    def _call(self, *words: str) -> None:
        """Runs a command within the time that is left."""
        left = 0.0
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise OutOfTimeError
        try:
            run(*words, at=Path.cwd(), patience=PATIENCE, seconds=left, descriptors=self._lock)
        except ProgramError as error:
            raise ProgramError(f"{' '.join(words[2:])}: {error}") from error

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


def monitored(monitor: MonitorConfig) -> float | None:
    """The score that ``retrain.monitor.command`` prints as its last line; None without a command.

    Raises:
        UserError: the command failed, or its last line is no number.
    """
    if monitor.command is None:
        return None
    try:
        printed = output_of("/bin/sh", "-c", monitor.command, at=Path.cwd(), seconds=_MONITOR_SECONDS)
    except ProgramError as error:
        raise UserError(f"retrain.monitor.command failed: {monitor.command}\n{error}") from None
    last = printed.strip().splitlines()[-1:] or ["nothing"]
    try:
        score = float(last[0])
    except ValueError:
        score = math.nan
    if math.isnan(score):
        raise UserError(
            f"retrain.monitor.command must print a number as its last line, but printed {last[0]!r}: {monitor.command}"
        )
    return score
