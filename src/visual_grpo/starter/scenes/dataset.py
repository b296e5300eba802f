"""Writes drawn scenes as a segmentation dataset: images with a query, its mask, a box and a point."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from visual_grpo.starter.scenes.draw import boxes, centers, draw_scenes
from visual_grpo.starter.scenes.world import COLORS, PARTS, VERSION, query_of
from visual_grpo.starter.stamped_folder import digest_of, is_current, whole_folder

_IMAGES, _MASKS = "images", "masks"


def draw_scene_records(folder: Path, records_per_query: int, height: int, width: int, seed: int) -> str:
    """Writes ``records.jsonl``, ``images/`` and ``masks/`` unless they already exist for the same arguments.

    Draws ``records_per_query`` scenes on average for each of the eight queries. ``height`` and ``width`` are pixels.
    Returns the digest of the arguments.
    """
    facts = {"scenes": VERSION, "records_per_query": records_per_query, "height": height, "width": width, "seed": seed}
    digest = digest_of(facts)
    if is_current(folder, digest):
        return digest
    with whole_folder(folder, digest) as fresh:
        _write(fresh, records_per_query * len(COLORS) * len(PARTS), height, width, seed)
    return digest


def _write(folder: Path, count: int, height: int, width: int, seed: int) -> None:
    from PIL import Image

    for name in (_IMAGES, _MASKS):
        (folder / name).mkdir()
    # Another random stream than in pretraining, so that held-out scenes were never seen.
    scenes = draw_scenes(count, height, width, np.random.default_rng([seed, 0]))
    truths = scenes.truths
    with (folder / "records.jsonl").open("w", encoding="utf-8") as lines:
        for number, (query, box, center) in enumerate(zip(scenes.queries, boxes(truths), centers(truths), strict=True)):
            name = f"scene_{number:05d}"
            image, mask = f"{_IMAGES}/{name}.png", f"{_MASKS}/{name}.png"
            Image.fromarray(scenes.images[number]).save(folder / image)
            Image.fromarray(truths[number].astype(np.uint8) * 255).save(folder / mask)
            record = {
                "id": name,
                "image": image,
                "query": query_of(*query),
                "mask": mask,
                "box": box.tolist(),
                "points": [center.tolist()],
            }
            lines.write(json.dumps(record) + "\n")
