"""Where a node writes what then replaces a folder or file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Never

from kedro.io import AbstractDataset

from visual_grpo.datasets.errors import DataError
from visual_grpo.files import new_draft


class DraftDataset(AbstractDataset[Never, Path]):
    """Loads as a path beside ``filepath``, which a node fills and returns; the dataset of ``filepath`` saves it.

    So the node's own work and errors carry the node's name, and what was there before stays until all is written.
    An unsaved draft is removed when the process ends.

    Args:
        filepath: what the draft will replace; the draft is its hidden sibling, so that paths relative to one hold
            for the other.
        kind: ``folder``: an empty folder is made; ``file``: nothing is there yet.
    """

    def __init__(
        self, *, filepath: str, kind: Literal["folder", "file"] = "folder", metadata: dict[str, Any] | None = None
    ) -> None:
        self._path = Path(filepath)
        self._kind = kind
        self.metadata = metadata

    def load(self) -> Path:
        """Returns the draft's path; an earlier draft of this process is removed."""
        draft = new_draft(self._path)
        if self._kind == "folder":
            draft.mkdir()
        return draft

    def save(self, data: Never) -> None:
        """Raises DataError: a draft is a node's input."""
        raise DataError(f"{self._path}: a draft is an input of the node that fills it; return its path instead")

    def _exists(self) -> bool:
        return True

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._path), "kind": self._kind}
