"""Edits of two rendered sources: the shape of one in the colour of the other; the prompt says which."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from visual_grpo.config import Task
from visual_grpo.starter.pretraining import write_dataset
from visual_grpo.starter.shapes.render import COLORS, COMBINATIONS, Combination, Jitter, draw_scene

PROMPTS = ("draw the first shape in the other colour", "draw the second shape in the other colour")
"""By the place of the source whose shape is rendered."""
_TARGETS, _SOURCES = "target_images", "source_images"


@dataclass(frozen=True, kw_only=True)
class TwoSourceEdit:
    """Two sources of different colours and the place, 0 or 1, of the one whose shape is asked for."""

    sources: tuple[Combination, Combination]
    place: int

    @classmethod
    def draw(cls, shape: Combination, place: int, rng: random.Random) -> TwoSourceEdit:
        """Puts ``shape`` at ``place``, next to a random object of a different colour."""
        other = replace(rng.choice(COMBINATIONS), color=rng.choice([name for name in COLORS if name != shape.color]))
        return cls(sources=(other, shape) if place else (shape, other), place=place)

    @property
    def target(self) -> Combination:
        return replace(self.sources[self.place], color=self.sources[1 - self.place].color)

    @property
    def group(self) -> str:
        """Drawings of the same pair must go to the same split."""
        return f"{self.sources[0].prompt} and {self.sources[1].prompt}: {PROMPTS[self.place]}"

    def pictures(self, height: int, width: int, rng: random.Random) -> list[Image.Image]:
        """Renders both sources and the target, which has its shape's jitter."""
        jitters = Jitter.draw(rng), Jitter.draw(rng)
        shown = [*zip(self.sources, jitters, strict=True), (self.target, jitters[self.place])]
        return [draw_scene([thing], height, width) for thing in shown]


def draw_dataset(folder: Path, records_per_prompt: int, height: int, width: int, seed: int, task: Task = "i2i") -> str:
    """Writes ``records.jsonl`` and pictures as `write_dataset` does.

    Every combination is the shape that is asked for ``records_per_prompt`` times, each time next to a different object.
    """

    def records(fresh: Path) -> Iterator[dict[str, Any]]:
        rng = random.Random(seed)
        for number, shape in enumerate(COMBINATIONS * records_per_prompt):
            pair = TwoSourceEdit.draw(shape, rng.randrange(2), rng)
            name = f"pair_{number:05d}"
            paths = [f"{_SOURCES}/{name}_1.png", f"{_SOURCES}/{name}_2.png", f"{_TARGETS}/{name}.png"]
            for picture, path in zip(pair.pictures(height, width, rng), paths, strict=True):
                picture.save(fresh / path)
            yield {
                "id": name,
                "prompt": PROMPTS[pair.place],
                "source_image": paths[:2],
                "target_image": paths[2],
                "group": pair.group,
                "metadata": asdict(pair.target),
            }

    recipe = {"records_per_prompt": records_per_prompt, "height": height, "width": width, "seed": seed}
    return write_dataset(folder, recipe, (_TARGETS, _SOURCES), records)
