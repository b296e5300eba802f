"""COCO annotations: pictures with captions, or objects as queries.

A query is of an image and a category, or the phrase that an annotation gives its object; its mask is the union of the
annotations with it. Crowds (``iscrowd``) belong
to it: training and evaluation of single objects leave them out, because a crowd is not one object, while masks of
categories include them, as in torchvision's reference for semantic segmentation.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from pycocotools import mask as coco_mask

from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.config import DataConfig
from visual_grpo.data.columns import IGNORED, METADATA
from visual_grpo.data.queries import mask_image
from visual_grpo.data.record import Item, Limits, Place, Record, Rejected, is_image_name, open_text, shorten
from visual_grpo.data.splits import split_in_path
from visual_grpo.data.video_frames import require_pixels

_PHRASES, _PHRASE_OF_IMAGE = ("noun_phrase", "caption"), "text_input"
"""Keys of an annotation, and of an image, with the phrase that SAM 3's data ask for (facebookresearch/sam3:
scripts/eval/veval and scripts/eval/gold). There a category may be called "object"."""
_OF_CAPTIONS = {"image_id": METADATA, "file_name": "target"}
_OF_QUERIES = {"image_id": METADATA, "category_id": METADATA, "file_name": "source"} | dict.fromkeys(
    ("segmentation", "width", "height"), "target"
)
"""Keys that are read, and what they become; the others are ignored."""
ANNOTATIONS = "annotations"
"""The folder of annotation files; their images lie next to it."""
_OBJECTS, _CAPTIONS = "categories", "caption"
"""The key that tells files of objects and of captions apart."""
_PREFERRED = {_OBJECTS: "instances", _CAPTIONS: "captions"}
"""How COCO's names of them begin: besides the objects, it has their keypoints."""
_RUN_BITS = 35
"""Bits of a run length in COCO's text, five a character: pycocotools counts pixels in 32 bits."""
_REMEDY = "Give polygons or run lengths of the image's size, as COCO does"


def _find(kind: str, path: Path, limits: Limits) -> Path | None:
    """Returns a JSON file of this kind with images, or a folder that has one, also in its folder ``annotations``."""
    return path if next(_annotation_files(path, kind), None) else None


find_coco, find_captions = partial(_find, _OBJECTS), partial(_find, _CAPTIONS)


def _annotation_files(path: Path, kind: str) -> Iterator[Path]:
    keys = [re.compile(rb'"%b"\s*:' % key.encode()) for key in ("images", ANNOTATIONS, kind)]
    for file in [path] if path.is_file() else sorted([*path.glob("*.json"), *path.glob(f"{ANNOTATIONS}/*.json")]):
        if file.suffix == ".json" and file.is_file():
            text = file.read_bytes()
            if text.lstrip()[:1] == b"{" and all(key.search(text) for key in keys):
                yield file


def read_captions(path: Path, limits: Limits, data: DataConfig) -> Iterator[Item]:
    """Yields a record for each caption. Raises UserError: see `_files`."""
    for file in _files(path, limits, _CAPTIONS, data.parameter):
        for number, annotation in enumerate(file.annotations, 1):
            place = Place(file.name, number)
            try:
                image = file.image(annotation["image_id"])
                target, caption = file.picture(image["file_name"]), annotation["caption"]
            except Rejected as rejected:
                yield rejected.at(place)
            except (KeyError, TypeError, AttributeError) as error:
                found = f"{type(error).__name__}: {error}"
                message = f"the annotation has no caption or no image with a file_name ({found})"
                yield Rejected("empty_prompt", message, "Add it, as in COCO's files", place)
            else:
                yield Record(
                    place=place,
                    folder=file.folder,
                    prompt=caption,
                    target_image=target,
                    extra={"image_id": image["id"]},
                    found={*annotation, *image},
                    columns=_columns("caption", [annotation], image, _OF_CAPTIONS),
                )


def read_coco(path: Path, limits: Limits, data: DataConfig, *, draw: bool = True) -> Iterator[Item]:
    """Yields the queries; ``draw=False`` leaves out the masks, to count them. Raises UserError: see `_files`."""
    for file in _files(path, limits, _OBJECTS, data.parameter):
        queries: dict[tuple[Any, tuple[str, Any]], list[Mapping[str, Any]]] = {}
        for number, annotation in enumerate(file.annotations, 1):
            try:
                asked = file.phrase(annotation) or ("category", annotation["category_id"])
                queries.setdefault((annotation["image_id"], asked), []).append(annotation)
            except (KeyError, TypeError) as error:
                message = f"annotation {number} names no image and category ({type(error).__name__}: {error})"
                yield Rejected("wrong_mask", message, _REMEDY, Place(file.name, number))
        for number, ((image_id, (key, value)), parts) in enumerate(queries.items(), 1):
            place = Place(file.name, number)
            try:
                query = file.category(value) if key == "category" else value
                image = file.image(image_id)
                drawn = _drawn(parts, image, data)
                source = file.picture(image["file_name"])
            except Rejected as rejected:
                yield rejected.at(place)
                continue
            except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
                found = f"{type(error).__name__}: {error}"
                message = f"image {image_id} lacks a proper file_name, width or height ({found})"
                yield Rejected("wrong_mask", message, "Add it, as in COCO's files", place)
                continue
            mask = mask_image(coco_mask.decode(coco_mask.merge(drawn)) > 0, f"{place}, the mask") if draw else ""
            yield Record(
                place=place,
                folder=file.folder,
                prompt=query,
                source_images=source,
                target_image=mask,
                extra={"image_id": image_id, "category_id": parts[0].get("category_id")},
                found={*chain(image, *parts)},
                columns=_columns(key, parts, image, _OF_QUERIES),
            )


def _columns(
    prompt: str, annotations: Sequence[Mapping[str, Any]], image: Mapping[str, Any], read: Mapping[str, str]
) -> dict[str, str]:
    """Returns what each key became, and ``category``, the name that an annotation's ``category_id`` stands for."""
    categories = ["category"] if any("category_id" in annotation for annotation in annotations) else []
    keys = dict.fromkeys(chain(categories, *annotations, image))
    return {prompt: "prompt"} | {key: read.get(key, IGNORED) for key in keys if key != prompt}


def _files(path: Path, limits: Limits, kind: str, parameter: str) -> Iterator[_AnnotationFile]:
    """Yields the annotation file of each split. Raises UserError if one has several, or one that is not COCO's."""
    files: dict[str | None, list[Path]] = {}
    for file in _annotation_files(path, kind):
        files.setdefault(split_in_path(file.name), []).append(file)
    for same in files.values():
        chosen = same if len(same) == 1 else [file for file in same if file.name.startswith(_PREFERRED[kind])]
        if len(chosen) != 1:
            names = ", ".join(file.name for file in same)
            message = f"{same[0].parent} has several annotation files of one split, {names}. Give one as {parameter}."
            raise UserError(message, remedy=Remedy(parameters={parameter: str(same[0])}))
        limits.require_inside(chosen[0])
        yield _AnnotationFile(chosen[0], path, limits)


class _AnnotationFile:
    """The content of an annotation file, and the pictures in its folder or below."""

    def __init__(self, file: Path, path: Path, limits: Limits) -> None:
        self.name = file.name if file == path else file.relative_to(path).as_posix()
        self.folder = file.parent.parent if file.parent.name == ANNOTATIONS else file.parent
        self._images: dict[Any, list[Mapping[str, Any]]] = {}
        try:
            with open_text(file) as text:
                content = json.load(text)
            for image in content["images"]:
                self._images.setdefault(image["id"], []).append(image)
            self._categories = {category["id"]: category.get("name") for category in content.get("categories", ())}
            self.annotations = list(content[ANNOTATIONS])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{file} is not a COCO file ({type(error).__name__}: {error}).") from error
        self._split = split_in_path(file.name)
        self._pictures: dict[str, list[str]] = {}
        """Paths of pictures, relative to the folder, by file name."""
        for picture in filter(is_image_name, limits.walk(self.folder)):
            self._pictures.setdefault(_key(picture).name, []).append(picture)
        self._has_split = any(_split_of(each) == self._split for same in self._pictures.values() for each in same)

    def phrase(self, annotation: Mapping[str, Any]) -> tuple[str, str] | None:
        """Returns the phrase for an annotation's object, in it or in its image, after its key."""
        image = next(iter(self._images.get(annotation["image_id"], ())), {})
        given = [(key, annotation.get(key)) for key in _PHRASES] + [(_PHRASE_OF_IMAGE, image.get(_PHRASE_OF_IMAGE))]
        return next(((key, text) for key, text in given if isinstance(text, str) and text.strip()), None)

    def category(self, category_id: Any) -> Any:
        if (name := self._categories.get(category_id)) is None:
            message = f"the categories have no name of the id {shorten(repr(category_id))}, which would be the query"
            raise Rejected("empty_prompt", message, "Add the category with its name, or remove its annotations")
        return name

    def image(self, image_id: Any) -> Mapping[str, Any]:
        """Returns the entry of an image, or raises `Rejected` if not exactly one has the id."""
        images = self._images.get(image_id, [])
        if len(images) != 1:
            message, remedy = (
                f"{len(images)} images have the id {shorten(repr(image_id))}",
                "Give each image its own id",
            )
            raise Rejected("missing_source", message, f"{remedy}, and each annotation the id of its image")
        return images[0]

    def picture(self, name: str) -> str:
        """Returns the path of an image, or its name if there is none; of two, that in a folder of the file's split.
        Raises Rejected if several could be meant."""
        named = _key(name)
        paths = [path for path in self._pictures.get(named.name, []) if f"/{_key(path)}".endswith(f"/{named}")]
        of_split = [path for path in paths if self._split is not None and _split_of(path) == self._split]
        of_none = [path for path in paths if _split_of(path) is None]
        others = [] if self._has_split else paths
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


def _drawn(annotations: Sequence[Mapping[str, Any]], image: Mapping[str, Any], data: DataConfig) -> list[Any]:
    """Returns the run lengths of all annotations, as pycocotools renders them."""
    height, width = int(image["height"]), int(image["width"])
    if min(height, width) < 1:
        raise ValueError(f"{width}x{height} pixels")
    require_pixels(f"image {image['id']}", (width, height), data)
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
    if all(0 <= number <= 1 for polygon in segmentation for number in polygon):
        raise ValueError("its polygons lie within one pixel, as if they were fractions of the image's size")
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
        if not 48 <= code < 112 or bits > _RUN_BITS:
            raise ValueError("its run lengths are not COCO's text")
        if not code - 48 & 32:
            number -= (code - 48 >> 4 & 1) << bits
            runs.append(number + (runs[-2] if len(runs) > 2 else 0))
            number = bits = 0
    return runs
