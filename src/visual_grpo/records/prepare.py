"""An image to the file that training reads: upright RGB PNG of the configured size."""

from __future__ import annotations

import hashlib
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

from visual_grpo.images import ImageError, fit, is_intact_png, read_image, read_size
from visual_grpo.records.raw import Rejected

_VERSION = 1
"""Part of every file's name: raise it when the same original would give other pixels."""

_SMALLEST = 32
"""Pixels on a side below which there is nothing worth scaling up."""

_COMPRESSION = 1
"""zlib level: the fastest; higher ones cost several times as long for a tenth of the size."""


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

    def prepare(self, original: Path, record_id: str, role: str) -> PreparedImage:
        """Fits an image to height x width and stores it.

        Args:
            role: what the image is of its record, such as ``target``; part of the name.

        Raises:
            Rejected: it cannot be read, or a side is below 32 pixels.
        """
        original_sha256 = _sha256(original)
        name = self._name(original_sha256, record_id, role)
        reused = self._reuse(original, name)
        original_width, original_height = reused or self._make(original, name)
        return PreparedImage(
            name=name,
            sha256=_sha256(self.folder / name),
            original_sha256=original_sha256,
            original_width=original_width,
            original_height=original_height,
        )

    def _make(self, original: Path, name: str) -> tuple[int, int]:
        """Returns the original's width and height."""
        try:
            image = read_image(original)
        except ImageError as error:
            raise Rejected("corrupt_image", str(error), "Replace the image or remove the record") from error
        if min(image.size) < _SMALLEST:
            raise Rejected(
                "image_too_small",
                f"{original} is {image.width}x{image.height} pixels; both sides need {_SMALLEST} or more",
                "Replace the image or remove the record",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = self.folder / f".{uuid.uuid4().hex}.png"
        try:
            fit(image, self.height, self.width).save(fresh, compress_level=_COMPRESSION)
            fresh.replace(self.folder / name)
        finally:
            fresh.unlink(missing_ok=True)
        return image.size

    def _reuse(self, original: Path, name: str) -> tuple[int, int] | None:
        """The original's width and height if an undamaged prepared file is there already."""
        if not is_intact_png(self.folder / name):
            return None
        return read_size(original)

    def _name(self, original_sha256: str, record_id: str, role: str) -> str:
        """A name that is safe on every file system, whatever the id, and still tells it."""
        content = "\0".join([str(_VERSION), record_id, role, original_sha256, str(self.height), str(self.width)])
        key = hashlib.sha256(content.encode()).hexdigest()[:16]
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", record_id)[:60].strip("._")
        return "-".join(part for part in (readable, role, key) if part) + ".png"


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Rejected(
            "corrupt_image", f"{path} cannot be read ({error.strerror})", "Check the file and its permissions"
        ) from error
