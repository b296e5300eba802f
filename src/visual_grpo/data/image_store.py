"""Stores images as training reads them: upright PNG files of the configured size, RGB or masks.

Coordinates of queries are in pixels; (0, 0) is the centre of the first pixel.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import IO, NamedTuple, TypeVar

import numpy as np

from visual_grpo.common.files import fresh_folder
from visual_grpo.common.geometry import Point, box_of, inner_points
from visual_grpo.common.images import (
    ImageError,
    TooManyPixelsError,
    fit,
    is_intact_png,
    read_image,
    read_orientation,
    read_size,
    scale_to_area,
    stretch,
    stretch_mask,
)
from visual_grpo.common.machine_errors import is_machine_error
from visual_grpo.common.masks import AmbiguousMaskError, Mask, read_mask, read_mask_image
from visual_grpo.common.videos import frame_name
from visual_grpo.config import DataConfig
from visual_grpo.data.near_copies import look_of
from visual_grpo.data.queries import require_fit
from visual_grpo.data.record import (
    LFS_REMEDY,
    EmbeddedImage,
    Note,
    Original,
    Record,
    Rejected,
    is_lfs_pointer,
    is_video_name,
    wrong_type,
)
from visual_grpo.data.video_frames import clip_digest, read_clip, require_pixels

T = TypeVar("T")
Size = tuple[int, int]
"""(width, height) in pixels."""

_VERSION = 2
"""Part of every file's name; raise it when the same original would give different pixels."""
_MIN_SIDE = 32
"""Pixels; smaller images are rejected instead of enlarged."""
_COMPRESSION = 1
"""zlib level 1, the fastest: higher levels take several times as long and save a tenth of the size."""
CHOOSE_VALUE = "Give the object's value as data.mask_value or the record's mask_value, or draw it in white on black"
_WRITING = [Lock() for _ in range(64)]
"""Locks, chosen by the hash of a video's folder: threads may prepare two records with one folder."""
_RESIZES = {"mask": stretch_mask, "image": stretch, "reference": scale_to_area}
"""Role without its number -> how an image gets its size. The object of a query may be anywhere in its image, and the
sources after the first are not what the result has to cover.
"""
_POINTS = 2
"""Number of positive points that are derived from the mask if none are given, as in Seg-Zero's records."""


class PreparedImage(NamedTuple):
    name: str
    """File name within the images' folder."""
    sha256: str
    original_sha256: str
    original_size: Size
    """Upright."""
    look: bytes | None = None
    """`near_copies.look_of` the picture, or of a video's first frame; None for a mask."""
    goes_on: bool = False
    """The video is longer than its prepared frames."""


class PreparedQuery(NamedTuple):
    record: Record
    image: PreparedImage
    mask: PreparedImage
    notes: list[Note]
    """Readings of the mask that the dataset does not state."""
    label: int | None
    """The number that the object is stored as in its mask, where nobody has chosen one."""


@dataclass(frozen=True)
class ImageStore:
    """Prepares images and stores them in a folder.

    File names depend on the original's content: an existing file is reused, a changed original gets a new file, and an
    older manifest stays valid until it is replaced.
    """

    folder: Path
    config: DataConfig

    def prepare(self, original: Original, record_id: str, role: str, mask: Mask | None = None) -> PreparedImage:
        """Resizes an image by its ``role`` in the record (`_RESIZES`; other roles are cropped) and stores it.

        ``mask`` has its pixels, where they have been read as a mask. Raises Rejected for an image that cannot be read,
        has too many pixels, or a side below 32 pixels.
        """
        digest = image_digest(original)
        stem = self._file(record_id, role, digest, *([] if mask is None or mask.label is None else [mask.label]))
        file = stem.with_name(f"{stem.name}.png")
        size, look = self._size(original), None
        if is_intact_png(file):
            look = None if mask is not None else look_of(read_image(file))
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft = self.folder / f".{uuid.uuid4().hex}.png"
            try:
                image = _open(read_image, original) if mask is None else mask.image
                resize = _RESIZES.get(role.rstrip("0123456789"), fit)
                resized = resize(image, self.config.height, self.config.width)
                look = None if mask is not None else look_of(resized)
                resized.save(draft, compress_level=_COMPRESSION)
                draft.replace(file)
            finally:
                draft.unlink(missing_ok=True)
        return PreparedImage(file.name, image_digest(file), digest, size, look)

    def prepare_video(self, original: Original, record_id: str, role: str) -> PreparedImage:
        """Resizes the frames of a video and stores them as a folder of pictures, named after the result.

        Raises Rejected as `videos.read_clip` does, and for a side below 32 pixels.
        """
        digest = image_digest(original)
        folder = self._file(record_id, role, digest, self.config.frames, self.config.fps)
        frames, goes_on = read_clip(original, self.config)
        names = [frame_name(folder, number) for number in range(len(frames))]
        with _WRITING[hash(folder) % len(_WRITING)]:
            if not all(map(is_intact_png, names)):
                with fresh_folder(folder) as fresh:
                    for frame, name in zip(frames, names, strict=True):
                        fitted = fit(frame, self.config.height, self.config.width)
                        fitted.save(fresh / name.name, compress_level=_COMPRESSION)
        _require_size(original.name, frames[0].size)
        return PreparedImage(folder.name, clip_digest(folder), digest, frames[0].size, look_of(frames[0]), goes_on)

    def _file(self, record_id: str, role: str, digest: str, *choices: object) -> Path:
        """Returns the path, without a suffix, of what is prepared from the original of a digest with these choices."""
        content = (_VERSION, record_id, role, digest, self.config.height, self.config.width, *choices)
        key = hashlib.sha256("\0".join(map(str, content)).encode()).hexdigest()[:16]
        # Readable, and safe on every file system, whatever characters the id has.
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", record_id)[:60].strip("._")
        return self.folder / "-".join(part for part in (readable, role, key) if part)

    def _size(self, original: Original) -> Size:
        """Returns the upright image's size; raises `Rejected` if it is too large or too small."""
        size = _open(read_size, original)
        name = original.name if isinstance(original, EmbeddedImage) else original
        require_pixels(name, size, self.config)
        _require_size(name, size)
        return size

    def prepare_query(self, record: Record) -> PreparedQuery:
        """Stores a query's image and mask, and puts box and points, in pixels of the stored image, into its metadata.

        The ``extra`` of the checked record may have ``box`` and ``points`` in pixels of the upright original,
        ``mask_value``, and ``img_width`` and ``img_height``, the image's size before the dataset's authors resized it.
        Raises Rejected for a damaged image; a mask that is empty, differs in size from the image, or of several
        objects; a malformed box or point, or one that does not belong to the mask.
        """
        extra = record.extra
        image = self.prepare(record.source_images[0], record.id, "image")
        size, mask_size = image.original_size, self._size(record.target_image)
        if mask_size not in (size, (extra.get("img_width"), extra.get("img_height"))):
            message = f"the mask is {mask_size[0]}x{mask_size[1]} pixels, the upright image {size[0]}x{size[1]}"
            raise Rejected("wrong_mask_size", message, "Give the mask the size of the upright image")
        value = self.config.mask_value if extra.get("mask_value") is None else extra["mask_value"]
        if value is not None and type(value) is not int:
            raise wrong_type("mask_value", "a whole number", value)
        original = _open(partial(read_mask_image, value=value), record.target_image)
        prepared_mask = self.prepare(record.target_image, record.id, "mask", original)
        mask = read_mask(self.folder / prepared_mask.name)
        if not mask.any():
            message = f"the mask is empty at {self.config.width}x{self.config.height} pixels"
            remedy = "Draw the object in white on black; for a small one, raise data.height and data.width"
            raise Rejected("empty_mask", message, remedy)
        to = (self.config.width, self.config.height)
        box, points = extra.get("box"), extra.get("points")
        require_fit(box, points, np.asarray(stretch_mask(original.image, size[1], size[0])) > 0)
        prompts = {
            "box": box_of(mask) if box is None else [*chain(*rescale("box", (box[:2], box[2:]), size, to))],
            "points": inner_points(mask, _POINTS) if points is None else rescale("points", points, size, to),
        }
        metadata = json.loads(record.metadata)
        if any(metadata.get(key) != extra.get(key) for key in prompts):
            message = "the metadata have a box or points, which the prepared ones would replace"
            raise Rejected("ambiguous_key", message, "Move them to the record's top level, or rename them")
        metadata = json.dumps({**metadata, **prompts}, ensure_ascii=False, sort_keys=True)
        notes = [Note("mask", text) for text in (original.remark, _unlike_image(record, size)) if text]
        label = original.label if value is None else None
        return PreparedQuery(replace(record, metadata=metadata), image, prepared_mask, notes, label)


def _require_size(name: str | Path, size: Size) -> None:
    if min(size) < _MIN_SIDE:
        message = f"{name} is {size[0]}x{size[1]} pixels; both sides need {_MIN_SIDE} or more"
        raise Rejected("image_too_small", message, "Replace the image or remove the record")


def _unlike_image(record: Record, size: Size) -> str:
    """Returns a note if EXIF data turn the image but not the mask, and their sizes cannot tell if that is right."""
    orientation = _open(read_orientation, record.source_images[0])
    hidden = orientation in (2, 3, 4) or (orientation > 4 and size[0] == size[1])
    if not hidden or _open(read_orientation, record.target_image) != 1:
        return ""
    return "not rotated by EXIF, unlike their images: check that they show the upright images"


def _open(read: Callable[[Path | IO[bytes]], T], original: Original) -> T:
    """Applies ``read`` to an image's file; raises `Rejected` if it cannot be read."""
    try:
        return read(original.open() if isinstance(original, EmbeddedImage) else original)
    except TooManyPixelsError as error:
        raise Rejected("too_many_pixels", str(error), "Scale it down, or raise data.max_pixels") from error
    except AmbiguousMaskError as error:
        raise Rejected("ambiguous_mask", str(error), CHOOSE_VALUE) from error
    except ImageError as error:
        if isinstance(original, Path) and is_lfs_pointer(original):
            raise Rejected("lfs_pointer", f"{original} is a Git LFS pointer, not the image", LFS_REMEDY) from error
        if isinstance(original, Path) and is_video_name(original.name):
            message = f"{original.name} is a video, and an image is expected"
            remedy = "Set data.frames, if it is a target (a source is a picture), or remove the record"
            raise Rejected("unexpected_video", message, remedy) from error
        raise Rejected("corrupt_image", str(error), "Replace the image or remove the record") from error


def image_digest(original: Original) -> str:
    """Returns the sha256 of an image's or video's bytes, 64 hex digits."""
    if isinstance(original, EmbeddedImage):
        return original.sha256
    try:
        return clip_digest(original)
    except OSError as error:
        if is_machine_error(error):
            raise
        message = f"{original} cannot be read ({error.strerror})"
        raise Rejected("corrupt_image", message, "Check the file and its permissions") from error


def rescale(key: str, points: Iterable[Sequence[float]], size: Size, to: Size) -> list[Point]:
    """Maps points on an image of size ``size`` to the same image stretched to size ``to``, each to its place.

    In many datasets the corners of a ``box`` may lie at the image's width or height, one past the last pixel; they are
    clamped to that pixel. Raises Rejected for a point outside.
    """
    (width, height), (to_width, to_height) = size, to
    beyond = 1 if key == "box" else 0.5  # Pixels past the centre of the last one.
    scaled = []
    for x, y in points:
        if not (-0.5 <= x <= width - 1 + beyond and -0.5 <= y <= height - 1 + beyond):
            message = f"{key}: ({x:g}, {y:g}) lies outside the image of {width}x{height} pixels"
            raise Rejected(f"wrong_{key}", message, "Give absolute pixels of the upright image at its own size")
        if key == "box":
            x, y = min(x, width - 1), min(y, height - 1)
        # The centre of the first pixel is half a pixel inside the edge.
        scaled.append(((x + 0.5) * to_width / width - 0.5, (y + 0.5) * to_height / height - 0.5))
    return scaled
