"""Small copies of images as data URIs, so that a page needs no other file."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image

from visual_grpo.images import read_image


def data_uri(path: Path, side: int, quality: int = 80) -> str:
    """The image as WebP of at most ``side`` pixels a side; raises UserError if it cannot be read."""
    return pil_data_uri(read_image(path), side, quality)


def pil_data_uri(image: Image.Image, side: int, quality: int = 80) -> str:
    small = image.convert("RGB")
    small.thumbnail((side, side))
    file = io.BytesIO()
    small.save(file, "WEBP", quality=quality, method=4)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
