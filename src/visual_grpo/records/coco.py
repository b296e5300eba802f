"""Segmentation data with COCO's annotations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from visual_grpo.config import Task
from visual_grpo.errors import UserError
from visual_grpo.records.columns import mask_image
from visual_grpo.records.guard import Guard, is_image_name, open_text
from visual_grpo.records.raw import Item, Place, RawRecord, Rejected

_KEYS = ("images", "annotations", "categories")


def find_coco(path: Path, guard: Guard) -> Path | None:
    """A JSON file with images and annotations, or a folder with one, also in its folder ``annotations``."""
    for file in [path] if path.is_file() else sorted([*path.glob("*.json"), *path.glob("annotations/*.json")]):
        if file.suffix == ".json" and file.is_file():
            text = file.read_bytes()
            if text.lstrip()[:1] == b"{" and all(f'"{key}"'.encode() in text for key in _KEYS):
                return file
    return None


def read_coco(path: Path, guard: Guard, task: Task) -> Iterator[Item]:
    """Yields a query for each image and category: the category's name, and the union of its masks."""
    try:
        with open_text(path) as text:
            found = json.load(text)
        names = {category["id"]: category["name"] for category in found["categories"]}
        images = {image["id"]: image for image in found["images"]}
        parts: dict[tuple[Any, Any], list[Any]] = {}
        for annotation in found["annotations"]:
            key = annotation["image_id"], annotation["category_id"]
            parts.setdefault(key, []).append(annotation["segmentation"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not a COCO file of segments ({type(error).__name__}: {error}).") from error
    base = path.parent.parent if path.parent.name == "annotations" else path.parent
    folders = ["", *sorted({str(Path(name).parent) for name in guard.walk(base) if is_image_name(name)})]
    for number, ((image_id, category), segments) in enumerate(parts.items(), 1):
        place = Place(path.name, number)
        try:
            image = images[image_id]
            if image["height"] * image["width"] > guard.max_pixels:
                raise ValueError(f"{image['width']}x{image['height']} pixels are more than data.max_pixels")
            file = image["file_name"]
            mask = _union(segments, image["height"], image["width"])
        except (KeyError, ValueError, TypeError, IndexError) as error:
            message = f"the segments of image {image_id} cannot be drawn ({type(error).__name__}: {error})"
            yield Rejected("wrong_mask", message, "Give polygons, or run lengths as a list of numbers", place)
            continue
        yield RawRecord(
            place=place,
            folder=base,
            prompt=names.get(category),
            source_images=next((str(Path(below, file)) for below in folders if (base / below / file).is_file()), file),
            target_image=mask_image(mask, f"{place}, the mask"),
            extra={"image_id": image_id, "category_id": category},
        )


def _union(segments: Sequence[Any], height: int, width: int) -> np.ndarray:
    """bool [height, width] of polygons ``[[x1, y1, x2, y2, ...], ...]`` and run lengths ``{"counts": ...}``."""
    drawn = Image.new("1", (width, height))
    runs = np.zeros((height, width), bool)
    for segment in segments:
        if isinstance(segment, Mapping):
            counts = segment["counts"]
            if isinstance(counts, str):
                raise ValueError("its run lengths are compressed")
            # Pixels outside and inside in turn, down the columns.
            runs |= np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(width, height).T
        else:
            for polygon in segment:
                # COCO's coordinates are of the pixels' corners, Pillow's of their centres.
                ImageDraw.Draw(drawn).polygon([number - 0.5 for number in polygon], fill=1)
    return np.asarray(drawn) | runs
