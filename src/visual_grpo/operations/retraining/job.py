"""One retraining, from the update of the data to the alias.

Every part can be killed and run again: DVC repeats what is not done, a training goes on from its checkpoint, the gate
comes to the same decision, the version is found by the digest of its weights, and the alias moves last.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from typing import Any

import click

from visual_grpo.adapter_folder import FACTS, read_facts, weights_digest
from visual_grpo.common import console
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.processes import OutOfTimeError, ProgramError, git, output_of, run
from visual_grpo.config import MonitorConfig, RetrainConfig
from visual_grpo.operations.command import value_of
from visual_grpo.operations.retraining.project import Project
from visual_grpo.tracking.adapter_lookup import Registered
from visual_grpo.tracking.registry import NOT_PROMOTED, Registry, gate_settings
from visual_grpo.tracking.run_context import dvc_imports

PATIENCE = 600.0  # Seconds that a stopped command has for its checkpoint: it finishes the step.
_MONITOR_SECONDS, _NOTIFY_SECONDS = 600.0, 60.0
_DVC = (sys.executable, "-m", f"{__package__}.dvc")
_DATA_CHECK = (sys.executable, "-m", f"{__package__}.data_check")
_TRAIN, _ALWAYS = "train", "parameters"  # Stages; `Project.write` has done the second's work before.


class Code(IntEnum):
    """Exit codes of ``python -m visual_grpo.operations.retraining``; 128 + N where the signal N stopped it."""

    DONE = 0  # Promoted, or nothing to do.
    FAILED = 1
    NOT_PROMOTED = NOT_PROMOTED  # Trained, but not shown to be better than the champion and the base model.
    BUSY = 4  # A retraining of the same results is already running.
    OUT_OF_TIME = 5  # The next call goes on from the checkpoint.
    DATA_REFUSED = 6  # Too few, too damaged or too unlike the champion's; nothing was trained.


class DataRefusedError(Exception):
    """The prepared records did not pass the checks of ``retrain.data``."""


def notify(settings: RetrainConfig, summary: Mapping[str, Any]) -> None:
    """Gives the summary to ``retrain.notify`` if it is due; warns where that fails."""
    if settings.notify is None or not is_due(settings, summary):
        return
    text = json.dumps(summary, ensure_ascii=False)
    try:
        output_of("/bin/sh", "-c", settings.notify, at=Path.cwd(), stdin=text.encode(), seconds=_NOTIFY_SECONDS)
    except ProgramError as error:
        console.note(f"Warning: the command of retrain.notify failed: {error}")


def is_due(settings: RetrainConfig, summary: Mapping[str, Any]) -> bool:
    failed = summary["code"] not in (Code.DONE, Code.NOT_PROMOTED)
    worked = settings.notify_when == "work" and summary["reason"] is not None
    return failed or worked or settings.notify_when == "always"


def summary(code: int, sentence: str, **known: Any) -> dict[str, Any]:
    """Returns how a retraining ended, in one line, and what is ``known`` of it."""
    return {
        "outcome": Code(code).name.lower() if code in set(Code) else "stopped",
        "code": code,
        "sentence": " ".join(sentence.split()),
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **known,
    }


class Retraining:
    """A retraining of one environment. Its commands inherit the file ``lock``, and hold its lock if it is killed."""

    def __init__(self, project: Project, lock: int | None = None) -> None:
        self.project, self.config = project, project.config
        self.reason: str | None = None
        self._asked: list[str] = []  # See `_asked_for`.
        self._registry = Registry.of(project.config.promotion, project.config.output)
        self._lock = () if lock is None else (lock,)
        self._began = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Retrains if there is a reason to, and judges what was trained; returns the summary.

        Raises UserError, ProgramError, OutOfTimeError or DataRefusedError; the champion then stays what it is.
        """
        self._steps()
        self._registry.champion()  # MLflow must answer.
        self.project.write()
        self.update_imports()
        self.reason = self._reason()
        if self.reason is not None:
            console.note(f"Reason: {self.reason}")
            self._train()
        if self._is_judged():
            self.reason = None
            sentence = (
                "nothing to do: nothing that the adapters or the gate depend on has changed since the last training"
            )
            return self._clean_up(self.summary(Code.DONE, sentence))
        try:
            self._call(sys.executable, "-m", "kedro", "run", "--pipeline=promote", *filter(None, [self.project.option]))
        except ProgramError as error:
            if error.code != Code.NOT_PROMOTED:
                raise
        decision = json.loads(self.project.place("promotion_result").read_text(encoding="utf-8"))
        code = Code.DONE if decision["promoted"] else Code.NOT_PROMOTED
        return self._clean_up(self.summary(code, decision["sentence"], version=decision["version"]))

    def foreseen(self) -> str:
        """Returns what `run` would do now, for data that are not updated first. Trains and judges nothing.

        MLflow, whose import takes longest, is asked only where nothing has changed.
        """
        self.project.write()
        said = [f"{counted(len(files), 'import')} of DVC would be updated first"] if (files := self._imports()) else []
        before, asked = self._changed(_TRAIN, with_earlier=True), self._asked_for()
        training = f"train {counted(self._steps(), 'step')} and judge the adapter"
        if asked or any(change.startswith(f"{_TRAIN}:") for change in before):
            said.append(f"would {training}:{_listed(before + asked)}")
        elif before:
            said.append(f"would {training} if what comes before gives a different result:{_listed(before)}")
        elif not self._is_judged():
            said.append("would judge the last training, which was not judged by the present settings")
        elif stages := self._changed():
            said.append(f"would update stages that the training does not depend on:{_listed(stages)}")
        else:
            said.append("nothing to do")
        return ". ".join(said)

    def summary(self, code: int, sentence: str, version: int | None = None) -> dict[str, Any]:
        """Returns how the retraining ended and what is known of it; ``version`` is the promoted one."""
        about = summary(code, sentence, reason=self.reason, model=self._registry.name, version=version)
        return about | {"seconds": round(time.monotonic() - self._began, 1)}

    def update_imports(self) -> None:
        """Fetches newer versions of what ``dvc import`` and ``dvc import-url`` brought."""
        if files := self._imports():
            self._call(*_DVC, "update", *files)

    def _imports(self) -> Sequence[str]:
        return dvc_imports(Path.cwd()) if self.config.retrain.update else []

    def _reason(self) -> str | None:
        """Returns why to train or judge; None if nothing has changed."""
        changed = self._changed(_TRAIN, with_earlier=True)
        if not changed and not self._is_judged():
            return "the last training was not judged by the present settings"
        self._asked = self._asked_for()
        reasons = changed + self._asked or self._changed()
        return textwrap.shorten("; ".join(reasons), 200, placeholder=" ...") or None

    def _changed(self, stage: str | None = None, *, with_earlier: bool = False) -> list[str]:
        """Returns what changed since the last time: of one ``stage``, also ``with_earlier`` ones, or of all."""
        from dvc.logger import set_loggers_level
        from dvc.repo import Repo
        from dvc.repo.open_repo import clean_repos

        target = f"{self.project.stages}:{stage}" if stage else str(self.project.stages)
        try:
            # In this process: DVC starts for longer than it looks.
            with set_loggers_level(logging.CRITICAL), Repo() as repo:
                status = repo.status(targets=[target], with_deps=with_earlier, check_updates=False)
        except Exception as error:  # Of DVC, or of a library that it reads files and databases by.
            said = ": ".join(map(str, filter(None, [error, error.__cause__])))
            raise ProgramError(f"dvc status: {click.unstyle(said)}") from error
        finally:
            clean_repos()  # Clones of the repositories that imports name.
        if status and not self.project.stages.with_name("dvc.lock").is_file():
            return [f"{_TRAIN}: DVC has not trained anything here yet"]
        changes = {name.rpartition(":")[2]: re.sub(r'[][{}"]', "", json.dumps(why)) for name, why in status.items()}
        return [f"{name}: {why}" for name, why in changes.items() if name != _ALWAYS]

    def _asked_for(self) -> list[str]:
        """Returns why the settings ask for a training though nothing has changed."""
        settings = self.config.retrain
        score = monitored(settings.monitor)
        if score is not None and score < settings.monitor.floor:
            return [f"the monitored score is {score:g}, below {settings.monitor.floor:g}"]
        return ["retrain.when is always"] if settings.when == "always" else []

    def _train(self) -> None:
        """Prepares and checks the data, and runs the other stages that have changed."""
        self._call(*_DVC, "repro", f"{self.project.stages}:data_preparation")
        champion = self._registry.champion()
        self._check_data(champion)
        self._call(*_DVC, "repro", f"{self.project.stages}:baseline")
        changed = self._changed(_TRAIN)
        if changed or self._asked:
            seed = {} if changed else {"train.seed": self._next_seed()}
            self.project.write(**seed, **{"train.start": self._start(champion)})
        self._call(*_DVC, "repro", str(self.project.stages))

    def _next_seed(self) -> str:
        """Returns the training seed after the last training's."""
        own = self._trained_with("train.seed")
        return str((self._trained_with("seed") if own is None else own) + 1)

    def _trained_with(self, name: str) -> Any:
        """Returns a parameter of the stage that trains, which ``train_params`` of params.yaml may replace."""
        given = self.project.training_params()
        return value_of(given[name]) if name in given else attrgetter(name)(self.config)

    def _steps(self) -> Any:
        """Returns ``grpo.steps`` of a training; raises UserError if it is more than ``retrain.max_steps``."""
        most, steps = self.config.retrain.max_steps, self._trained_with("grpo.steps")
        if most is not None and isinstance(steps, int) and steps > most:
            raise UserError(f"grpo.steps is {steps}, more than retrain.max_steps = {most} allows.")
        return steps

    def _start(self, champion: Registered | None) -> str | None:
        """Returns the adapters that a training starts from; None = the base model."""
        return champion.uri if champion is not None and self.config.retrain.start == "champion" else None

    def _check_data(self, champion: Registered | None) -> None:
        """Raises DataRefusedError with each limit of ``retrain.data`` that the prepared records exceed, and if none of
        them is held out."""
        limits, before = self.config.retrain.data.model_dump_json(), [] if champion is None else [champion.adapters()]
        said = output_of(*_DATA_CHECK, self.project.place("records"), limits, *before, at=Path.cwd())
        if problems := json.loads(said):
            listed = "\n  ".join(["the data were refused, and nothing was trained:", *problems])
            raise DataRefusedError(f"{listed}\nFix the data, or raise the limit")

    def _is_judged(self) -> bool:
        """Returns whether the gate has decided on the present adapters, by the present settings unless they won."""
        folder = self.project.place("adapters")
        if not (folder / FACTS).is_file():
            return False
        digest, champion = weights_digest(folder), self._registry.champion()
        is_champion = champion is not None and champion.weights == digest
        return self._registry.is_judged(
            digest, "" if is_champion else gate_settings(self.config.promotion, self.config.evaluation)
        )

    def _clean_up(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Deletes what is old and commits dvc.lock; where that fails, the decision stands."""
        settings = self.config.retrain
        run_id = read_facts(self.project.place("adapters")).get("mlflow_run_id")
        about: dict[str, Any] = {"run_id": run_id, "removed": [], "commit": None, "warning": None}
        try:
            if run_id is not None:
                self._registry.mark_run(run_id)
            if settings.keep_versions is not None:
                old = self._registry.delete_old_versions(settings.keep_versions)
                about["removed"] += [f"version {number}" for number in old]
            if settings.keep_runs is not None:
                about["removed"] += [f"run {old}" for old in self._registry.delete_old_runs(settings.keep_runs)]
            if settings.commit is not None:
                stages = self.project.stages
                files = [stages.with_name("dvc.lock"), self.project.values, stages]
                about["commit"] = commit(Path.cwd(), settings.commit, files, f"Retrained: {summary['sentence']}")
        except (UserError, ProgramError) as error:
            about["warning"] = str(error)
            console.note(f"Warning: {error}")
        return summary | about

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
            named = ProgramError(f"{' '.join(words[2:]).removeprefix(f'{__package__}.')}: {error}")
            named.code = error.code
            raise named from error


def _listed(reasons: Sequence[str]) -> str:
    return "".join(f"\n  {reason}" for reason in reasons)


def monitored(monitor: MonitorConfig) -> float | None:
    """Returns the number that ``retrain.monitor.command`` prints as its last line; None without a command."""
    if monitor.command is None:
        return None
    try:
        printed = output_of("/bin/sh", "-c", monitor.command, at=Path.cwd(), seconds=_MONITOR_SECONDS)
        score = float(printed.strip().rpartition("\n")[2])
    except (ProgramError, ValueError) as error:
        raise UserError(f"retrain.monitor.command must print a number last: {monitor.command}\n{error}") from None
    if math.isnan(score):
        raise UserError(f"retrain.monitor.command printed nan, which is not a number: {monitor.command}")
    return score


def commit(project: Path, branch: str, files: Sequence[Path], message: str) -> str | None:
    """Commits the present contents of ``files``; returns the commit, or None if the branch has them already.

    A new branch begins at the present commit. One that is not checked out is checked out in a temporary folder.
    """
    if git(project, "branch", "--show-current") == branch:
        return _commit(project, files, message)
    if not git(project, "branch", "--list", branch):
        git(project, "branch", branch)
    with tempfile.TemporaryDirectory() as folder:
        git(project, "worktree", "add", "--quiet", folder, branch)
        try:
            for file in files:
                (Path(folder) / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(project / file, Path(folder) / file)
            return _commit(Path(folder), files, message)
        finally:
            git(project, "worktree", "remove", "--force", folder)


def _commit(at: Path, files: Sequence[Path], message: str) -> str | None:
    if not git(at, "status", "--porcelain", "--untracked-files=all", "--", *files):
        return None
    git(at, "add", "--", *files)
    git(at, "commit", "--quiet", "--only", "--message", message, "--", *files)
    return git(at, "rev-parse", "HEAD")
