"""The prepared records as one dataset: a Parquet manifest with the images beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kedro.io import AbstractDataset

from visual_grpo.datasets.errors import DataError, missing

if TYPE_CHECKING:
    from visual_grpo.records.table import RecordTable


class Writes(Protocol):
    """Writes the manifest itself, for example `visual_grpo.records.preparation.Preparation`."""

    def write(self, manifest: Path) -> None: ...


Rows = Iterable[Mapping[str, Any]] | Writes


class RecordsDataset(AbstractDataset[Rows, "RecordTable"]):
    """Loads as a lazy `RecordTable`; saves rows as they stream, replacing the old manifest at the end.

    Args:
        filepath: the Parquet manifest; image paths in it are relative to its folder.
        made_by: the pipeline that makes it; the error for a missing file names it.
    """

    def __init__(
        self,
        *,
        filepath: str,
        made_by: str = "data_preparation",
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self._path = Path(filepath)
        self._made_by = made_by
        self.metadata = metadata

    def load(self) -> RecordTable:
        """Opens the manifest without reading its rows.

        Raises:
            DataError: there is no manifest; names the command that makes it.
        """
        from visual_grpo.records.table import RecordTable

        if not self._exists():
            raise missing(self._path, self._made_by)
        return RecordTable(self._path)

    def save(self, data: Rows) -> None:
        """Writes rows (see `visual_grpo.records.manifest` for the columns).

        Raises:
            DataError: what the rows' maker complains of; the old manifest stays.
        """
        from visual_grpo.errors import UserError
        from visual_grpo.records.manifest import write_manifest

        try:
            if isinstance(data, Iterable):
                write_manifest(self._path, data)
            else:
                data.write(self._path)
        except UserError as error:
            raise DataError(str(error)) from error

    def _exists(self) -> bool:
        return self._path.is_file()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._path), "made_by": self._made_by}
