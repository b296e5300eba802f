"""Rows of JSON lines, JSON and CSV.

They are read here because the readers of the library `datasets` need columns of one type and give up a whole file for
one bad line, where only that record should be rejected. Each reader yields rows with their numbers: of a row's last
line, or of a record in JSON.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TextIO

from visual_grpo.common.errors import UserError
from visual_grpo.config import DataConfig
from visual_grpo.data.columns import prompt_columns
from visual_grpo.data.media import from_json
from visual_grpo.data.record import NULLS, Note, Rejected, open_text, shorten

Row = dict[str, Any] | Rejected | Note
_MAX_LINE = 10_000_000
"""Characters of a JSON line that is looked at."""
_BASE64 = 1.4
"""Characters a byte of a picture in base64, with a margin."""
_MAX_CELL = 2**31 - 1
"""The largest limit of characters that `csv` takes on every system."""


def json_rows(file: Path) -> Iterator[tuple[int, Row]]:
    try:
        with open_text(file) as text:
            rows = json.load(text, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON ({error}). Correct it.") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file}: expected a list of objects, one a record. Use records.jsonl instead.")
    yield from enumerate(rows, 1)


def json_lines(file: Path) -> Iterator[tuple[int, Row]]:
    remedy = 'Write one JSON object on each line, such as {"prompt": "a red circle"}'
    with open_text(file) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line, parse_constant=_constant)
            except (ValueError, RecursionError) as error:
                yield number, Rejected("not_json", f"the line is not valid JSON ({error})", remedy)
                continue
            message = f"the line is a JSON {type(value).__name__}, not an object"
            yield number, value if isinstance(value, dict) else Rejected("not_json", message, remedy)


def _constant(name: str) -> float | None:
    """Returns the value of NaN, which stands for a missing one, or Infinity, as other languages write into JSON."""
    return None if name == "NaN" else float(name)


def csv_rows(file: Path, data: DataConfig) -> Iterator[tuple[int, Row]]:
    """Yields (number of the row's last line, row by column name). Missing values are None; lists and objects are read
    from their JSON, other values stay text."""
    with open_text(file, newline="") as text:
        first = text.readline()
        text.seek(0)
        # Spreadsheets separate by semicolons where the comma is in numbers.
        delimiter = "\t" if file.suffix.lower() == ".tsv" else max(",;\t", key=first.count)
        spaced = delimiter != "\t"  # As in: a, "b, c"
        lines = _Lines(text, data.max_file_mb)
        rows = csv.DictReader(lines, delimiter=delimiter, restkey="", strict=True, skipinitialspace=spaced)
        with lines.of_a_row():
            header = _header(rows, file, data)
        texts = {name for name in header if {name, name.lower()} & {*prompt_columns(data)}}
        last = 1
        while (row := _next_row(rows, lines)) is not None:
            number = rows.reader.line_num
            if isinstance(row, dict) and isinstance(row.get(""), list):
                message = f"the row has more fields than the header, {len(header)}"
                row = Rejected("not_csv", message, 'Put quotes (") around text with commas')
            elif isinstance(row, dict):
                missing = {name for name, value in row.items() if value is None or value.strip().lower() in NULLS}
                row |= dict.fromkeys(missing)
                row = {name: value if name in texts else from_json(value) for name, value in row.items()}
                if number > last + 1:
                    note = "of several lines: an unclosed quote also takes the next lines"
                    yield number, Note("row", note)
            yield number, row
            last = number


def _header(rows: csv.DictReader[str], file: Path, data: DataConfig) -> list[str]:
    """Strips and returns the names of the columns. Raises UserError if one occurs twice, or none is the prompt's."""
    try:
        rows.fieldnames = header = [name.strip() for name in rows.fieldnames or ()]
    except csv.Error as error:
        raise UserError(f"{file}: the header is not valid CSV ({error}). Correct it.") from error
    if twice := sorted({column for column in header if column and header.count(column) > 1}):
        raise UserError(f"{file}: the header has {', '.join(map(repr, twice))} more than once. Rename a column.")
    if not {*prompt_columns(data)} & {*header, *map(str.lower, header)}:
        names = ", ".join(prompt_columns(data))
        elsewhere = f" If a different file has the prompts, give it as {data.parameter}."
        raise UserError(
            f"{file}: the header must name the prompt's column ({names}); it is"
            f" {shorten(str(header))}. Name the column with data.columns.prompt=NAME, or write a records.jsonl."
            f"{'' if file == Path(data.path) else elsewhere}"
        )
    return header


def _next_row(rows: csv.DictReader[str], lines: _Lines) -> Row | None:
    """Returns the next row, or its rejection, after which the reader goes on at the next line; None at the end."""
    first = rows.reader.line_num + 1
    try:
        with lines.of_a_row():
            return next(rows, None)
    except csv.Error as error:
        last = rows.reader.line_num
        named, verb = (f"line {last}", "is") if first >= last else (f"lines {first} to {last}", "are")
        if lines.limit == lines.most and str(error).startswith("field larger than"):
            message = f"a cell of {named} has more than {lines.most:,} characters"
            remedy = f"Close its quote, give its picture as a file, or raise data.max_file_mb={lines.max_file_mb:g}"
            return Rejected("file_too_large", message, remedy)
        remedy = 'Write text that has a quote (") in quotes, and the quote twice: """Open"" on a sign"'
        return Rejected("not_csv", f"{named} {verb} not valid CSV ({error})", remedy)


class _Lines:
    """The lines of a CSV, of which a long one raises the limit of its cells, for a picture in base64.

    An unclosed quote takes no more of what follows than the limit allows.
    """

    def __init__(self, text: TextIO, max_file_mb: float) -> None:
        self._text, self._usual, self.max_file_mb = text, csv.field_size_limit(), max_file_mb
        self.most = max(self._usual, min(round(max_file_mb * 1e6 * _BASE64), _MAX_CELL))
        self.limit = self._usual

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        line = next(self._text)
        if len(line) > self.limit:
            self.limit = min(self.most, self._usual + len(line))
            csv.field_size_limit(self.limit)
        return line

    @contextmanager
    def of_a_row(self) -> Iterator[None]:
        self.limit = self._usual
        try:
            yield
        finally:
            csv.field_size_limit(self._usual)  # It is the whole process's.


def has_json_lines(file: Path) -> bool:
    """Returns whether a file begins with two lines of which each is a JSON object, as `Dataset.to_json` writes them."""
    with open_text(file) as lines:  # Other JSON may be one line of any length.
        first = [lines.readline(_MAX_LINE) for _ in range(2)]
    try:
        return all(isinstance(json.loads(line), dict) for line in first)
    except (ValueError, RecursionError):
        return False
