"""Reads CSV files row by row, of limited length."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from visual_grpo.errors import UserError
from visual_grpo.records.raw import Rejected
from visual_grpo.records.text import read_lines, too_long

_NULLS = frozenset({"", "nan", "null", "none", "n/a", "<na>"})
"""Spellings of missing values in spreadsheets and pandas, in lower case."""


class _CsvText:
    """The lines of a file for `csv.reader`; raises `Rejected` where a row gets too long, and goes on after it."""

    def __init__(self, path: Path, longest: int) -> None:
        self._lines = read_lines(path, longest)
        self._longest = longest
        self._row_length = 0
        self.number = 0
        """Of the last line."""

    def begin_row(self) -> None:
        self._row_length = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number = line.number
        self._row_length += len(line.text)
        if line.too_long is not None or self._row_length > self._longest:
            raise too_long("the row", self._longest)
        return line.text


def csv_rows(path: Path, longest: int) -> Iterator[tuple[int, dict[str, str | None] | Rejected]]:
    """Yields (number of the row's last line, row by column name); missing values are None.

    Args:
        longest: characters of a row.
    """
    text = _CsvText(path, longest)
    rows = csv.reader(text)
    header = [name.strip() for name in next(rows, [])]
    while True:
        text.begin_row()
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield text.number, Rejected("not_csv", f"the row is not valid CSV ({error})", "Correct the row")
            continue
        except Rejected as rejected:
            yield text.number, rejected
            continue
        if row:
            yield text.number, _csv_row(header, row)


def csv_header(path: Path, longest: int) -> list[str]:
    """The column names.

    Raises:
        UserError: the first row is not CSV.
    """
    try:
        return [name.strip() for name in next(csv.reader(_CsvText(path, longest)), [])]
    except (csv.Error, Rejected) as error:
        raise UserError(f"{path}: the header is not valid CSV ({error}). Save the file as CSV with UTF-8.") from error


def _csv_row(header: list[str], row: list[str]) -> dict[str, str | None] | Rejected:
    if len(row) > len(header):
        return Rejected(
            "not_csv",
            f"the row has {len(row)} fields, the header {len(header)}",
            'Put quotes (") around text with commas',
        )
    fields = [None if text.strip().lower() in _NULLS else text for text in row]
    return dict(zip(header, fields + [None] * (len(header) - len(row)), strict=True))
