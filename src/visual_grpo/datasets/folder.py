"""A folder as one dataset: replaced whole or not at all."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.io import AbstractDataset

from visual_grpo.datasets.errors import DataError, missing
from visual_grpo.files import heal, replace_folder

if TYPE_CHECKING:
    from kedro_datasets._typing import ImagePreview


class FolderDataset(AbstractDataset[Path, Path]):
    """Loads as the folder's path; saves by moving a folder that a node has filled into its place.

    A node gets an empty folder to fill from a `DraftDataset` of the same ``filepath``; any other folder will do.

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

    def save(self, data: Path) -> None:
        """Moves the folder ``data`` into the place of the old one, which stays if that fails.

        Raises:
            DataError: ``data`` is not the path of a folder.
        """
        if not isinstance(data, Path):
            raise DataError(
                f"{self._path}: expected the path of the folder that the node filled, got {_described(data)}"
            )
        if not data.is_dir():
            raise DataError(f"{self._path}: expected the path of the folder that the node filled, but {data} is none")
        if data.resolve() != self._path.resolve():
            replace_folder(data, self._path)

    def preview(self, file: str) -> ImagePreview:
        """The first PNG whose path in the folder matches the glob pattern ``file``, for Kedro-Viz."""
        found = min(self.load().glob(file), default=None)
        if found is None:
            raise DataError(f"{self._path} has no {file}")
        return base64.b64encode(found.read_bytes()).decode()

    def _exists(self) -> bool:
        heal(self._path)
        return self._path.is_dir()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._path), "made_by": self._made_by}


def _described(data: object) -> str:
    return "a function" if callable(data) else type(data).__name__
