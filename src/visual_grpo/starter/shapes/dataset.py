"""Writes the rendered shapes as a dataset: prompts with target images, edits with source and target images, or both."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visual_grpo.config import Task
from visual_grpo.starter.pretraining import write_dataset
from visual_grpo.starter.shapes.render import (
    ATTRIBUTES,
    BACKGROUND,
    CHANGES,
    COMBINATIONS,
    EDITS,
    Combination,
    Edit,
    draw,
    draw_edit,
    random_edit,
)

_VERSION = 1
"""Raise it when the same configuration renders different pictures."""
_TARGETS, _SOURCES = "target_images", "source_images"


def draw_dataset(folder: Path, records_per_prompt: int, height: int, width: int, seed: int, task: Task = "t2i") -> str:
    """Writes ``records.jsonl``, ``target_images/`` and, for edits, ``source_images/`` as `write_dataset` does.

    Every combination occurs ``records_per_prompt`` times in each kind of record that ``task`` includes, each time with
    a different jitter.
    """

    def records(fresh: Path) -> Iterator[dict[str, Any]]:
        if task != "i2i":
            for record in _prompts(fresh, records_per_prompt, height, width, random.Random(seed)):
                # The key tells the reward that the record shares batches with edits.
                yield record | {"metadata": record["metadata"] | ({"edit": None} if task == "mixed" else {})}
        if task != "t2i":
            yield from _edits(fresh, records_per_prompt, height, width, random.Random(seed))

    recipe = {"records_per_prompt": records_per_prompt, "height": height, "width": width, "task": task, "seed": seed}
    subfolders = (_TARGETS,) if task == "t2i" else (_TARGETS, _SOURCES)
    return write_dataset(folder, {"shapes": _VERSION, **recipe}, subfolders, records)


def _prompts(folder: Path, rounds: int, height: int, width: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    for number, combination in enumerate(COMBINATIONS * rounds):
        name = f"shape_{number:05d}"
        target = f"{_TARGETS}/{name}.png"
        draw(combination, height, width, rng).save(folder / target)
        yield {"id": name, "prompt": combination.prompt, "target_image": target, "metadata": asdict(combination)}


def _edits(folder: Path, rounds: int, height: int, width: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    for number, combination in enumerate(COMBINATIONS * rounds):
        kind = EDITS[(number + number // len(COMBINATIONS)) % len(EDITS)]  # a different kind in every round
        edit = random_edit(kind, combination, rng)
        name = f"edit_{number:05d}"
        source, target = f"{_SOURCES}/{name}.png", f"{_TARGETS}/{name}.png"
        for picture, path in zip(draw_edit(edit, height, width, rng), (source, target), strict=True):
            picture.save(folder / path)
        yield {
            "id": name,
            "prompt": edit.instruction,
            "source_image": source,
            "target_image": target,
            "group": edit.group,
            "metadata": edit.metadata,
        }


Misreadings = Mapping[str, Mapping[str, tuple[str, float]]]
"""Attribute -> word -> (what is rendered instead, how often)."""
MISREADINGS: Misreadings = {
    "color": {"yellow": ("red", 0.55), "purple": ("blue", 0.55)},
    "shape": {"triangle": ("square", 0.5)},
    "position": {"top": ("bottom", 0.55)},
    "size": {"small": ("large", 0.5)},
}


def misread(asked: Combination, rng: random.Random, misreadings: Misreadings = MISREADINGS) -> Combination:
    drawn = {}
    for attribute in ATTRIBUTES:
        word = getattr(asked, attribute)
        instead, share = misreadings[attribute].get(word, (word, 0.0))
        drawn[attribute] = instead if rng.random() < share else word
    return Combination(**drawn)


_NOT_DONE: Mapping[str, float] = {"recolour": 0.33, "move": 0.33, "resize": 0.33, "remove": 0.45}
"""Probability that an edit returns a copy of its source; additions are misread instead."""
_RESIZED_BY_MOVING = 0.4
_CENTERED_BY_RESIZING = 0.45
_WRONG_ONE_REMOVED = 0.3


def misread_edit(
    edit: Edit, rng: random.Random, misreadings: Misreadings = MISREADINGS
) -> tuple[Combination | None, Combination | None]:
    """The edited object and the other one as the flawed policy renders them; None = absent."""
    if edit.kind == "add":
        assert edit.after is not None
        drawn = misread(edit.after, rng, misreadings)
        # With a second object, only one position is left.
        return drawn if edit.other is None else replace(drawn, position=edit.after.position), edit.other
    if rng.random() < _NOT_DONE[edit.kind]:
        return edit.before, edit.other
    if edit.kind == "remove":
        wrong = edit.other is not None and rng.random() < _WRONG_ONE_REMOVED
        return (edit.before, None) if wrong else (None, edit.other)
    assert edit.after is not None
    return _misread_change(edit.kind, edit.after, rng, misreadings), None


def _misread_change(kind: str, asked: Combination, rng: random.Random, misreadings: Misreadings) -> Combination:
    """Misreads the changed attribute as in a prompt (except sizes), and sometimes changes a second attribute too."""
    attribute = CHANGES[kind]
    drawn = asked
    if kind != "resize":
        drawn = replace(asked, **{attribute: getattr(misread(asked, rng, misreadings), attribute)})
    if kind == "move" and rng.random() < _RESIZED_BY_MOVING:
        drawn = replace(drawn, size="large" if asked.size == "small" else "small")
    if kind == "resize" and rng.random() < _CENTERED_BY_RESIZING:
        drawn = replace(drawn, position="center")
    return drawn


_FADING = (0.15, 0.6)
"""Range of the uniformly distributed share of the background in an object's colour."""


def fade(images: Tensor, seed: int) -> Tensor:
    """Mixes each picture of uint8 [N, 3, H, W] with the background by a random share; same shape and dtype."""
    low, high = _FADING
    generator = torch.Generator().manual_seed(seed)
    shares = low + (high - low) * torch.rand(len(images), 1, 1, 1, generator=generator)
    background = torch.tensor(BACKGROUND, dtype=torch.float32).view(3, 1, 1)
    faded = [
        (background + (1 - share) * (image.float() - background)).round().to(torch.uint8)
        for image, share in zip(images, shares, strict=True)
    ]
    return torch.stack(faded)
