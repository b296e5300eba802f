"""The vocabulary of shapes, their pictures on a dark background, and edits of them.

Lengths are shares of an image's shorter side, centres are shares of (width, height), colours are 8-bit RGB. The centres
and radii keep every shape inside the image; with three centres per axis, neighbouring positions are a quarter of the
side apart.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from visual_grpo.config import Task

BACKGROUND = (30, 30, 30)
COLORS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 230),
    "yellow": (230, 210, 40),
    "purple": (180, 60, 200),
}
AREAS: Mapping[str, float] = {"circle": math.pi, "square": 4.0, "triangle": 2.0}
"""Areas of the shapes with radius 1."""
SHAPES = tuple(AREAS)
CENTERS: Mapping[str, tuple[float, float]] = {
    "left": (0.25, 0.5),
    "right": (0.75, 0.5),
    "top": (0.5, 0.25),
    "bottom": (0.5, 0.75),
    "center": (0.5, 0.5),
}
RADII: Mapping[str, float] = {"small": 0.16, "large": 0.228}
VOCABULARY: Mapping[str, tuple[str, ...]] = {
    "color": tuple(COLORS),
    "shape": SHAPES,
    "position": tuple(CENTERS),
    "size": tuple(RADII),
}
"""The words of every attribute."""
ATTRIBUTES = tuple(VOCABULARY)

OPPOSITE: Mapping[str, str] = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}
"""Two objects in one image are at opposite positions, so that each has its own half and its own image tokens."""
CHANGES: Mapping[str, str] = {"recolour": "color", "move": "position", "resize": "size"}
"""Edits of one attribute of an image's only object."""
EDITS = (*CHANGES, "add", "remove")
"""The kinds of edits; an image-to-image record names one in ``metadata["edit"]``."""

_PLACES = {
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
    "center": "in the center",
}


@dataclass(frozen=True, kw_only=True)
class Combination:
    """An object: one value of every attribute."""

    color: str
    shape: str
    position: str
    size: str

    @property
    def prompt(self) -> str:
        return f"a {self.size} {self.color} {self.shape} {_PLACES[self.position]}"


COMBINATIONS = tuple(
    Combination(color=c, shape=s, position=p, size=z) for c, s, p, z in product(COLORS, SHAPES, CENTERS, RADII)
)
"""All 150 of them, in a fixed order."""


CENTER_JITTER = 0.012
"""Largest shift of a centre along each axis, as a share of the shorter side."""
SCALE_JITTER = (0.97, 1.03)
_SUPERSAMPLING = 4


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """The deviation of an object from its nominal position and size."""

    dx: float
    """Share of the shorter side."""
    dy: float
    """Share of the shorter side."""
    scale: float
    """Factor on the radius."""

    @classmethod
    def draw(cls, rng: random.Random) -> Jitter:
        dx, dy = (rng.uniform(-CENTER_JITTER, CENTER_JITTER) for _ in range(2))
        return cls(dx=dx, dy=dy, scale=rng.uniform(*SCALE_JITTER))


Shape = tuple[tuple[int, int, int], str, tuple[float, float], float, Jitter]
"""Colour, name, centre and radius, and the deviation from these."""


def draw(combination: Combination, height: int, width: int, rng: random.Random) -> Image.Image:
    """Renders an anti-aliased RGB image of ``height`` x ``width`` pixels."""
    return draw_scene([(combination, Jitter.draw(rng))], height, width)


def draw_scene(objects: Iterable[tuple[Combination, Jitter]], height: int, width: int) -> Image.Image:
    """Like `draw`, with any number of objects, each with its jitter."""
    shapes = (
        (COLORS[thing.color], thing.shape, CENTERS[thing.position], RADII[thing.size], jitter)
        for thing, jitter in objects
    )
    return draw_shapes(shapes, height, width)


def draw_shapes(shapes: Iterable[Shape], height: int, width: int) -> Image.Image:
    """Renders shapes of any centre and radius."""
    canvas = Image.new("RGB", (width * _SUPERSAMPLING, height * _SUPERSAMPLING), BACKGROUND)
    brush, short = ImageDraw.Draw(canvas), min(canvas.size)
    for color, shape, center, radius, jitter in shapes:
        x, y = center[0] * canvas.width + jitter.dx * short, center[1] * canvas.height + jitter.dy * short
        reach = radius * jitter.scale * short
        left, top, right, bottom = x - reach, y - reach, x + reach, y + reach
        if shape == "circle":
            brush.ellipse((left, top, right, bottom), fill=color)
        elif shape == "square":
            brush.rectangle((left, top, right, bottom), fill=color)
        else:
            brush.polygon([(x, top), (left, bottom), (right, bottom)], fill=color)
    return canvas.reduce(_SUPERSAMPLING)


def draw_all(images_per_combination: int, height: int, width: int, seed: int) -> Tensor:
    """uint8 [combinations, images_per_combination, 3, height, width]; row i shows ``COMBINATIONS[i]``."""
    rng = random.Random(seed)
    images = [
        draw(combination, height, width, rng) for combination in COMBINATIONS for _ in range(images_per_combination)
    ]
    return stacked(images).unflatten(0, (len(COMBINATIONS), images_per_combination))


def stacked(images: Sequence[Image.Image]) -> Tensor:
    """Stacks images of the same size to uint8 [N, 3, height, width]."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2).contiguous()


_BESIDE_ANOTHER = 0.5
"""Probability that there is a second object when one is added or removed, if its position allows it."""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """An edit that turns an object from ``before`` into ``after``."""

    kind: str
    """One of `EDITS`."""
    before: Combination | None
    """None if the edit adds the object."""
    after: Combination | None
    """None if the edit removes the object."""
    other: Combination | None = None
    """A second, unchanged object at the opposite position."""

    @property
    def subject(self) -> Combination:
        """The edited object as in the target; a removed object as in the source."""
        subject = self.after or self.before
        assert subject is not None
        return subject

    @property
    def instruction(self) -> str:
        if self.kind == "add":
            return f"add {self.subject.prompt}"
        if self.kind == "remove":
            return f"remove the {self.subject.shape}"
        if self.kind == "move":
            return f"move it to the {self.subject.position}"
        return f"make it {getattr(self.subject, CHANGES[self.kind])}"

    @property
    def group(self) -> str:
        """Description of the source and the instruction: pictures of the same edit must go to the same split."""
        shown = " and ".join(thing.prompt for thing in (self.before, self.other) if thing is not None)
        return f"{shown or 'nothing'}: {self.instruction}"

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that the reward ``shapes`` reads."""
        other = None if self.other is None else asdict(self.other)
        return {**asdict(self.subject), "edit": self.kind, "other": other}


def random_edit(kind: str, subject: Combination, rng: random.Random) -> Edit:
    """A random edit of ``subject`` of the given kind, for additions and removals possibly with a second object."""
    if kind in CHANGES:
        attribute = CHANGES[kind]
        words = [word for word in VOCABULARY[attribute] if word != getattr(subject, attribute)]
        return Edit(kind=kind, before=subject, after=replace(subject, **{attribute: rng.choice(words)}))
    other = None
    if subject.position in OPPOSITE and rng.random() < _BESIDE_ANOTHER:
        # "Remove the circle" must be unambiguous.
        others = [thing for thing in COMBINATIONS if kind == "add" or thing.shape != subject.shape]
        other = replace(rng.choice(others), position=OPPOSITE[subject.position])
    added = kind == "add"
    return Edit(kind=kind, before=None if added else subject, after=subject if added else None, other=other)


def draw_edit(edit: Edit, height: int, width: int, rng: random.Random) -> tuple[Image.Image, Image.Image]:
    subject_jitter, other_jitter = Jitter.draw(rng), Jitter.draw(rng)

    def scene(subject: Combination | None) -> Image.Image:
        objects = [(subject, subject_jitter), (edit.other, other_jitter)]
        return draw_scene([(thing, jitter) for thing, jitter in objects if thing is not None], height, width)

    return scene(edit.before), scene(edit.after)


def texts(task: Task) -> list[str]:
    """All prompts in a fixed order and, for tasks with edits, instructions: what the small models' tokenizers know."""
    prompts = [combination.prompt for combination in COMBINATIONS]
    return prompts if task == "t2i" else prompts + instructions()


def instructions() -> list[str]:
    """All distinct instructions in a fixed order."""
    subjects = list(COMBINATIONS)
    changes = [Edit(kind=kind, before=thing, after=thing) for kind in CHANGES for thing in subjects]
    added = [Edit(kind="add", before=None, after=thing) for thing in subjects]
    removed = [Edit(kind="remove", before=thing, after=None) for thing in subjects]
    return list(dict.fromkeys(edit.instruction for edit in (*changes, *added, *removed)))
