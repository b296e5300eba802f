"""Reads images of every Pillow mode, resizes them and masks, and converts between Pillow and tensors.

A sample image is a uint8 tensor [3, height, width] in RGB order.
"""

from __future__ import annotations

import base64
import io
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageCms, ImageOps, UnidentifiedImageError
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.machine_errors import is_machine_error

UINT16_MAX = 65535
LUMA = (0.299, 0.587, 0.114)
"""Weights of R, G and B (ITU-R BT.601)."""
_DAMAGE = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError),
    *(struct.error, zlib.error),
)
"""Exceptions that Pillow's decoders raise on damaged files."""
_TILE = (322, 323)
"""Tags of TIFF: width and height of a tile."""
HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")
"""Brands of ISO media that say HEIC, the last two AVIF as well; at bytes 8 to 11."""
_JPEG_XL = (b"\xff\n", b"\0\0\0\x0cJXL ")
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA")
_RUN_PROGRAMS = ("EPS", "WMF")
"""Formats that are programs themselves: Pillow hands them to Ghostscript or Windows."""


class ImageError(UserError):
    """A file that cannot be read as an image; the message says why."""


class TooManyPixelsError(ImageError):
    """An image that would take too much memory."""


def read_image(file: str | Path | IO[bytes]) -> Image.Image:
    """Reads an image upright (EXIF orientation applied) as RGB in sRGB; the first frame of an animation.

    Raises:
        ImageError: missing, empty, cut off, damaged, too large, or not an image at all.
    """
    with opened(file) as image:
        image.load()
        return _to_srgb(upright(image))


def read_size(file: str | Path | IO[bytes]) -> tuple[int, int]:
    """Width and height of the upright image in pixels; reads only the file's header."""
    with opened(file) as image:
        # EXIF orientations 5 to 8 swap width and height. Pillow itself turns a TIFF's size.
        turned = image.format != "TIFF" and _orientation(image) >= 5
        return (image.height, image.width) if turned else (image.width, image.height)


def read_orientation(file: str | Path | IO[bytes]) -> int:
    """The EXIF orientation, 1 to 8; 1 (upright) if there is none."""
    with opened(file) as image:
        return _orientation(image)


@contextmanager
def pixel_limit(most: int) -> Iterator[None]:
    """Lets Pillow accept images of up to ``most`` pixels, if that is more than its own limit."""
    before = Image.MAX_IMAGE_PIXELS
    if before is not None:
        Image.MAX_IMAGE_PIXELS = max(before, -(-most // 2))  # Pillow refuses twice this.
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def is_intact_png(path: Path) -> bool:
    """True if the file exists and all of its PNG checksums are correct."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            image.verify()
    except (*_DAMAGE, Image.DecompressionBombError):
        return False
    return True


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts any Pillow mode to RGB: transparent pixels are blended with white, deep ones scaled to 8 bits."""
    if image.mode.startswith("I") or image.mode == "F":
        return _scale_to_bytes(image).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_srgb(image: Image.Image) -> Image.Image:
    """Converts to RGB, and colours with an ICC profile to sRGB; the result has no profile, which a file would keep."""
    rgb, profile = to_rgb(image), image.info.get("icc_profile")
    if profile:
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            # A profile is of the stored colours; blending, scaling and palettes change only RGB colours.
            colours = {"RGB": rgb, "GRAY": image, "CMYK": image}.get(source.profile.xcolor_space.strip())
            if colours is not None and "srgb" not in ImageCms.getProfileDescription(source).lower():
                rgb = (
                    ImageCms.profileToProfile(colours, source, ImageCms.createProfile("sRGB"), outputMode="RGB") or rgb
                )
        except (ImageCms.PyCMSError, *_DAMAGE):
            pass  # Viewers show a picture with a damaged profile, or one of other colours, without it.
    rgb.info.pop("icc_profile", None)
    return rgb


def fit(image: Image.Image, height: int, width: int) -> Image.Image:
    """Scales an image (Lanczos) so that it just covers height x width pixels, then crops the centre."""
    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)


_CELL = 32
"""Sides of an image that keeps its shape are multiples of it, like the sides of every prepared image."""


def scale_to_area(image: Image.Image, height: int, width: int) -> Image.Image:
    """Scales an image (Lanczos) to about as many pixels as height x width, in about its own shape."""
    scale = math.sqrt(height * width / (image.height * image.width)) / _CELL
    sides = [max(1, round(side * scale)) * _CELL for side in (image.height, image.width)]
    return stretch(image, *sides)


def stretch(image: Image.Image, height: int, width: int) -> Image.Image:
    """Scales an image (Lanczos) to height x width pixels without cropping; the aspect ratio may change."""
    return image.resize((width, height), Image.Resampling.LANCZOS)


def stretch_mask(mask: Image.Image, height: int, width: int) -> Image.Image:
    """Like `stretch`, with nearest-neighbour sampling, which creates no new values."""
    return mask.resize((width, height), Image.Resampling.NEAREST)


def to_tensor(image: Image.Image) -> Tensor:
    """A Pillow image as a uint8 tensor [3, height, width], RGB."""
    return torch.from_numpy(np.array(to_rgb(image))).permute(2, 0, 1).contiguous()


def to_pil(tensor: Tensor) -> Image.Image:
    """A uint8 tensor [3, height, width] as a Pillow image; raises ValueError for any other shape or dtype."""
    require_image(tensor)
    return Image.fromarray(tensor.detach().cpu().permute(1, 2, 0).contiguous().numpy())


def to_png(image: Image.Image, compress_level: int = 6) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=compress_level)
    return file.getvalue()


def to_base64(image: Image.Image, file_format: str, longest_side: int | None = None) -> str:
    """An RGB image as a PNG or JPEG file in base64, scaled down (Lanczos) to at most ``longest_side`` pixels."""
    if longest_side is not None and max(image.size) > longest_side:
        scale = longest_side / max(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        image = stretch(image, height, width)
    if file_format == "png":
        return base64.b64encode(to_png(image, compress_level=1)).decode("ascii")
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=95, subsampling=0)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def is_image(sample: object) -> bool:
    """True for a uint8 tensor [3, height, width]."""
    return isinstance(sample, torch.Tensor) and sample.dtype == torch.uint8 and sample.ndim == 3 and len(sample) == 3


def require_image(sample: object) -> None:
    """Raises ValueError unless ``sample`` is a uint8 tensor [3, height, width]."""
    if not is_image(sample):
        raise ValueError(f"expected a uint8 tensor [3, height, width], got {described(sample)}")


def described(value: object) -> str:
    """Dtype and shape of a tensor, the type's name of anything else, for error messages."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


@contextmanager
def opened(file: str | Path | IO[bytes]) -> Iterator[Image.Image]:
    """Opens an image; an exception that Pillow raises, here or in the body, becomes an `ImageError`, unless it is the
    machine's (`is_machine_error`)."""
    try:
        with Image.open(file, formats=[*_FORMATS, *_RUN_PROGRAMS]) as image:
            if image.format in _RUN_PROGRAMS:
                raise ImageError(
                    f"{name_of(file)}: is {image.format}, which only an external program can render; use PNG"
                )
            tile = math.prod(getattr(image, "tag_v2", {}).get(side, 1) for side in _TILE)
            if tile > 4 * max(image.width * image.height, 2**20):  # A tile is decoded whole.
                raise ImageError(f"{name_of(file)}: its tiles are much larger than the image; use PNG")
            yield image
    except Image.DecompressionBombError as error:
        text = str(error).partition(", could")[0]
        raise TooManyPixelsError(f"{name_of(file)}: too many pixels to be decoded safely ({text})") from error
    except (MemoryError, *_DAMAGE) as error:
        if is_machine_error(error):
            error.add_note(f"While {name_of(file)} was read.")
            raise
        # Pillow names the file, or the address of one in memory.
        reason = _why_unidentified(file) if isinstance(error, UnidentifiedImageError) else error
        raise ImageError(f"{name_of(file)}: cannot be read as an image ({reason})") from error


def _why_unidentified(file: str | Path | IO[bytes]) -> str:
    """Judges by the content: phones and chats give names such as IMG_1.JPG to HEIC."""
    with Path(file).open("rb") if isinstance(file, str | Path) else nullcontext(file) as content:
        content.seek(0)
        head = content.read(32)
    is_heic = head[4:8] == b"ftyp" and head[8:12] in HEIC and b"avif" not in head
    if is_heic or head.startswith(_JPEG_XL):
        return "HEIC and JPEG XL are not supported; convert it to PNG or JPEG"
    return "empty, damaged or in an unknown format"


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 (upright) if EXIF data are absent or cannot be parsed."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except (SyntaxError, ValueError, TypeError, KeyError, OSError, struct.error):
        return 1
    return value if value in range(1, 9) else 1


def upright(image: Image.Image) -> Image.Image:
    return image if _orientation(image) == 1 else ImageOps.exif_transpose(image)


def _scale_to_bytes(image: Image.Image) -> Image.Image:
    """Converts a single-channel integer or float image to mode L.

    I;16 spans 0..65535. Wider modes do not define a range: the smallest of 0..1 (floats), 0..255 and 0..65535
    (integers) that has all values, else that from their minimum to their maximum. What a resampling of 0..1 adds to
    edges is cut off: up to a tenth beyond either end.
    """
    with np.errstate(invalid="ignore"):  # A float that is not a number is refused here, not by the conversion.
        values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("it has pixels that are not finite numbers")
    low, high = float(values.min()), float(values.max())
    if image.mode == "F" and low >= -0.1 and 0.9 < high <= 1.1:
        values, low, high = values.clip(0, 1), max(low, 0.0), min(high, 1.0)
    whites = (UINT16_MAX,) if image.mode.startswith("I;16") else (1, 255) if image.mode == "F" else (255, UINT16_MAX)
    white = next((white for white in whites if low >= 0 and high <= white), None)
    if white is not None:
        low, high = 0.0, white
    elif low == high:
        high = low + 1
    scaled = (values - low) * (255 / (high - low))
    return Image.fromarray(np.rint(scaled).astype(np.uint8))


def name_of(file: str | Path | IO[bytes]) -> str:
    return str(file) if isinstance(file, str | Path) else str(getattr(file, "name", "image"))
