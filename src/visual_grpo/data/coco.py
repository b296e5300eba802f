"""COCO annotations: pictures with captions, or objects as queries.

A query is of an image and a category; its mask is the union of the category's annotations. Crowds (``iscrowd``) belong
to it: training and evaluation of single objects leave them out, because a crowd is not one object, while masks of
categories include them, as in torchvision's reference for semantic segmentation.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pycocotools import mask as coco_mask

from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.config import DataConfig
from visual_grpo.data.queries import mask_image
from visual_grpo.data.record import Item, Limits, Place, Record, Rejected, is_image_name, open_text, shorten
from visual_grpo.data.splits import split_found, split_in_path

ANNOTATIONS = "annotations"
"""The folder of annotation files; their images lie beside it."""
_OBJECTS, _CAPTIONS = "categories", "caption"
"""The key that tells files of objects and of captions apart."""
_REMEDY = "Give polygons or run lengths of the image's size, as COCO does"


def find_coco(path: Path, limits: Limits) -> Path | None:
    """Returns a JSON file with images and annotations, or a folder that has one, also in its folder ``annotations``."""
    return path if next(_annotation_files(path, _OBJECTS), None) else None


def find_captions(path: Path, limits: Limits) -> Path | None:
    """Returns a JSON file with images and captions, or a folder that has one, also in its folder ``annotations``."""
    return path if next(_annotation_files(path, _CAPTIONS), None) else None


def _annotation_files(path: Path, kind: str) -> Iterator[Path]:
    keys = [re.compile(rb'"%b"\s*:' % key.encode()) for key in ("images", ANNOTATIONS, kind)]
    for file in [path] if path.is_file() else sorted([*path.glob("*.json"), *path.glob(f"{ANNOTATIONS}/*.json")]):
        if file.suffix == ".json" and file.is_file():
            text = file.read_bytes()
            if text.lstrip()[:1] == b"{" and all(key.search(text) for key in keys):
                yield file


def read_coco(path: Path, limits: Limits, data: DataConfig) -> Iterator[Item]:
    """Yields the queries of the annotation file of each split.

    Raises:
        UserError: several files of one split, or a file that is not COCO's.
    """
    return _read(path, limits, data.max_pixels, draw=True)


def count_coco(path: Path, limits: Limits, data: DataConfig) -> Counter[str | None]:
    """Returns the number of queries of each split that was found, without their masks."""
    return Counter(split_found(item, "coco") for item in _read(path, limits, data.max_pixels, draw=False))


def read_captions(path: Path, limits: Limits, data: DataConfig) -> Iterator[Item]:
    """Yields a record for each caption in the annotation file of each split.

    Raises:
        UserError: several files of one split, or a file that is not COCO's.
    """
    for file, name, base in _files(path, limits, _CAPTIONS, "captions"):
        images, annotations, _ = _content(file)
        pictures = Pictures(limits.walk(base), split_in_path(file.name))
        for number, annotation in enumerate(annotations, 1):
            place = Place(name, number)
            try:
                image = _only(images.get(annotation["image_id"], []), annotation["image_id"])
                target, caption = pictures.find(image["file_name"]), annotation["caption"]
            except Rejected as rejected:
                yield rejected.at(place)
            except (KeyError, TypeError, AttributeError) as error:
                message = (
                    f"the annotation has no caption or no image with a file_name ({type(error).__name__}: {error})"
                )
                yield Rejected("empty_prompt", message, "Add it, as in COCO's files", place)
            else:
                extra = {"image_id": image["id"]}
                yield Record(place=place, folder=base, prompt=caption, target_image=target, extra=extra)


def _read(path: Path, limits: Limits, max_pixels: int, draw: bool) -> Iterator[Record | Rejected]:
    for file, name, base in _files(path, limits, _OBJECTS, "instances"):
        yield from _read_file(file, name, base, limits, max_pixels, draw)


def _files(path: Path, limits: Limits, kind: str, preferred: str) -> Iterator[tuple[Path, str, Path]]:
    """Yields the annotation file of each split, its name in the dataset, and the folder of its images."""
    files: dict[str | None, list[Path]] = {}
    for file in _annotation_files(path, kind):
        files.setdefault(split_in_path(file.name), []).append(file)
    for same in files.values():
        # Beside the objects, COCO has their keypoints and captions.
        chosen = same if len(same) == 1 else [file for file in same if file.name.startswith(preferred)]
        if len(chosen) != 1:
            names = ", ".join(file.name for file in same)
            message = f"{same[0].parent} has several annotation files of one split, {names}. Give one as data.path."
            raise UserError(message, remedy=Remedy(parameters={"data.path": str(same[0])}))
        limits.require_inside(chosen[0])
        name = chosen[0].name if chosen[0] == path else chosen[0].relative_to(path).as_posix()
        yield chosen[0], name, chosen[0].parent.parent if chosen[0].parent.name == ANNOTATIONS else chosen[0].parent


def _content(file: Path) -> tuple[dict[Any, list[Any]], list[Any], dict[Any, Any]]:
    """Returns images by id, annotations, and names of categories by id; raises UserError where there are none."""
    images: dict[Any, list[Any]] = {}
    try:
        with open_text(file) as text:
            content = json.load(text)
        for image in content["images"]:
            images.setdefault(image["id"], []).append(image)
        names = {category["id"]: category.get("name") for category in content.get("categories", ())}
        return images, list(content[ANNOTATIONS]), names
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is not a COCO file ({type(error).__name__}: {error}).") from error


def _read_file(
    file: Path, name: str, base: Path, limits: Limits, max_pixels: int, draw: bool
) -> Iterator[Record | Rejected]:
    images, annotations, names = _content(file)
    queries: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for number, annotation in enumerate(annotations, 1):
        try:
            queries.setdefault((annotation["image_id"], annotation["category_id"]), []).append(annotation)
        except (KeyError, TypeError) as error:
            message = f"annotation {number} names no image and category ({type(error).__name__}: {error})"
            yield Rejected("wrong_mask", message, _REMEDY, Place(name, number))
    pictures = Pictures(limits.walk(base), split_in_path(file.name))
    for number, ((image_id, category), parts) in enumerate(queries.items(), 1):
        place = Place(name, number)
        try:
            if names.get(category) is None:
                message = f"the categories have no name of the id {shorten(repr(category))}, which would be the query"
                raise Rejected("empty_prompt", message, "Add the category with its name, or remove its annotations")
            image = _only(images.get(image_id, []), image_id)
            drawn = _drawn(parts, image, max_pixels)
            source = pictures.find(image["file_name"])
        except Rejected as rejected:
            yield rejected.at(place)
            continue
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            message = f"image {image_id} lacks a proper file_name, width or height ({type(error).__name__}: {error})"
            yield Rejected("wrong_mask", message, "Add it, as in COCO's files", place)
            continue
        yield Record(
            place=place,
            folder=base,
            prompt=names[category],
            source_images=source,
            target_image=mask_image(coco_mask.decode(coco_mask.merge(drawn)) > 0, f"{place}, the mask") if draw else "",
            extra={"image_id": image_id, "category_id": category},
        )


def _only(images: Sequence[Mapping[str, Any]], image_id: Any) -> Mapping[str, Any]:
    if len(images) != 1:
        message = f"{len(images)} images have the id {shorten(repr(image_id))}"
        raise Rejected("missing_source", message, "Give each image its own id, and each annotation the id of its image")
    return images[0]


class Pictures:
    """Finds the images that an annotation file names, in its folder or those below."""

    def __init__(self, files: Iterator[str], split: str | None) -> None:
        self._split = split
        self._paths: dict[str, list[str]] = {}
        """By name, relative to the folder."""
        for path in filter(is_image_name, files):
            self._paths.setdefault(_key(path).name, []).append(path)
        self._splits = {_split_of(path) for paths in self._paths.values() for path in paths}

    def find(self, name: str) -> str:
        """Returns the path of an image, or its name if there is none; of two, that in a folder of the file's split.

        Raises:
            Rejected: several images could be meant.
        """
        named = _key(name)
        paths = [path for path in self._paths.get(named.name, []) if f"/{_key(path)}".endswith(f"/{named}")]
        of_split = [path for path in paths if self._split is not None and _split_of(path) == self._split]
        of_none = [path for path in paths if _split_of(path) is None]
        others = [] if self._split in self._splits else paths
        found = of_split or [path for path in paths if _key(path) == named] or of_none or others
        if len(found) > 1:
            message = f"{name} may be {' or '.join(found)}"
            remedy = "Give its path in file_name, or name the annotation file after the folder, as instances_val.json"
            raise Rejected("ambiguous_source", message, remedy)
        return found[0] if found else name


def _key(name: str) -> PurePosixPath:
    """Returns a path as it is compared: with / and in one Unicode form."""
    return PurePosixPath(unicodedata.normalize("NFC", name.replace("\\", "/")))


def _split_of(path: str) -> str | None:
    """Returns the split that the folders of an image name; a picture itself may be called test.png."""
    return split_in_path(f"{PurePosixPath(path).parent}/_")


def _drawn(annotations: Sequence[Mapping[str, Any]], image: Mapping[str, Any], max_pixels: int) -> list[Any]:
    """Returns the run lengths of all annotations, as pycocotools draws them."""
    height, width = int(image["height"]), int(image["width"])
    if min(height, width) < 1:
        raise ValueError(f"{width}x{height} pixels")
    if height * width > max_pixels:
        message = f"image {image['id']} is {width}x{height} pixels, more than data.max_pixels={max_pixels}"
        raise Rejected("too_many_pixels", message, "Scale it down, raise data.max_pixels or remove the record")
    parts: list[Any] = []
    for annotation in annotations:
        try:
            parts += _run_lengths(annotation.get("segmentation"), height, width)
        except (KeyError, ValueError, TypeError) as error:
            reason = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            message = f"annotation {annotation.get('id')} of image {image['id']}: {reason}"
            raise Rejected("wrong_mask", message, _REMEDY) from error
    return parts


def _run_lengths(segmentation: Any, height: int, width: int) -> list[Any]:
    """Returns pycocotools' run lengths of polygons ``[[x1, y1, x2, ...], ...]`` or ``{"counts": ..., "size": ...}``.

    Its C code reads and allocates what it is told, so everything is checked before.
    """
    if not segmentation:
        raise ValueError("it has no segmentation")
    if isinstance(segmentation, Mapping):
        counts, size = segmentation["counts"], segmentation.get("size", [height, width])
        runs = _decoded(counts) if isinstance(counts, str) else counts
        if list(size) != [height, width]:
            raise ValueError(f"its run lengths have the size {list(size)}, and its image {[height, width]}")
        if not all(type(run) is int and run >= 0 for run in runs) or sum(runs) != height * width:
            raise ValueError(f"its run lengths do not cover the {height * width} pixels of its image")
        return list(coco_mask.frPyObjects([{"size": [height, width], "counts": runs}], height, width))
    far = 2 * max(height, width)
    for polygon in segmentation:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            raise ValueError(f"a polygon needs x and y of three points or more, got {shorten(repr(polygon))}")
        if not all(type(number) in (int, float) and abs(number) <= far for number in polygon):
            raise ValueError(f"a polygon lies far outside the {width}x{height} pixels: {shorten(repr(polygon))}")
    return list(coco_mask.frPyObjects(segmentation, height, width))


def _decoded(text: str) -> list[int]:
    """Returns the run lengths in COCO's text.

    Each character from "0" on holds five bits, from the lowest on, and a sixth that says that more follow; the last bit
    is the sign. From the fourth number on, they are differences to the one before the last.
    """
    runs: list[int] = []
    number = bits = 0
    for code in text.encode("ascii", "replace"):
        number |= (code - 48 & 31) << bits
        bits += 5
        if not 48 <= code < 112:
            raise ValueError("its run lengths are not COCO's text")
        if not code - 48 & 32:
            number -= (code - 48 >> 4 & 1) << bits
            runs.append(number + (runs[-2] if len(runs) > 2 else 0))
            number = bits = 0
    return runs
