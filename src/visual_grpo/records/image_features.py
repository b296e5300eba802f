"""Statistics of an image's pixels, by which the images of two datasets are compared."""

from __future__ import annotations

from pathlib import Path

from visual_grpo.images import read_image

LONGEST_SIDE = 256
"""Pixels; larger images are reduced to at most this by averaging blocks of pixels."""

_LUMA = (0.299, 0.587, 0.114)
"""Weights of R, G and B in the brightness of a pixel (ITU-R BT.601)."""


def image_features(path: Path) -> dict[str, float]:
    """Brightness, contrast, colourfulness and sharpness of an image; each is 0 or more, of values from 0 to 1.

    Raises:
        ImageError: the file cannot be read as an image.
    """
    import numpy as np
    from scipy import ndimage

    image = read_image(path)
    image = image.reduce(-(-max(image.size) // LONGEST_SIDE))
    rgb = np.asarray(image, dtype=np.float64) / 255
    luma = rgb @ np.array(_LUMA)
    return {
        "brightness": float(luma.mean()),
        "contrast": float(luma.std()),
        "colourfulness": _colourfulness(rgb),
        "sharpness": float(ndimage.laplace(luma).std()),
    }


def _colourfulness(rgb: object) -> float:
    """Of pixels [height, width, 3] in 0..1; Hasler and Suesstrunk, Measuring colourfulness in natural images (2003)."""
    import numpy as np

    red, green, blue = np.moveaxis(np.asarray(rgb), -1, 0)
    opponents = (red - green, (red + green) / 2 - blue)
    spread = np.hypot(*(axis.std() for axis in opponents))
    return float(spread + 0.3 * np.hypot(*(axis.mean() for axis in opponents)))
