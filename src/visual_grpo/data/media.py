"""Finds the pictures and videos in a table's cells, in whatever form a dataset stores them.

A cell holds one as a path, a URL, the bytes of a file, such bytes in base64 or in a data URL (RFC 2397), an array of
pixels, or a mapping with one of these; or a list of them, also as JSON in a text.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visual_grpo.common.images import HEIC, ImageError, read_size, to_png
from visual_grpo.data.record import EmbeddedImage, find_file, is_image_name, is_video_name

_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_DATA_URL = re.compile(r"data:(?:image|video)/[^,]*;base64,", re.IGNORECASE)
_BEGINNINGS = (
    *(b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"II*\0", b"MM\0*", b"RIFF"),
    *(b"\x1aE\xdf\xa3", b"\0\0\0"),
)
"""First bytes of PNG, JPEG, GIF, BMP, TIFF, WebP and AVI, Matroska, and ISO media (AVIF, HEIC, MP4)."""
_ATOMS = frozenset({b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
"""Kinds of atoms that a QuickTime file may begin with: ``ftyp`` came later (Apple's QuickTime File Format)."""
_LEAST_BASE64 = 64
"""Characters; no picture is shorter, and shorter texts may be words."""
_URL_SAFE = str.maketrans("-_", "+/")
_CHANNELS = (1, 3, 4)
_KEYS = ("bytes", "path", "url")
"""Keys of a mapping that stands for one file, in the hub's tables and chat formats; the first with a value counts."""


def held(value: Any, name: str) -> Any:
    """Returns a cell's pictures and videos: a path or URL as text, a `Path`, an `EmbeddedImage` called ``name``, or a
    list of these; None where it holds anything else."""
    if isinstance(value, EmbeddedImage | Path):
        return value
    if isinstance(value, str):
        return _in_text(value, name)
    if isinstance(value, Mapping):
        given = next((value[key] for key in _KEYS if value.get(key)), None)
        return held(given, name) if isinstance(given, str | EmbeddedImage) else None
    if isinstance(value, list | tuple) and value:
        if isinstance(value[0], list | tuple):
            return _in_array(value, name)
        found = []
        for one in value:
            if (item := held(one, name)) is None or isinstance(item, list):
                return None
            found.append(item)
        return found
    return None


def from_json(value: Any) -> Any:
    """Returns the list or object that a text holds as JSON, as cells of CSV do; any other value as it is."""
    if isinstance(value, str) and value[:1] in "[{" and value[-1:] in "]}" and value:
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def is_url(value: Any) -> bool:
    return isinstance(value, str) and _URL.match(value) is not None


def is_page(value: Any) -> bool:
    """Returns whether a `held` value is a URL that does not end, before its query, like a picture's or video's name."""
    return is_url(value) and not any(is_image_name(text) or is_video_name(text) for text in (value, _path_of(value)))


def _path_of(url: str) -> str:
    return re.split("[?#]", url, maxsplit=1)[0]


def is_video(value: Any) -> bool:
    """Returns whether a `held` value is a video, by its name or its first bytes."""
    if isinstance(value, EmbeddedImage):
        return is_video_content(value.data[:12])
    return is_video_name(str(value)) if isinstance(value, str | Path) else False


def is_video_content(head: bytes) -> bool:
    """Returns whether a file's first twelve bytes are those of MP4, MOV, Matroska, WebM or AVI."""
    is_iso = head[4:8] == b"ftyp" and head[8:12] not in (b"avif", b"avis", *HEIC)
    return (
        is_iso
        or head[4:8] in _ATOMS
        or head.startswith(b"\x1aE\xdf\xa3")
        or (head[:4], head[8:12]) == (b"RIFF", b"AVI ")
    )


def is_there(value: Any, folder: Path) -> bool:
    """Returns whether a `held` value can be read: bytes may be anything, and a text the name that a file once had."""
    try:
        if isinstance(value, EmbeddedImage):
            return is_video(value) or bool(read_size(value.open()))
        return isinstance(value, Path) or (not is_url(value) and find_file(folder, value) is not None)
    except (ImageError, OSError):
        return False


def each(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, list) else [] if value is None else [value]


def _in_text(text: str, name: str) -> Any:
    if is_image_name(text) or is_video_name(text) or is_url(text):
        return text
    if (prefix := _DATA_URL.match(text)) is not None:
        return EmbeddedImage(name, _decoded(text[prefix.end() :]) or b"")
    if len(text) >= _LEAST_BASE64 and (_decoded(text[:32]) or b"").startswith(_BEGINNINGS):
        content = _decoded(text)
        return None if content is None else EmbeddedImage(name, content)
    value = from_json(text)
    return None if isinstance(value, str) else held(value, name)


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode("".join(text.split()).translate(_URL_SAFE), validate=True)
    except (binascii.Error, ValueError):
        return None


def _in_array(rows: Any, name: str) -> EmbeddedImage | None:
    """Returns whole numbers 0..255 in the shape [height, width, channels] or [channels, height, width] as a PNG."""
    try:
        pixels = np.asarray(rows)
    except ValueError:  # Rows of different lengths.
        return None
    if pixels.ndim != 3 or pixels.dtype.kind not in "ui" or not pixels.size or pixels.min() < 0 or pixels.max() > 255:
        return None
    if pixels.shape[2] not in _CHANNELS:
        pixels = np.moveaxis(pixels, 0, 2)
    if pixels.shape[2] not in _CHANNELS:
        return None
    pixels = pixels.astype(np.uint8)
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    return EmbeddedImage(name, to_png(image, compress_level=1))
