"""Writes the drawn shapes as a dataset: prompts with target images, edits with source and target images, or both."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from visual_grpo.config import Task
from visual_grpo.starter.shapes.draw import draw
from visual_grpo.starter.shapes.edits import draw_edit, random_edit
from visual_grpo.starter.shapes.world import COMBINATIONS, EDITS
from visual_grpo.starter.stamped_folder import digest_of, is_current, whole_folder

_VERSION = 1
"""To be raised when the same configuration draws other pictures."""
_TARGETS, _SOURCES = "target_images", "source_images"


def dataset_digest(records_per_prompt: int, height: int, width: int, seed: int, task: Task = "t2i") -> str:
    """Digest of everything that a drawn dataset depends on."""
    facts: dict[str, Any] = {"records_per_prompt": records_per_prompt, "height": height, "width": width}
    if task != "t2i":  # so that existing text-to-image datasets stay current
        facts["task"] = task
    return digest_of({"dataset": _VERSION, "seed": seed, **facts})


def draw_dataset(
    folder: Path, records_per_prompt: int, height: int, width: int, seed: int, *, task: Task = "t2i"
) -> str:
    """Writes ``records.jsonl``, ``target_images/`` and, for edits, ``source_images/``.

    Does nothing if they already exist for the same arguments. Every combination occurs ``records_per_prompt`` times in
    each kind of record that ``task`` includes (as the target of its prompt, and as the subject of an edit), each time
    with a different jitter. ``height`` and ``width`` are pixels. Returns the digest of the arguments.
    """
    digest = dataset_digest(records_per_prompt, height, width, seed, task)
    if is_current(folder, digest):
        return digest
    with whole_folder(folder, digest) as fresh, (fresh / "records.jsonl").open("w", encoding="utf-8") as lines:
        (fresh / _TARGETS).mkdir()
        if task != "i2i":
            for record in _prompts(fresh, records_per_prompt, height, width, random.Random(seed)):
                # Tells the reward that these records share batches with edits.
                metadata = record["metadata"] | ({"edit": None} if task == "mixed" else {})
                lines.write(json.dumps(record | {"metadata": metadata}) + "\n")
        if task != "t2i":
            (fresh / _SOURCES).mkdir()
            for record in _edits(fresh, records_per_prompt, height, width, random.Random(seed)):
                lines.write(json.dumps(record) + "\n")
    return digest


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
