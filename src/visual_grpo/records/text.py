"""Reads text files line by line: UTF-8 with or without a byte order mark, any line ending; reports invalid bytes."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.records.raw import Rejected

_ESCAPED_BYTE = 0xDC00
"""``surrogateescape`` decodes a byte b that is not UTF-8 as the code point 0xDC00 + b."""

_NULLS = frozenset({"", "nan", "null", "none", "n/a", "<na>"})
"""Spellings of missing values in spreadsheets and pandas, in lower case."""


def read_text(path: Path) -> str:
    """Reads a small file completely.

    Raises:
        Rejected: it cannot be opened or is not UTF-8.
    """
    try:
        text = "".join(line for _, line in read_lines(path))
    except OSError as error:
        raise Rejected("unreadable_text", f"{path} cannot be read ({error.strerror})", "Check the file") from error
    except UserError as error:
        raise Rejected("not_utf8", f"{path.name} is UTF-16 text", "Save the file as UTF-8") from error
    check_utf8(text, path.name)
    return text


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, line with its ending); bytes that are not UTF-8 stay as surrogates.

    Raises:
        UserError: the file is UTF-16 or UTF-32.
    """
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UserError(f"{path}: this is UTF-16 text. Save the file as UTF-8.")
        file.seek(0)
        for number, line in enumerate(file, 1):
            text = line.decode("utf-8", "surrogateescape")
            yield number, text.removeprefix("\ufeff") if number == 1 else text


def count_lines(path: Path) -> int:
    """Number of lines, for the progress bar."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


def check_utf8(text: str, name: str = "the line") -> None:
    """Rejects text with bytes that are not UTF-8, or with a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        what = (
            f"byte 0x{code - _ESCAPED_BYTE:02X}"
            if 0x80 <= code - _ESCAPED_BYTE <= 0xFF
            else f"the lone surrogate U+{code:04X}"
        )
        raise Rejected(
            "not_utf8",
            f"{name} is not valid UTF-8: {what} at character {error.start + 1}",
            "Save the file as UTF-8",
        ) from error


def json_object(line: str) -> dict[str, Any]:
    """Parses the JSON object on a line; NaN, which pandas writes for missing values, becomes None.

    Raises:
        Rejected: not UTF-8, not JSON, or not an object.
    """
    check_utf8(line)
    try:
        value = json.loads(line, parse_constant=_json_constant)
    except (ValueError, RecursionError) as error:
        raise Rejected(
            "not_json", f"the line is not valid JSON ({error})", "Write one JSON object on each line"
        ) from error
    if not isinstance(value, dict):
        raise Rejected(
            "not_json",
            f"the line is a JSON {type(value).__name__}, not an object",
            'Write one JSON object on each line, such as {"prompt": "a red circle"}',
        )
    return value


def csv_rows(path: Path) -> Iterator[tuple[int, dict[str, str | None] | Rejected]]:
    """Yields (number of the row's last line, row by column name); missing values are None."""
    rows = csv.reader(text for _, text in read_lines(path))
    header = [name.strip() for name in next(rows, [])]
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield rows.line_num, Rejected("not_csv", f"the row is not valid CSV ({error})", "Correct the row")
            continue
        if row:
            yield rows.line_num, _csv_row(header, row)


def csv_header(path: Path) -> list[str]:
    """The column names."""
    return [name.strip() for name in next(csv.reader(text for _, text in read_lines(path)), [])]


def _csv_row(header: list[str], row: list[str]) -> dict[str, str | None] | Rejected:
    if len(row) > len(header):
        return Rejected(
            "not_csv",
            f"the row has {len(row)} fields, the header {len(header)}",
            'Put quotes (") around text with commas',
        )
    fields = [None if text.strip().lower() in _NULLS else text for text in row]
    return dict(zip(header, fields + [None] * (len(header) - len(row)), strict=True))


def _json_constant(name: str) -> None:
    if name != "NaN":
        raise ValueError(f"{name} is not a JSON value")
