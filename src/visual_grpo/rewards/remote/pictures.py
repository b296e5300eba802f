"""Images as text that JSON can hold."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Literal

from visual_grpo.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

Format = Literal["png", "jpeg"]
JPEG_QUALITY = 95


class Encoder:
    """Encodes images as base64 of PNG or JPEG files.

    Args:
        image_format: ``png`` (exact) or ``jpeg`` (quality 95, no colour subsampling): smaller and sooner encoded.
        image_size: pixels of the longer side, to which larger images are scaled down (Lanczos); None = as they are.
    """

    def __init__(self, image_format: str, image_size: int | None) -> None:
        if image_format not in ("png", "jpeg"):
            raise UserError(f"image_format must be png or jpeg, got {image_format!r}")
        if image_size is not None and (not isinstance(image_size, int) or image_size < 1):
            raise UserError(f"image_size must be a number of pixels of at least 1, or null, got {image_size!r}")
        self.image_format = image_format
        self.image_size = image_size

    def base64(self, image: Image) -> str:
        """Of an RGB image."""
        from PIL import Image

        if self.image_size is not None and max(image.size) > self.image_size:
            scale = self.image_size / max(image.size)
            width, height = (max(1, round(side * scale)) for side in image.size)
            image = image.resize((width, height), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        if self.image_format == "jpeg":
            image.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=0)
        else:
            image.save(buffer, "PNG", compress_level=1)
        return base64.b64encode(buffer.getvalue()).decode("ascii")

    def data_url(self, image: Image) -> str:
        """As an address that holds the image itself."""
        return f"data:image/{self.image_format};base64,{self.base64(image)}"
