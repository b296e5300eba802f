"""Kedro datasets: what the pipelines hand to each other on disk, replaced whole or not at all."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from kedro.io import AbstractDataset, CatalogProtocol, DatasetError

from visual_grpo.common.errors import UserError
from visual_grpo.common.files import from_here, new_draft, new_folder, replace_folder, settled
from visual_grpo.data.manifest import RecordTable

if TYPE_CHECKING:
    from kedro_datasets._typing import ImagePreview, TablePreview


PATH = "path:"
"""Before a dataset's name, an input of a node: where the dataset is, or would be (`path_of`)."""


def path_of(catalog: CatalogProtocol, name: str) -> Path | None:
    """Returns where a dataset of the catalog is, for reading; None for one in memory or on a different machine."""
    dataset: Any = catalog.get(name)
    described = {} if dataset is None else dataset._describe()
    is_here = "filepath" in described and described.get("protocol", "file") == "file"
    return settled(from_here(Path(described["filepath"]))) if is_here else None


def require_path(catalog: CatalogProtocol, name: str) -> Path:
    """Returns `path_of`; raises UserError where it is None."""
    path = path_of(catalog, name)
    if path is None:
        raise UserError(
            f"The catalog does not have {name} in a file or folder of this machine, which other commands read. Change"
            " its entry in conf/*/catalog.yml."
        )
    return path


class DataError(UserError, DatasetError):
    """A `DatasetError`, so that Kedro passes it on as it is, whose message the user can act on."""


class _PathDataset(AbstractDataset[Any, Any]):
    """A file or folder at ``filepath``."""

    def __init__(self, *, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        """``metadata`` is the catalog's; ``made_by`` in it is the pipeline that makes the dataset."""
        self._path, self.metadata = Path(filepath), metadata or {}

    def _exists(self) -> bool:
        return self._path.exists()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._path)}

    def _require(self) -> Path:
        if not self._exists():
            raise DataError(f"{self._path} does not exist yet.", remedy=self.metadata["made_by"])
        return self._path


class FolderDataset(_PathDataset):
    """Loads as the folder's path; saves by moving a folder that a node has filled into its place."""

    def draft(self) -> Path:
        """Returns an empty folder next to its own, on the same disk."""
        return new_folder(self._path)

    def load(self) -> Path:
        return self._require()

    def save(self, data: Path) -> None:
        """Moves the folder ``data`` into the place of the old one, which stays if that fails."""
        if not isinstance(data, Path) or not data.is_dir():
            raise DataError(f"{self._path}: expected the path of the folder that the node filled, got {data!r}")
        if data.resolve() != self._path.resolve():
            replace_folder(data, self._path)

    def preview(self, file: str) -> ImagePreview:
        """Returns the first PNG whose path in the folder matches the glob pattern ``file``, for Kedro-Viz."""
        image = min(self.load().glob(file), default=None)
        if image is None:
            raise DataError(f"{self._path} has no {file}")
        return base64.b64encode(image.read_bytes()).decode()

    def _exists(self) -> bool:
        return settled(self._path).is_dir()


class RecordsDataset(_PathDataset):
    """Loads a Parquet manifest as a lazy `RecordTable`; saves a manifest that a node has written next to it."""

    def load(self) -> RecordTable:
        return RecordTable(self._require())

    def draft(self) -> Path:
        """Returns an empty file next to the manifest for the next one, whose images are in the same folder."""
        return new_draft(self._path)

    def save(self, data: Path) -> None:
        """Replaces the manifest, and removes prepared images that the new one does not name."""
        from visual_grpo.data.preparation import remove_unused_images

        data.replace(self._path)
        remove_unused_images(self._path)

    def preview(self, nrows: int = 5) -> TablePreview:
        """Returns the first rows of the manifest, for Kedro-Viz."""
        with pq.ParquetFile(self._path) as file:
            rows = next(file.iter_batches(batch_size=nrows))
        # Lists, not pandas' arrays, which Kedro-Viz cannot turn into JSON.
        data = [list(row.values()) for row in rows.to_pylist()]
        return {"index": list(range(len(data))), "columns": rows.schema.names, "data": data}
