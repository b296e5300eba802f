"""Reads text files line by line: UTF-8 with or without a byte order mark, any line ending; reports invalid bytes.

Memory holds a record at most, of limited length, whatever the file is.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from visual_grpo.errors import UserError
from visual_grpo.records.raw import Rejected, shorten

_ESCAPED_BYTE = 0xDC00
"""``surrogateescape`` decodes a byte b that is not UTF-8 as the code point 0xDC00 + b."""

_BEGINNING = 1000
"""Bytes that are kept of a line that is too long."""

_DEEPEST = 100
"""Objects and lists inside each other; Python's own limit depends on where a value is used."""

_MOST_KEYS = 10_000
"""Of one record."""

_BYTES = "latin-1"
"""As which a file is read for its lines: a character for each byte."""

_BLOCK = 1 << 20
"""Bytes that are read at a time where lines do not matter."""


class Line(NamedTuple):
    """A line of a text file."""

    number: int
    """From 1."""
    text: str
    """With its ending; bytes that are not UTF-8 are surrogates. Only the beginning of a line that is too long."""
    too_long: Rejected | None

    def checked(self) -> str:
        """The text.

        Raises:
            Rejected: it is too long or not UTF-8.
        """
        if self.too_long is not None:
            raise self.too_long
        check_utf8(self.text)
        return self.text


def read_text(path: Path, longest: int) -> str:
    """Reads a small file completely.

    Raises:
        Rejected: it cannot be opened, has more than ``longest`` bytes or is not UTF-8.
    """
    try:
        if path.stat().st_size > longest:
            raise too_long(path.name, longest)
        text = "".join(line.text for line in read_lines(path, longest))
    except OSError as error:
        raise Rejected("unreadable_text", f"{path} cannot be read ({error.strerror})", "Check the file") from error
    except UserError as error:
        raise Rejected("not_utf8", f"{path.name} is UTF-16 text", "Save the file as UTF-8") from error
    check_utf8(text, path.name)
    return text


def read_lines(path: Path, longest: int) -> Iterator[Line]:
    """Yields the lines; of one with more than ``longest`` bytes only the beginning is kept.

    Raises:
        UserError: the file is UTF-16 or UTF-32.
    """
    ending = _line_ending(path)
    with path.open("rb") as binary, TextIOWrapper(binary, _BYTES, newline=ending.decode()) as file:
        if binary.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UserError(f"{path}: this is UTF-16 text. Save the file as UTF-8.")
        binary.seek(0)
        number = 0
        while line := file.readline(longest + 1).encode(_BYTES):
            number += 1
            refusal = None
            if len(line) > longest:
                refusal = too_long("the line", longest)
                _skip_line(file, line, ending)
                line = line[:_BEGINNING]
            text = line.decode("utf-8", "surrogateescape")
            yield Line(number, text.removeprefix("\ufeff") if number == 1 else text, refusal)


def count_lines(path: Path) -> int:
    """Number of lines, for the progress bar."""
    ending = _line_ending(path)
    lines, last = 0, ending
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            lines += block.count(ending)
            last = block[-1:]
    return lines + (last != ending)


def _line_ending(path: Path) -> bytes:
    r"""``\r``, which old programs write, where the file has no ``\n``; ``\r\n`` ends in one."""
    ending = b"\n"
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            if b"\n" in block:
                return b"\n"
            if b"\r" in block:
                ending = b"\r"
    return ending


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


def json_object(line: Line) -> dict[str, Any]:
    """Parses the JSON object on a line; NaN, which pandas writes for missing values, becomes None.

    Raises:
        Rejected: too long, not UTF-8, not JSON, or not an object; or it has too many keys, a key twice, or values too
            deep inside each other.
    """
    text = line.checked()
    try:
        value = json.loads(text, parse_constant=_json_constant, object_pairs_hook=_object)
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
    if len(value) > _MOST_KEYS:
        raise Rejected("too_many_keys", f"the record has {len(value)} keys, more than {_MOST_KEYS}", "Use fewer keys")
    check_depth(value)
    return value


def too_long(name: str, longest: int) -> Rejected:
    return Rejected(
        "text_too_long",
        f"{name} is longer than data.max_record_mb={longest / 1_000_000:g}",
        "Shorten it, or raise data.max_record_mb",
    )


def _skip_line(file: TextIOWrapper, line: bytes, ending: bytes) -> None:
    """Reads to the end of a line of which ``line`` has been read."""
    while line and not line.endswith(ending):
        line = file.readline(_BLOCK).encode(_BYTES)


def check_depth(value: Any) -> None:
    """Rejects values that are too deep inside each other, without recursion."""
    level: list[Any] = [[value]]
    depth = 0
    while level := [
        inner
        for outer in level
        for inner in (outer.values() if isinstance(outer, dict) else outer)
        if isinstance(inner, dict | list)
    ]:
        depth += 1
        if depth > _DEEPEST:
            raise Rejected(
                "too_deep", f"objects and lists are more than {_DEEPEST} deep inside each other", "Use a flatter record"
            )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python keeps the last of two values and says nothing."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise Rejected("repeated_key", f"the key {shorten(twice)!r} is there twice", "Keep one of the two values")
    return found


def _json_constant(name: str) -> None:
    if name != "NaN":
        raise ValueError(f"{name} is not a JSON value")
