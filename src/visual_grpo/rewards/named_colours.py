"""Which of the eleven basic colour names of English (Berlin and Kay 1969) fits a patch?"""

from __future__ import annotations

import torch
from torch import Tensor

COLOURS = {
    "black": [(0, 0, 0), (30, 30, 30)],
    "grey": [(80, 80, 80), (128, 128, 128), (190, 190, 190)],
    "white": [(255, 255, 255)],
    "red": [(220, 20, 30), (255, 0, 0), (130, 0, 15)],
    "orange": [(255, 140, 0), (240, 100, 20)],
    "yellow": [(250, 230, 40), (255, 255, 0)],
    "green": [(40, 160, 60), (0, 255, 0), (0, 90, 20), (150, 200, 120)],
    "blue": [(40, 80, 220), (0, 0, 255), (0, 0, 120), (135, 190, 235)],
    "purple": [(130, 40, 160), (75, 0, 110), (190, 150, 215)],
    "pink": [(255, 150, 190), (255, 60, 160)],
    "brown": [(120, 75, 40), (75, 45, 20), (165, 115, 70)],
}
"""Typical colours of each name, light and dark, sRGB."""
_TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
_WHITE = (0.95047, 1.0, 1.08883)
"""sRGB's white, D65."""


def colour_of(patch: Tensor) -> str:
    """The name of which a typical colour is nearest in CIELAB to the median of a uint8 patch [3, h, w]."""
    own = _lab(patch.flatten(1).double().median(1).values)
    return min(COLOURS, key=lambda name: min(_distance(own, typical) for typical in COLOURS[name]))


def _distance(lab: Tensor, rgb: tuple[int, int, int]) -> float:
    return float((lab - _lab(torch.tensor(rgb, dtype=torch.float64))).norm())


def _lab(rgb: Tensor) -> Tensor:
    """[3] in CIELAB (CIE 1976), of [3] sRGB in 0..255."""
    share = rgb / 255
    linear = torch.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    xyz = (torch.tensor(_TO_XYZ, dtype=torch.float64) * linear).sum(1) / torch.tensor(_WHITE, dtype=torch.float64)
    cut = 6 / 29
    root = torch.where(xyz > cut**3, xyz ** (1 / 3), xyz / (3 * cut**2) + 4 / 29)
    return torch.stack([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])
