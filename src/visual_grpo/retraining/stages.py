"""DVC's stages of an environment: which would run, and running them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from visual_grpo.errors import UserError
from visual_grpo.retraining.commands import Commands, dvc
from visual_grpo.retraining.outcome import DataRefusedError, StageFailedError
from visual_grpo.tracking.dvc_lock import stages_of
from visual_grpo.tracking.lineage import dvc_files

PREPARE, TRAIN = "data_preparation", "train"
_MOST = 3


@dataclass(frozen=True)
class Stages:
    """Those in the dvc.yaml of one environment."""

    file: Path
    """Relative to the project."""
    commands: Commands

    def check(self) -> None:
        """Raises UserError where the environment has no stages, or its dvc.lock is damaged."""
        project = self.commands.project
        if not (project / ".dvc").is_dir():
            raise UserError(f"{project} is no DVC repository (no .dvc). Make it one: .venv/bin/dvc init")
        if not (project / self.file).is_file():
            name = "" if self.file.parent == Path() else f" --env={self.file.parent.name}"
            raise UserError(
                f"There is no {self.file}, which says what a retraining repeats. Write it:"
                f" .venv/bin/python -m visual_grpo.dvc_stages{name}"
            )
        stages_of(self.file.with_name("dvc.lock"), project)

    def update_imports(self) -> list[str]:
        """Fetches newer versions of what ``dvc import`` and ``dvc import-url`` brought; returns these ``*.dvc``."""
        project = self.commands.project
        names = [file.relative_to(project).as_posix() for file in dvc_files(project) if _is_import(file)]
        if names:
            self.commands.run(*dvc("update", *names))
        return names

    @property
    def lock(self) -> Path:
        """What DVC knows of the last time."""
        return (self.commands.project / self.file).with_name("dvc.lock")

    def has_run(self) -> bool:
        """Whether a stage has ever been run here."""
        return self.lock.is_file()

    def prepare(self, check: Callable[[], None]) -> None:
        """Prepares the data; if that fails or ``check`` refuses them (`DataRefusedError`), the earlier ones are put
        back, also by the call after one that was killed in between."""
        if not self._earlier.is_file():
            self._earlier.write_bytes(self.lock.read_bytes() if self.has_run() else b"")
        try:
            self.repeat(PREPARE)
            check()
        except (DataRefusedError, StageFailedError) as refusal:
            try:
                self._put_back()
            except StageFailedError as error:
                raise type(refusal)(f"{refusal}\nThe earlier data could not be put back: {error}") from error
            raise
        self._earlier.unlink()

    @property
    def _earlier(self) -> Path:
        """What DVC knew before the data were prepared; there while they are not accepted yet."""
        return self.lock.with_name(".dvc.lock.earlier")

    def _put_back(self) -> None:
        lock = self._earlier.read_bytes()
        self._earlier.unlink()
        if not lock:
            self.lock.unlink(missing_ok=True)
            return
        self.lock.write_bytes(lock)
        self.commands.run(*dvc("checkout", "--quiet", "--force", f"{self.file}:{PREPARE}"))

    def changed(self, stage: str | None = None) -> list[str]:
        """What is another than at the last time, in words; empty if ``stage`` and all before it need not run."""
        target = str(self.file) if stage is None else f"{self.file}:{stage}"
        status = json.loads(self.commands.output(*dvc("status", "--json", target)) or "{}")
        return list(_in_words(status))

    def repeat(self, stage: str | None = None) -> None:
        """Runs the stages that have changed, up to ``stage``."""
        self.commands.run(*dvc("repro", str(self.file) if stage is None else f"{self.file}:{stage}"))


def _is_import(file: Path) -> bool:
    tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    return bool(tree.get("deps"))


def _in_words(status: Mapping[str, Any]) -> Iterator[str]:
    """``{"dvc.yaml:train": [{"changed deps": {"conf/local": "modified"}}]}`` -> ``train: conf/local modified``."""
    for stage, changes in status.items():
        found: list[str] = []
        for change in changes:
            if isinstance(change, str):  # "always changed", "changed command"
                found.append(change)
            else:
                found += [f"{path} {how}" for entries in change.values() for path, how in _flat(entries)]
        more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
        yield f"{stage.rpartition(':')[2]}: {', '.join(found[:_MOST])}{more}"


def _flat(entries: Any) -> Iterator[tuple[str, str]]:
    """Parameters are one level deeper than files."""
    for path, how in entries.items() if isinstance(entries, Mapping) else ():
        if isinstance(how, Mapping):
            yield from _flat(how)
        else:
            yield path, str(how)
