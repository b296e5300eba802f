"""Stores images as training reads them: upright PNG files of the configured size, RGB or masks."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, TypeVar

from visual_grpo.common.files import file_digest
from visual_grpo.common.images import (
    ImageError,
    TooManyPixelsError,
    fit,
    is_intact_png,
    read_image,
    read_mask_image,
    read_size,
    stretch,
    stretch_mask,
)
from visual_grpo.data.raw import EmbeddedImage, Original, Rejected

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

_VERSION = 1
"""Part of every file's name; raise it when the same original would give different pixels."""
_SMALLEST = 32
"""Minimum pixels per side; smaller images are rejected instead of enlarged."""
_COMPRESSION = 1
"""zlib level 1, the fastest: higher levels take several times as long and save a tenth of the size."""


class Kind(NamedTuple):
    read: Callable[[Path | IO[bytes]], Image]
    resize: Callable[[Image, int, int], Image]


CROPPED = Kind(read_image, fit)
STRETCHED = Kind(read_image, stretch)
"""Without cropping, because the object of a query may be anywhere in the image."""
MASK = Kind(read_mask_image, stretch_mask)


class PreparedImage(NamedTuple):
    name: str
    """File name within the images' folder."""
    sha256: str
    original_sha256: str
    original_size: tuple[int, int]
    """(width, height) in pixels, upright."""


@dataclass(frozen=True, kw_only=True)
class ImageStore:
    """Prepares images and stores them in a folder.

    File names depend on the original's content: an existing file is reused, a changed original gets a new file, and an
    older manifest stays valid until it is replaced.
    """

    folder: Path
    height: int
    width: int
    max_pixels: int

    def prepare(self, original: Original, record_id: str, role: str, kind: Kind = CROPPED) -> PreparedImage:
        """Resizes an image to height x width and stores it.

        Args:
            role: the image's role in its record, such as ``target``; part of the file name, and always of one ``kind``.

        Raises:
            Rejected: the image cannot be read, has too many pixels, or a side is below 32 pixels.
        """
        digest = sha256_of(original)
        # Readable, and safe on every file system, whatever characters the id has.
        content = "\0".join([str(_VERSION), record_id, role, digest, str(self.height), str(self.width)])
        key = hashlib.sha256(content.encode()).hexdigest()[:16]
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", record_id)[:60].strip("._")
        file = self.folder / ("-".join(part for part in (readable, role, key) if part) + ".png")
        width, height = size = original_size(original)
        name = original.name if isinstance(original, EmbeddedImage) else original
        if width * height > self.max_pixels:
            message = f"{name} is {width}x{height} pixels, more than data.max_pixels={self.max_pixels}"
            raise Rejected("too_many_pixels", message, "Scale it down, raise data.max_pixels or remove the record")
        if min(size) < _SMALLEST:
            message = f"{name} is {width}x{height} pixels; both sides need {_SMALLEST} or more"
            raise Rejected("image_too_small", message, "Replace the image or remove the record")
        if not is_intact_png(file):
            self.folder.mkdir(parents=True, exist_ok=True)
            fresh = self.folder / f".{uuid.uuid4().hex}.png"
            try:
                image = open_original(kind.read, original)
                kind.resize(image, self.height, self.width).save(fresh, compress_level=_COMPRESSION)
                fresh.replace(file)
            finally:
                fresh.unlink(missing_ok=True)
        return PreparedImage(file.name, sha256_of(file), digest, size)


def original_size(original: Original) -> tuple[int, int]:
    """Width and height of an original image, upright; reads only the file's header."""
    return open_original(read_size, original)


def open_original(read: Callable[[Path | IO[bytes]], T], original: Original) -> T:
    """Applies ``read`` to an image's file; raises `Rejected` if it cannot be read."""
    try:
        return read(original.open() if isinstance(original, EmbeddedImage) else original)
    except TooManyPixelsError as error:
        raise Rejected("too_many_pixels", str(error), "Scale it down, or raise data.max_pixels") from error
    except ImageError as error:
        raise Rejected("corrupt_image", str(error), "Replace the image or remove the record") from error


def sha256_of(original: Original) -> str:
    """sha256 of the file's bytes, 64 hex digits."""
    if isinstance(original, EmbeddedImage):
        return original.sha256
    try:
        return file_digest(original)
    except OSError as error:
        message = f"{original} cannot be read ({error.strerror})"
        raise Rejected("corrupt_image", message, "Check the file and its permissions") from error
