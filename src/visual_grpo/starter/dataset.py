"""Writes the drawn shapes as a text-to-image dataset: prompts with target images."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from visual_grpo.shapes_world import COMBINATIONS
from visual_grpo.starter.shapes import draw
from visual_grpo.starter.whole_folder import digest_of, is_current, whole_folder

_VERSION = 1
"""Raised when the same configuration draws other pictures."""
_TARGETS = "target_images"


def dataset_digest(records_per_prompt: int, height: int, width: int, seed: int) -> str:
    """What a drawn dataset depends on."""
    facts = {"records_per_prompt": records_per_prompt, "height": height, "width": width}
    return digest_of({"dataset": _VERSION, "seed": seed, **facts})


def draw_dataset(folder: Path, records_per_prompt: int, height: int, width: int, seed: int) -> str:
    """Writes ``records.jsonl`` and ``target_images/`` unless they are there for the same arguments.

    Every combination occurs ``records_per_prompt`` times, each time drawn a little differently. ``height`` and
    ``width`` are pixels. Returns the digest of the arguments.
    """
    digest = dataset_digest(records_per_prompt, height, width, seed)
    if is_current(folder, digest):
        return digest
    rng = random.Random(seed)
    with whole_folder(folder, digest) as fresh:
        (fresh / _TARGETS).mkdir()
        with (fresh / "records.jsonl").open("w", encoding="utf-8") as lines:
            for number, combination in enumerate(COMBINATIONS * records_per_prompt):
                name = f"shape_{number:05d}"
                target = f"{_TARGETS}/{name}.png"
                draw(combination, height, width, rng).save(fresh / target)
                record: dict[str, Any] = {
                    "id": name,
                    "prompt": combination.prompt,
                    "target_image": target,
                    "metadata": asdict(combination),
                }
                lines.write(json.dumps(record) + "\n")
    return digest
