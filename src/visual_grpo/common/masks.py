"""Reads masks as people store them: two-valued, with soft edges, cut out by transparency, or as numbers of classes.

A mask is a bool tensor [height, width].
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import maximum_filter, minimum_filter
from torch import Tensor

from visual_grpo.common.images import UINT16_MAX, ImageError, name_of, opened, to_rgb, upright

_VOID = 255
"""The number of the border that Pascal VOC and its followers leave undecided."""
_OPAQUE = 128
"""The least alpha of an object that is cut out."""
_FEW = 32
"""The most values of a mask that are looked at one by one."""
_SHOWN = 8
"""Values in a message."""


class AmbiguousMaskError(ImageError):
    """A mask of several classes or objects, of which none is chosen."""


class Mask(NamedTuple):
    """A mask, and what its values were taken for where that is not its brightness."""

    image: Image.Image
    """Mode L: 0, or 255 in the object."""
    remark: str = ""
    label: int | None = None
    """The number that the object is stored as, if it is read by that."""


def read_mask(file: str | Path | IO[bytes]) -> Tensor:
    """Reads a mask: bool tensor [height, width], True = the object as defined by `read_mask_image`."""
    return torch.from_numpy(np.array(read_mask_image(file).image) > 0)


def read_mask_image(file: str | Path | IO[bytes], value: int | None = None) -> Mask:
    """Reads a mask of any Pillow mode upright. The first of these that applies is the object:

    1. the pixels stored as ``value``, if it is given (in a palette, the index);
    2. the opaque pixels, if the alpha channel is not constant (a cut-out object);
    3. in a coloured palette whose number 0 is black: the only number besides 0 and 255, an ignored border;
    4. of the values 0, 1 and 255: pixels of 1, with an ignored border of 255;
    5. the pixels whose brightest channel exceeds half of the range, the smallest of 0..1, 0..255 and 0..65535 that has
       all values, unless there are none or they are of several objects (`_shows_several`; 0..1 are probabilities).

    Raises:
        AmbiguousMaskError: several classes or objects, or no pixel of ``value``; the message lists the values.
        ImageError: as for `read_image`, and for values outside all of the ranges.
    """
    with opened(file) as image:
        image.load()
        lossy = image.format == "JPEG"
        image = upright(image)
        stored = np.asarray(image)
        try:
            return _recognised(image, stored, lossy) if value is None else _chosen(stored, value)
        except ImageError as error:
            found = f"; the mask has {_listed(stored)}" if isinstance(error, AmbiguousMaskError) else ""
            raise type(error)(f"{name_of(file)}: {error}{found}") from None


def _chosen(stored: np.ndarray, value: int) -> Mask:
    if stored.ndim > 2:
        raise AmbiguousMaskError(f"mask_value={value} needs a mask of one channel")
    if not (stored == value).any():
        raise AmbiguousMaskError(f"no pixel has mask_value={value}")
    return Mask(_image(stored == value), label=value)


def _recognised(image: Image.Image, stored: np.ndarray, lossy: bool) -> Mask:
    """Reads a mask by the rules 2 to 5 of `read_mask_image`."""
    if image.has_transparency_data:
        alpha = np.asarray(image.convert("RGBA").getchannel("A"))
        if alpha.min() < alpha.max():
            if alpha.max() < _OPAQUE:
                raise ImageError(f"its alpha is {alpha.max()} at most, and an object's is {_OPAQUE} or more")
            return Mask(_image(alpha >= _OPAQUE))
    several = AmbiguousMaskError("nothing says which value is the object")
    if (labels := _palette_labels(image, stored)) is not None:
        if len(labels) != 1:
            raise several
        beside = f", and {_VOID} as an ignored border" if (stored == _VOID).any() else ""
        remark = f"with one class number in a palette: it is taken as the object{beside}"
        return Mask(_image(stored == labels[0]), remark, labels[0])
    pixels = _brightness(image)
    found = _values(pixels)
    white = next((bound for bound in (1, _VOID, UINT16_MAX) if found[0] >= 0 and found[-1] <= bound), None)
    if white is None:
        value_range = f"{found[0]} to {found[-1]}"
        raise ImageError(f"a mask's values must lie within 0..1, 0..255 or 0..65535, got {value_range}")
    border = not lossy and {1, _VOID} <= {*found[:4]} <= {0, 1, _VOID} and pixels.ndim == 2
    if border and (_areas(pixels) & (pixels == 1)).any():
        remark = (
            f"with the values 0, 1 and {_VOID}: 1 is taken as the object, and {_VOID} as an ignored border"
            " (data.mask_value=1 takes 1 in all masks)"
        )
        return Mask(_image(pixels == 1), remark, 1)
    bright = (pixels if pixels.ndim == 2 else pixels.max(2)) > white / 2
    if (found.any() and not bright.any()) or (white > 1 and _shows_several(pixels, white, lossy)):
        raise several
    return Mask(_image(bright))


def _palette_labels(image: Image.Image, stored: np.ndarray) -> list[int] | None:
    """Returns the class numbers in a coloured palette whose number 0 is black, without 0 and the ignored border."""
    if image.mode != "P":
        return None
    colours = np.zeros((256, 3), np.uint8)
    palette = np.array(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
    colours[: len(palette)] = palette
    used = _values(stored)
    if colours[0].any() or not np.ptp(colours[used], axis=1).any():
        return None
    return [int(label) for label in used if label not in (0, _VOID)]


def _brightness(image: Image.Image) -> np.ndarray:
    """[height, width], or [height, width, 3] if there are colours."""
    if image.mode in ("1", "L", "F") or image.mode.startswith("I"):
        return np.asarray(image.convert("L") if image.mode == "1" else image)
    pixels = np.asarray(to_rgb(image.convert("RGBA").convert("RGB") if image.has_transparency_data else image))
    return pixels.astype(np.int64) if np.ptp(pixels, axis=2).any() else pixels[:, :, 0]


def _shows_several(pixels: np.ndarray, white: float, lossy: bool) -> bool:
    """True for the values of several classes or objects instead of the soft edge of one, or of JPEG's noise around it.

    Classes and objects fill areas, of 3 x 3 pixels of one value at least; edges and noise do not. An edge also has
    values in the middle half of the range, and noise has some just below white. So there are several if

    - of at most 32 values, not from JPEG, two but 0 fill areas (all from 7/8 of the range are white), or two or more
      are those of neither edge nor noise;
    - with more values, a fiftieth of the areas but the dark ones differ in colour from the most common.
    """
    codes = (
        np.where(pixels >= white * 7 / 8, pixels.dtype.type(white), pixels)
        if pixels.ndim == 2
        else pixels @ (65536, 256, 1)
    )
    found = _values(codes)
    if np.count_nonzero(found) < 2:
        return False
    areas = _areas(codes)
    if len(found) <= _FEW and not lossy:
        edge = (white / 4 <= pixels) & (pixels <= white * 3 / 4) | (white * 7 / 8 <= pixels) & (pixels < white)
        return len(np.unique(codes[areas & (codes > 0)])) > 1 or not (pixels.ndim == 3 or edge.any())
    rough = np.rint(pixels[areas].reshape(-1, 1 if pixels.ndim == 2 else 3) * (8 / white))
    rough = rough[rough.any(1)]
    colours, counts = np.unique(rough, axis=0, return_counts=True)
    most = colours[counts.argmax()] if len(counts) else 0
    return bool(counts[(np.abs(colours - most) > 1).any(1)].sum() > counts.sum() / 50)


def _areas(values: np.ndarray) -> np.ndarray:
    """bool [height, width]: pixels whose eight neighbours have their value."""
    return minimum_filter(values, 3) == maximum_filter(values, 3)


def _values(pixels: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.bincount(pixels.ravel())) if pixels.dtype == np.uint8 else np.unique(pixels)


def _image(mask: np.ndarray) -> Image.Image:
    return Image.fromarray(mask.astype(np.uint8) * 255)


def _listed(stored: np.ndarray) -> str:
    """Returns the values found, such as ``the values 0, 5``."""
    if stored.ndim > 2:
        colours = np.unique(stored.reshape(-1, stored.shape[2]), axis=0)
        found = [f"({', '.join(map(str, colour))})" for colour in colours]
    else:
        found = [f"{value:g}" for value in _values(stored.astype(np.uint8) if stored.dtype == bool else stored)]
    more = f", ... ({len(found)} in all)" * (len(found) > _SHOWN)
    return f"the {'colours' if stored.ndim > 2 else 'values'} {', '.join(found[:_SHOWN])}{more}"
