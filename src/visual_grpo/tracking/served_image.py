"""Images in requests to a served model: bytes, text in base64, and in Python also paths and Pillow images."""

from __future__ import annotations

import base64
import binascii
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from visual_grpo.errors import UserError
from visual_grpo.images import read_image, read_size

if TYPE_CHECKING:
    from PIL.Image import Image


def listed(image: Any) -> list[Any]:
    """The images of a row: several, one, or none."""
    if isinstance(image, (list, tuple)):
        return list(image)
    # A table has NaN where a row has nothing.
    return [] if image is None or (isinstance(image, float) and pd.isna(image)) else [image]


def read(source: Any, row: int, max_pixels: int) -> Image:
    """An image in any of the forms that a request may have.

    Raises:
        UserError: it is none, damaged, or has too many pixels to be decoded.
    """
    from PIL import Image

    if isinstance(source, Image.Image):
        return source.convert("RGB")
    file = source if isinstance(source, Path) else io.BytesIO(_content(source, row))
    try:
        width, height = read_size(file)
        if width * height > max_pixels:
            raise UserError(f"{width} x {height} pixels are more than data.max_pixels ({max_pixels}) of the training")
        return read_image(file)
    except UserError as error:
        raise UserError(f"row {row}: {error}") from error


def _content(source: Any, row: int) -> bytes:
    """The bytes of an image's file."""
    if isinstance(source, (bytes, bytearray)):
        return bytes(source)
    if isinstance(source, str):
        text = source.partition(",")[2] if source.startswith("data:") else source
        try:
            return base64.b64decode("".join(text.split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise UserError(
                f"row {row}: image is a text that is no base64: {source[:40]!r}. Expected the content of an image file:"
                " bytes, or text in base64; for a file of this machine pathlib.Path(...)."
            ) from error
    raise UserError(f"row {row}: image is {type(source).__name__}; expected bytes, text in base64, or pathlib.Path")


def png(image: Image) -> bytes:
    """An image as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
