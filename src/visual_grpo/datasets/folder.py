"""A folder as one dataset: replaced whole or not at all."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset

from visual_grpo.datasets.errors import DataError, missing
from visual_grpo.errors import UserError

Fill = Callable[[Path], None]
"""Writes files into the empty folder that it is given."""


class FolderDataset(AbstractDataset[Fill, Path]):
    """Loads as the folder's path; saves what a callable writes into a fresh folder.

    The new folder is made beside the old one and then takes its place, so that a crash, an error or
    Ctrl-C leaves the old one as it was.

    Args:
        filepath: the folder.
        made_by: the pipeline that makes it; the error for a missing folder names it.
    """

    def __init__(self, *, filepath: str, made_by: str, metadata: dict[str, Any] | None = None) -> None:
        self._path = Path(filepath)
        self._made_by = made_by
        self.metadata = metadata

    def load(self) -> Path:
        """Returns the folder's path.

        Raises:
            DataError: there is no such folder; names the command that makes it.
        """
        if not self._exists():
            raise missing(self._path, self._made_by)
        return self._path

    def save(self, data: Fill) -> None:
        """Calls ``data`` with an empty folder, which then replaces the old one.

        Raises:
            DataError: ``data`` is not callable, or raised a UserError.
        """
        if not callable(data):
            raise DataError(f"{self._path}: expected a function that writes into a folder, got {type(data).__name__}")
        self._restore()
        fresh = self._path.with_name(f".{self._path.name}.{uuid.uuid4().hex[:8]}")
        fresh.mkdir(parents=True)
        try:
            data(fresh)
            self._replace_by(fresh)
        except UserError as error:
            raise DataError(str(error)) from error  # Kedro would wrap anything but its own DatasetError.
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _replace_by(self, fresh: Path) -> None:
        if self._path.exists():
            self._path.rename(self._previous)
        try:
            fresh.rename(self._path)
        finally:
            self._restore()

    @property
    def _previous(self) -> Path:
        """Where the old folder stands between the two renames."""
        return self._path.with_name(f".{self._path.name}.previous")

    def _restore(self) -> None:
        """Puts the old folder back if the new one did not take its place, else removes it."""
        if not self._previous.exists():
            return
        if self._path.exists():
            shutil.rmtree(self._previous, ignore_errors=True)
        else:
            self._previous.rename(self._path)

    def _exists(self) -> bool:
        self._restore()
        return self._path.is_dir()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._path), "made_by": self._made_by}
