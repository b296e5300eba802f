"""A folder as one dataset, replaced whole or not at all, and the draft in which a node fills its next content."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never

from kedro.io import AbstractDataset, DatasetError

from visual_grpo.command import again
from visual_grpo.errors import UserError
from visual_grpo.files import heal, new_draft, replace_folder

if TYPE_CHECKING:
    from kedro_datasets._typing import ImagePreview


class DataError(UserError, DatasetError):
    """A `DatasetError`, so that Kedro passes it on as it is, whose message the user can act on."""


def missing(path: Path, made_by: str) -> DataError:
    """Nothing at ``path`` yet: names the command that makes it."""
    return DataError(f"{path} does not exist yet. Make it with: {again(made_by)}")


class DraftDataset(AbstractDataset[Never, Path]):
    """Loads as a path beside ``filepath``, which a node fills and returns; the dataset of ``filepath`` saves it.

    What was there before stays until all is written. An unsaved draft is removed when the process ends.

    Args:
        filepath: what the draft, its hidden sibling, will replace.
        kind: ``folder``: an empty folder is made; ``file``: nothing is there yet.
    """

    def __init__(
        self, *, filepath: str, kind: Literal["folder", "file"] = "folder", metadata: dict[str, Any] | None = None
    ) -> None:
        self._path = Path(filepath)
        self._kind = kind
        self.metadata = metadata

    def load(self) -> Path:
        draft = new_draft(self._path)
        if self._kind == "folder":
            draft.mkdir()
        return draft

    def save(self, data: Never) -> None:
        raise DataError(f"{self._path}: a draft is an input of the node that fills it; return its path instead")

    def _exists(self) -> bool:
        return True

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._path), "kind": self._kind}


class FolderDataset(AbstractDataset[Path, Path]):
    """Loads as the folder's path; saves by moving a folder that a node has filled into its place.

    Args:
        made_by: the pipeline that makes it, for the error about a missing folder.
    """

    def __init__(self, *, filepath: str, made_by: str, metadata: dict[str, Any] | None = None) -> None:
        self._path = Path(filepath)
        self._made_by = made_by
        self.metadata = metadata

    def load(self) -> Path:
        if not self._exists():
            raise missing(self._path, self._made_by)
        return self._path

    def save(self, data: Path) -> None:
        """Moves the folder ``data`` into the place of the old one, which stays if that fails."""
        if not isinstance(data, Path) or not data.is_dir():
            raise DataError(f"{self._path}: expected the path of the folder that the node filled, got {data!r}")
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
