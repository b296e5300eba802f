"""DVC's stages of an environment: which would run, and running them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from visual_grpo.errors import UserError
from visual_grpo.programs import ProgramError, output_of
from visual_grpo.retraining.outcome import DataRefusedError
from visual_grpo.tracking.dvc_lock import stages_of
from visual_grpo.tracking.lineage import dvc_files

PREPARE, TRAIN = "data_preparation", "train"
_DVC = (sys.executable, "-m", "dvc")
_FILLED_IN = "parameters"
"""The stage that always runs: a retraining has done its work before."""
_MOST = 3


class Stages:
    """The stages in one dvc.yaml.

    Args:
        file: relative to the working folder, the project's.
        run: runs a long command whose output is seen.
    """

    def __init__(self, file: Path, run: Callable[..., None]) -> None:
        self.file, self._run = file, run
        self.lock = file.with_name("dvc.lock")
        self._earlier = file.with_name(".dvc.lock.earlier")

    def check(self) -> None:
        """Raises UserError where DVC is not set up, or dvc.lock is damaged."""
        if not Path(".dvc").is_dir():
            raise UserError(f"{Path.cwd()} is no DVC repository (no .dvc). Make it one: .venv/bin/dvc init")
        stages_of(self.lock, Path.cwd())

    def update_imports(self) -> list[str]:
        """Fetches newer versions of what ``dvc import`` and ``dvc import-url`` brought; returns these ``*.dvc``."""
        names = [file.relative_to(Path.cwd()).as_posix() for file in dvc_files(Path.cwd()) if _is_import(file)]
        if names:
            self._run(*_DVC, "update", *names)
        return names

    def changed(self, stage: str | None = None) -> list[str]:
        """Says what changed since the last time; empty if ``stage`` and all before it need not run."""
        status = json.loads(output_of(*_DVC, "status", "--json", self._target(stage), at=Path.cwd()) or "{}")
        return list(_in_words(status))

    def repeat(self, stage: str | None = None) -> None:
        """Runs the stages that have changed, up to ``stage``."""
        self._run(*_DVC, "repro", self._target(stage))

    def prepare(self, check: Callable[[], None]) -> None:
        """Prepares the data; puts the earlier ones back if that fails or ``check`` refuses them.

        A call after one that was killed in between does so too.
        """
        if not self._earlier.is_file():
            self._earlier.write_bytes(self.lock.read_bytes() if self.lock.is_file() else b"")
        try:
            self.repeat(PREPARE)
            check()
        except (DataRefusedError, ProgramError) as refusal:
            try:
                self._put_back()
            except ProgramError as error:
                raise type(refusal)(f"{refusal}\nThe earlier data could not be put back: {error}") from error
            raise
        self._earlier.unlink()

    def _put_back(self) -> None:
        lock = self._earlier.read_bytes()
        self._earlier.unlink()
        if not lock:
            self.lock.unlink(missing_ok=True)
            return
        self.lock.write_bytes(lock)
        output_of(*_DVC, "checkout", "--quiet", "--force", self._target(PREPARE), at=Path.cwd())

    def _target(self, stage: str | None) -> str:
        return str(self.file) if stage is None else f"{self.file}:{stage}"


def _is_import(file: Path) -> bool:
    tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    return bool(tree.get("deps"))


def _in_words(status: Mapping[str, Any]) -> Iterator[str]:
    """``{"dvc.yaml:train": [{"changed deps": {"src": "modified"}}]}`` -> ``train: src modified``."""
    for stage, changes in status.items():
        name = stage.rpartition(":")[2]
        if name == _FILLED_IN:
            continue
        found: list[str] = []
        for change in changes:
            if isinstance(change, str):  # "changed command"
                found.append(change)
            else:
                found += [f"{path} {how}" for entries in change.values() for path, how in _flat(entries)]
        more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
        yield f"{name}: {', '.join(found[:_MOST])}{more}"


def _flat(entries: Any) -> Iterator[tuple[str, str]]:
    """Parameters are one level deeper than files."""
    for path, how in entries.items() if isinstance(entries, Mapping) else ():
        if isinstance(how, Mapping):
            yield from _flat(how)
        else:
            yield path, str(how)
