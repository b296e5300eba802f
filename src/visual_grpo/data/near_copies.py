"""Finds held-out pictures that look like training pictures: the same photograph encoded, scaled or named anew.

A picture is told by its difference hash, 64 signs of the differences between neighbouring greys (N. Krawetz, "Kind of
Like That", hackerfactor.com, 2013, after D. Oftedal). Plain shapes share signs, so that greys and colours of a small
version are compared, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from PIL import Image

from visual_grpo.common.errors import counted

_DISTANCE = 8
"""Most of the 64 signs that may differ; the source calls 0 the same and up to 10 a variation."""
_GREY, _COLOUR = 12, 8
"""Most that a grey of the small version, and one of six mean colours, may differ, of 255. JPEG of quality 30 and more,
WebP of 50, and half the size change those of 120 crops of photographs by 4 at most, and 3% of brightness by 7; none of
7,021 pairs of different crops is alike."""
_CONTRAST = 24
"""Least range of the greys, of 255: a plain picture has signs of noise only."""
_WIDTH, _HEIGHT = 18, 16
"""Size of the small version, in pixels: twice that of the hash."""
_SHOWN = 5
"""Pairs in a note."""
_LOOK = np.dtype([("signs", "<u8"), ("colours", "u1", 18), ("greys", "u1", _HEIGHT * _WIDTH)])


def look_of(image: Image.Image) -> bytes | None:
    """Returns the 314 bytes that tell an RGB picture; None for a plain one."""
    small = image.resize((_WIDTH, _HEIGHT), Image.Resampling.BOX, reducing_gap=2.0)
    greys = np.asarray(small.convert("L"))
    if np.ptp(greys) < _CONTRAST:
        return None
    cells = greys.reshape(8, 2, 9, 2).sum((1, 3), dtype=int)
    colours = np.asarray(small, dtype=float).reshape(2, 8, 3, 6, 3).mean((1, 3)).astype(np.uint8)  # 2 rows, 3 columns.
    return np.packbits(cells[:, 1:] > cells[:, :-1]).tobytes() + colours.tobytes() + greys.tobytes()


class NearCopies:
    """Collects the pictures on both sides of the held-out split."""

    def __init__(self) -> None:
        self._sides: dict[bool, tuple[list[bytes], list[str]]] = {True: ([], []), False: ([], [])}

    def add(self, name: str, looks: Iterable[bytes], *, held_out: bool) -> None:
        """``name``: of the record, for the note."""
        for look in looks:
            self._sides[held_out][0].append(look)
            self._sides[held_out][1].append(name)

    def notes(self) -> list[str]:
        """Returns what to say of the held-out records that have a near copy on the other side; compares all pairs, a
        billion in about a second."""
        pairs = dict(self._pairs())
        if not pairs:
            return []
        shown = ", ".join(f"{name} and {other}" for name, other in islice(pairs.items(), _SHOWN))
        more = f", and {len(pairs) - _SHOWN} more" if len(pairs) > _SHOWN else ""
        count = (
            f"{counted(len(pairs), 'held-out record')} {'looks' if len(pairs) == 1 else 'look'} like one that trains"
        )
        return [f"{count} ({shown}{more}): results count what was seen, unless you give each such pair one group"]

    def _pairs(self) -> Iterator[tuple[str, str]]:
        (held_out, names), (train, others) = self._sides[True], self._sides[False]
        seen = np.frombuffer(b"".join(train), _LOOK)
        for name, own in zip(names, np.frombuffer(b"".join(held_out), _LOOK), strict=True):
            near = np.flatnonzero(np.bitwise_count(seen["signs"] ^ own["signs"]) <= _DISTANCE)
            for part, most in (("colours", _COLOUR), ("greys", _GREY)):
                near = near[(np.abs(seen[part][near].astype(int) - own[part]) <= most).all(1)]
            if len(near):
                yield name, others[near[0]]
