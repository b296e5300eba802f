"""Reads text line by line: UTF-8 with or without a byte order mark, any line ending; reports invalid bytes."""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from visual_grpo.errors import UserError
from visual_grpo.records.raw import Rejected, shorten

_ESCAPED_BYTE = 0xDC00
"""``surrogateescape`` decodes a byte b that is not UTF-8 as the code point 0xDC00 + b."""

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202d\u202e]")
"""C0 and C1 control characters other than tab and line breaks, DEL, and the two overrides of writing direction: a
prompt with one shows another text than the model reads. Other direction marks occur in ordinary Arabic and Hebrew."""


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Opens UTF-8 text; bytes that are not UTF-8 become surrogates."""
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def read_text(path: Path, longest: int) -> str:
    """Reads a small file completely.

    Raises:
        Rejected: it cannot be opened, has more than ``longest`` bytes or is not UTF-8.
    """
    try:
        if path.stat().st_size > longest:
            raise too_long(path.name, longest)
        with open_text(path) as file:
            text = file.read()
    except OSError as error:
        raise Rejected("unreadable_text", f"{path} cannot be read ({error.strerror})", "Check the file") from error
    check_utf8(text, path.name)
    return text


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (number from 1, line without its ending); bytes that are not UTF-8 are surrogates.

    Raises:
        UserError: the file is UTF-16 or UTF-32.
    """
    refuse_utf16(path)
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            yield number, line.removesuffix("\n")


def refuse_utf16(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UserError(f"{path}: this is UTF-16 text. Save the file as UTF-8.")


def check_line(line: str, longest: int) -> None:
    """Raises `Rejected` for a line that is longer than allowed or not UTF-8."""
    if len(line) > longest:
        raise too_long("the line", longest)
    check_utf8(line)


def too_long(name: str, longest: int) -> Rejected:
    what = f"{name} is longer than data.max_record_mb={longest / 1_000_000:g}"
    return Rejected("text_too_long", what, "Shorten it, or raise data.max_record_mb")


def check_utf8(text: str, name: str = "the line") -> None:
    """Rejects text with bytes that are not UTF-8, or with a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        is_byte = 0x80 <= code - _ESCAPED_BYTE <= 0xFF
        what = f"byte 0x{code - _ESCAPED_BYTE:02X}" if is_byte else f"the lone surrogate U+{code:04X}"
        message = f"{name} is not valid UTF-8: {what} at character {error.start + 1}"
        raise Rejected("not_utf8", message, "Save the file as UTF-8") from error


def check_control_characters(text: str, name: str) -> None:
    found = _CONTROL.search(text)
    if found is not None:
        shown = f"U+{ord(found[0]):04X} ({unicodedata.name(found[0], 'control character').lower()})"
        message = f"{name} has {shown} at character {found.start() + 1}"
        raise Rejected("control_character", message, "Remove it; line breaks and tabs may stay")


def json_object(line: str) -> dict[str, Any]:
    """Parses the JSON object on a line; NaN, which pandas writes for missing values, becomes None.

    Raises:
        Rejected: not JSON, not an object, or a key is there twice.
    """
    try:
        value = json.loads(line, parse_constant=_json_constant, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        message = f"the line is not valid JSON ({error})"
        raise Rejected("not_json", message, "Write one JSON object on each line") from error
    if not isinstance(value, dict):
        message = f"the line is a JSON {type(value).__name__}, not an object"
        raise Rejected("not_json", message, 'Write one JSON object on each line, such as {"prompt": "a red circle"}')
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Rejects a key that is there twice: Python keeps the last of two values and says nothing."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise Rejected("repeated_key", f"the key {shorten(twice)!r} is there twice", "Keep one of the two values")
    return found


def _json_constant(name: str) -> None:
    if name != "NaN":
        raise ValueError(f"{name} is not a JSON value")
