"""An image to the file that training reads: upright PNG of the configured size, RGB or a mask."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from visual_grpo.images import (
    ImageError,
    fit,
    is_intact_png,
    read_image,
    read_mask_image,
    read_size,
    stretch,
    stretch_mask,
)
from visual_grpo.records.raw import EmbeddedImage, Original, Rejected

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

_VERSION = 1
"""Part of every file's name: raise it when the same original would give other pixels."""

_SMALLEST = 32
"""Pixels on a side below which there is nothing worth scaling up."""

_COMPRESSION = 1
"""zlib level: the fastest; higher ones cost several times as long for a tenth of the size."""


@dataclass(frozen=True)
class Kind:
    """How an image is read, and how it is brought to a height and width."""

    read: Callable[[Path | IO[bytes]], Image]
    resize: Callable[[Image, int, int], Image]


CROPPED = Kind(read_image, fit)
STRETCHED = Kind(read_image, stretch)
"""Nothing is cropped off: what a query asks about may be anywhere."""
MASK = Kind(read_mask_image, stretch_mask)


@dataclass(frozen=True, kw_only=True)
class PreparedImage:
    """A prepared file and where it came from."""

    name: str
    """File name within the images' folder."""
    sha256: str
    original_sha256: str
    original_width: int
    """Pixels, upright."""
    original_height: int


@dataclass(frozen=True, kw_only=True)
class ImageStore:
    """Prepares images into a folder.

    A file's name tells the original's content, so a file that is already there is used again, an original
    that has changed gets another file, and an older manifest stays true until it is replaced.
    """

    folder: Path
    height: int
    width: int

    def prepare(self, original: Original, record_id: str, role: str, kind: Kind = CROPPED) -> PreparedImage:
        """Brings an image to height x width and stores it.

        Args:
            role: what the image is of its record, such as ``target``; part of the name, so each has one kind.

        Raises:
            Rejected: it cannot be read, or a side is below 32 pixels.
        """
        original_sha256 = _sha256(original)
        name = self._name(original_sha256, record_id, role)
        reused = self._reuse(original, name)
        original_width, original_height = reused or self._make(original, name, kind)
        return PreparedImage(
            name=name,
            sha256=_sha256(self.folder / name),
            original_sha256=original_sha256,
            original_width=original_width,
            original_height=original_height,
        )

    def _make(self, original: Original, name: str, kind: Kind) -> tuple[int, int]:
        """Returns the original's width and height."""
        image = open_original(kind.read, original)
        if min(image.size) < _SMALLEST:
            raise Rejected(
                "image_too_small",
                f"{_name_of(original)} is {image.width}x{image.height} pixels; both sides need {_SMALLEST} or more",
                "Replace the image or remove the record",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = self.folder / f".{uuid.uuid4().hex}.png"
        try:
            kind.resize(image, self.height, self.width).save(fresh, compress_level=_COMPRESSION)
            fresh.replace(self.folder / name)
        finally:
            fresh.unlink(missing_ok=True)
        return image.size

    def _reuse(self, original: Original, name: str) -> tuple[int, int] | None:
        """The original's width and height if an undamaged prepared file is there already."""
        if not is_intact_png(self.folder / name):
            return None
        return original_size(original)

    def _name(self, original_sha256: str, record_id: str, role: str) -> str:
        """A name that is safe on every file system, whatever the id, and still tells it."""
        content = "\0".join([str(_VERSION), record_id, role, original_sha256, str(self.height), str(self.width)])
        key = hashlib.sha256(content.encode()).hexdigest()[:16]
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", record_id)[:60].strip("._")
        return "-".join(part for part in (readable, role, key) if part) + ".png"


def original_size(original: Original) -> tuple[int, int]:
    """Width and height of an image as it was found, upright, from its head alone.

    Raises:
        Rejected: it cannot be read.
    """
    return open_original(read_size, original)


def open_original(read: Callable[[Path | IO[bytes]], T], original: Original) -> T:
    """What ``read`` makes of an image's file.

    Raises:
        Rejected: it cannot be read.
    """
    try:
        return read(original.open() if isinstance(original, EmbeddedImage) else original)
    except ImageError as error:
        raise Rejected("corrupt_image", str(error), "Replace the image or remove the record") from error


def _name_of(original: Original) -> str:
    return original.name if isinstance(original, EmbeddedImage) else str(original)


def _sha256(path: Original) -> str:
    if isinstance(path, EmbeddedImage):
        return path.sha256
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Rejected(
            "corrupt_image", f"{path} cannot be read ({error.strerror})", "Check the file and its permissions"
        ) from error
