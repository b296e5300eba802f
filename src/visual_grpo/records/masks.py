"""Segmentation data without a table: folders ``images`` and ``masks``, and COCO's annotations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from visual_grpo.config import Task
from visual_grpo.errors import UserError
from visual_grpo.records.captions import caption_name, read_caption
from visual_grpo.records.columns import mask_image
from visual_grpo.records.guard import Guard, is_image_name
from visual_grpo.records.raw import Item, Note, Place, RawRecord, Rejected
from visual_grpo.records.text import open_text

if TYPE_CHECKING:
    import numpy as np

IMAGES, MASKS = "images", "masks"


def find_masks(path: Path, guard: Guard) -> Path | None:
    """The folder, if it has folders of images and masks."""
    return path if all((path / name).is_dir() for name in (IMAGES, MASKS)) else None


def read_masks(path: Path, guard: Guard, task: Task) -> Iterator[Item]:
    """Yields a query for each mask: ``masks/THING/a.png`` asks for THING in ``images/a.*``, and ``masks/a.png`` for
    what ``images/a.txt`` or ``masks/a.txt`` says."""
    refused: list[Rejected] = []
    images: dict[str, str] = {}
    for name in filter(is_image_name, guard.walk(path / IMAGES, refused)):
        images.setdefault(str(PurePosixPath(name).with_suffix("")), name)
    used = set()
    for name in filter(is_image_name, guard.walk(path / MASKS, refused)):
        stem = str(PurePosixPath(name).with_suffix(""))
        thing, _, below = stem.partition("/")
        place = Place(f"{MASKS}/{name}")
        image = images.get(stem) or images.get(below)
        try:
            if image is None:
                remedy = f"Add {IMAGES}/{stem}.png, or remove the mask"
                raise Rejected("missing_source", f"there is no image of the same name in {IMAGES}", remedy)
            used.add(image)
            query = thing.replace("_", " ") if stem not in images else _query(path, image, name, guard)
        except Rejected as rejected:
            yield rejected.at(place)
            continue
        source, mask = f"{IMAGES}/{image}", f"{MASKS}/{name}"
        yield RawRecord(place=place, folder=path, prompt=query, source_images=source, target_image=mask)
    yield from refused
    if unused := [name for name in images.values() if name not in used]:
        yield Note(f"{len(unused)} images without a mask were ignored, such as {IMAGES}/{unused[0]}")


def _query(path: Path, image: str, mask: str, guard: Guard) -> str:
    for folder, name in ((MASKS, mask), (IMAGES, image)):
        if (path / folder / caption_name(name)).exists():
            return read_caption(path / folder, name, guard)
    remedy = f"Write it to {MASKS}/{caption_name(mask)}, or move the mask to {MASKS}/THING/{mask}"
    raise Rejected("empty_prompt", "nothing says what the mask shows", remedy)


def find_coco(path: Path) -> Path | None:
    """A JSON file with images and annotations, or a folder with one, also in its folder ``annotations``."""
    candidates = [path] if path.is_file() else [*path.glob("*.json"), *path.glob("annotations/*.json")]
    return next((file for file in sorted(candidates) if file.suffix == ".json" and _is_coco(file)), None)


def read_coco(path: Path, guard: Guard, task: Task) -> Iterator[Item]:
    """Yields a query for each image and category: the category's name, and the union of its masks.

    Raises:
        UserError: the file has not the form of COCO's annotations.
    """
    try:
        with open_text(path) as text:
            found = json.load(text)
        names = {category["id"]: category["name"] for category in found["categories"]}
        parts: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
        for annotation in found["annotations"]:
            parts.setdefault((annotation["image_id"], annotation["category_id"]), []).append(annotation)
        images = {
            image["id"]: (image["file_name"], int(image["height"]), int(image["width"])) for image in found["images"]
        }
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is not a COCO file of segments ({type(error).__name__}: {error}). Correct it."
        ) from error
    base = path.parent.parent if path.parent.name == "annotations" else path.parent
    folders = {str(Path(name).parent) for name in guard.walk(base) if is_image_name(name)}
    for number, ((image_id, category), segments) in enumerate(parts.items(), 1):
        place = Place(path.name, number)
        try:
            file, height, width = images[image_id]
            if height * width > guard.max_pixels:
                raise ValueError(f"{width}x{height} pixels are more than data.max_pixels")
            mask = _union([annotation["segmentation"] for annotation in segments], height, width)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            message = f"the segments of image {image_id} cannot be drawn ({type(error).__name__}: {error})"
            yield Rejected("wrong_mask", message, "Give polygons or run lengths, as COCO does").at(place)
            continue
        named = (f"{folder}/{file}" for folder in sorted(folders) if (base / folder / file).is_file())
        yield RawRecord(
            place=place,
            folder=base,
            prompt=names.get(category),
            source_images=file if (base / file).is_file() else next(named, file),
            target_image=mask_image(mask, f"{place}, the mask"),
            extra={"image_id": image_id, "category_id": category},
        )


def _is_coco(file: Path) -> bool:
    if not file.is_file():
        return False
    text = file.read_bytes()
    return text.lstrip()[:1] == b"{" and all(key in text for key in (b'"images"', b'"annotations"', b'"categories"'))


def _union(segments: Sequence[Any], height: int, width: int) -> np.ndarray:
    """bool [height, width] of polygons ``[[x1, y1, x2, y2, ...], ...]`` and run lengths ``{"counts": ...}``."""
    import numpy as np
    from PIL import Image, ImageDraw

    drawn = Image.new("1", (width, height))
    runs = np.zeros((height, width), bool)
    for segment in segments:
        if isinstance(segment, Mapping):
            counts = segment["counts"]
            runs |= _decoded(_counts(counts) if isinstance(counts, str) else counts, height, width)
        else:
            for polygon in segment:
                # COCO's coordinates are of the pixels' corners, Pillow's of their centres.
                ImageDraw.Draw(drawn).polygon([number - 0.5 for number in polygon], fill=1)
    return np.asarray(drawn) | runs


def _decoded(counts: Sequence[int], height: int, width: int) -> np.ndarray:
    """Runs of pixels outside and inside in turn, down the columns."""
    import numpy as np

    values = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return values.reshape(width, height).T


def _counts(text: str) -> list[int]:
    """Numbers of COCO's compressed run lengths: 5 bits a character, from the third on as differences to two before."""
    counts: list[int] = []
    value = shift = 0
    for character in text.encode():
        bits = character - 48
        value |= (bits & 0x1F) << shift
        shift += 5
        if not bits & 0x20:
            value -= (bits & 0x10) << (shift - 4) if bits & 0x10 else 0
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    return counts
