"""Renders videos of a shape that moves, grows or stays, and their dataset.

Centres are shares of a frame's width and height, radii of its shorter side.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from visual_grpo.common.types import VideoSample
from visual_grpo.common.videos import SUFFIX, encoded_video
from visual_grpo.config import Task
from visual_grpo.starter.pretraining import write_dataset
from visual_grpo.starter.shapes.render import COLORS, Jitter, draw_shapes, stacked

SHAPES = ("circle", "square")
"""Without the triangle, whose point a small VAE blurs."""
_FROM, _TO, _RADIUS = 0.28, 0.72, 0.2
MOTIONS: Mapping[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "moves to the right": ((_FROM, 0.5, _RADIUS), (_TO, 0.5, _RADIUS)),
    "moves to the left": ((_TO, 0.5, _RADIUS), (_FROM, 0.5, _RADIUS)),
    "moves up": ((0.5, _TO, _RADIUS), (0.5, _FROM, _RADIUS)),
    "moves down": ((0.5, _FROM, _RADIUS), (0.5, _TO, _RADIUS)),
    "grows": ((0.5, 0.5, 0.13), (0.5, 0.5, 0.34)),
    "stays": ((0.5, 0.5, _RADIUS), (0.5, 0.5, _RADIUS)),
}
"""Centre x, y and radius at the first frame and at the last; evenly between them."""
FRAMES, FPS = 5, 8.0
_TARGETS = "target_videos"


@dataclass(frozen=True, kw_only=True)
class Scene:
    color: str
    shape: str
    motion: str

    @property
    def prompt(self) -> str:
        return f"a {self.color} {self.shape} {self.motion}"


SCENES = tuple(Scene(color=c, shape=s, motion=m) for c, s, m in product(COLORS, SHAPES, MOTIONS))
"""All 60 of them, in a fixed order."""
PROMPTS = tuple(scene.prompt for scene in SCENES)


def states(motion: str, count: int) -> Tensor:
    """[count, 3] float32: centre x, y and radius in each frame."""
    first, last = (torch.tensor(state) for state in MOTIONS[motion])
    return first + torch.linspace(0, 1, count)[:, None] * (last - first)


def draw_frames(scene: Scene, count: int, height: int, width: int, rng: random.Random) -> list[Image.Image]:
    """Renders anti-aliased RGB frames, all with the same jitter."""
    jitter = Jitter.draw(rng)
    return [
        draw_shapes([(COLORS[scene.color], scene.shape, (x, y), radius, jitter)], height, width)
        for x, y, radius in states(scene.motion, count).tolist()
    ]


def draw_all(copies: int, height: int, width: int, seed: int) -> Tensor:
    """uint8 [scenes, copies, FRAMES, 3, height, width]; row i shows ``SCENES[i]``."""
    rng = random.Random(seed)
    frames = [stacked(draw_frames(scene, FRAMES, height, width, rng)) for scene in SCENES for _ in range(copies)]
    return torch.stack(frames).unflatten(0, (len(SCENES), copies))


def draw_dataset(folder: Path, records_per_prompt: int, height: int, width: int, seed: int, task: Task = "t2i") -> str:
    """Writes ``records.jsonl`` and ``target_videos/`` as `write_dataset` does, ``records_per_prompt`` of each scene."""

    def records(fresh: Path) -> Iterator[dict[str, Any]]:
        rng = random.Random(seed)
        for number, scene in enumerate(SCENES * records_per_prompt):
            name = f"motion_{number:05d}"
            target = f"{_TARGETS}/{name}{SUFFIX}"
            frames = stacked(draw_frames(scene, FRAMES, height, width, rng))
            (fresh / target).write_bytes(encoded_video(VideoSample(frames=frames, fps=FPS)))
            yield {"id": name, "prompt": scene.prompt, "target_image": target, "metadata": asdict(scene)}

    recipe = {"records_per_prompt": records_per_prompt, "height": height, "width": width, "seed": seed}
    return write_dataset(folder, recipe, (_TARGETS,), records)
