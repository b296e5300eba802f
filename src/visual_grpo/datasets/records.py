"""The prepared records as one dataset: a Parquet manifest with the images beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.io import AbstractDataset

from visual_grpo.datasets.folder import missing

if TYPE_CHECKING:
    from kedro_datasets._typing import TablePreview

    from visual_grpo.records.table import RecordTable


class RecordsDataset(AbstractDataset[Path, "RecordTable"]):
    """Loads as a lazy `RecordTable`; saves a manifest that a node has written beside it.

    Args:
        filepath: the Parquet manifest; image paths in it are relative to its folder.
        made_by: the pipeline that makes it, for the error about a missing file.
    """

    def __init__(
        self, *, filepath: str, made_by: str = "data_preparation", metadata: dict[str, Any] | None = None
    ) -> None:
        self._path = Path(filepath)
        self._made_by = made_by
        self.metadata = metadata

    def load(self) -> RecordTable:
        from visual_grpo.records.table import RecordTable

        if not self._exists():
            raise missing(self._path, self._made_by)
        return RecordTable(self._path)

    def save(self, data: Path) -> None:
        """Replaces the manifest, and removes prepared images that the new one does not name."""
        from visual_grpo.records.preparation import remove_unused_images

        data.replace(self._path)
        remove_unused_images(self._path)

    def preview(self, nrows: int = 5) -> TablePreview:
        """The first rows of the manifest, for Kedro-Viz."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(self._path) as file:
            rows = next(file.iter_batches(batch_size=nrows))
        # Lists, not pandas' arrays, which Kedro-Viz cannot turn into JSON.
        data = [list(row.values()) for row in rows.to_pylist()]
        return {"index": list(range(len(data))), "columns": rows.schema.names, "data": data}

    def _exists(self) -> bool:
        return self._path.is_file()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._path), "made_by": self._made_by}
