"""Promptable segmentation models: embed an image once, then predict masks for many prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.geometry import Box, Point
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.reward import CalledByName, with_options

KINDS: Mapping[str, str] = {
    "watershed": "visual_grpo.rewards.segmentation.watershed:WatershedSegmenter",
    "sam2": "visual_grpo.rewards.segmentation.sam2:Sam2Segmenter",
    "sam3": "visual_grpo.rewards.segmentation.sam2:Sam3Segmenter",
}
DEFAULT: Mapping[str, Any] = {"kind": "watershed"}
IMAGE, PROMPT = ("image", "embedding"), ("prompt",)
"""Parameters of a user's function, which are passed by name."""


@dataclass(frozen=True, kw_only=True)
class PointPrompt:
    """Points inside and outside an object, at least one inside, and optionally its box."""

    positives: tuple[Point, ...]
    negatives: tuple[Point, ...] = ()
    box: Box | None = None
    """Segmenters that support only points ignore it."""


class Segmenter(Protocol):
    """``embed`` is expensive and runs once per image; ``masks`` takes all prompts of an image in one batch.

    A method ``multimasks`` gives alternative masks of a prompt, bool [M, H, W], and estimates of their quality, [M].
    """

    def embed(self, image: Tensor) -> Any:
        """``image``: uint8 [3, H, W], RGB."""
        ...

    def masks(self, embedding: Any, prompts: Sequence[PointPrompt]) -> Tensor:
        """Bool [K, H, W]: the most likely mask of each prompt, at the image's size; K may be 0."""
        ...


def build_segmenter(options: Mapping[str, Any] = DEFAULT) -> Segmenter:
    """Builds the segmenter of a ``kind``, or the user's ``function``, with the other keys as its options, such as
    ``{"kind": "sam2", "path": "facebook/sam2.1-hiera-large"}``. Raises UserError for impossible ones.
    """
    given = dict(options) if isinstance(options, Mapping) else {}
    kind, function = given.pop("kind", None), given.pop("function", None)
    if kind is None and isinstance(function, str):
        return FunctionSegmenter(function, with_options(f"segmenter {function!r}", function, given, IMAGE, PROMPT))
    if function is not None or str(kind) not in KINDS:
        expected = f"a kind, {' or '.join(KINDS)}, or a function, package.module:name"
        raise UserError(
            f"segmenter: expected options with {expected}, got {options!r}.{nearest_hint(str(kind), KINDS)}"
        )
    built: Segmenter = with_options(f"segmenter {kind!r}", KINDS[str(kind)], given)
    return built


class FunctionSegmenter:
    """The user's function of ``image`` and ``prompt``: a uint8 image [3, H, W] and a `PointPrompt` give a bool mask
    [H, W], as a tensor or NumPy array.

    If the function has a method ``embed``, it is called once for each image, and the function gets its result in place
    of the image, as ``image`` or ``embedding``.
    """

    def __init__(self, name: str, function: Any) -> None:
        self._call = CalledByName(f"segmenter {name!r}", function, IMAGE, PROMPT)
        self.name = name
        self.function = function
        self.embeds = hasattr(function, "embed")

    def check_machine(self) -> None:
        """Calls the function's ``check_machine``, if any; it raises UserError for what is missing."""
        if hasattr(self.function, "check_machine"):
            self.function.check_machine()

    def embed(self, image: Tensor) -> tuple[Any, torch.Size]:
        """Returns what the function gets, and the size of its masks."""
        image = image.cpu()
        return (self.function.embed(image) if self.embeds else image), image.shape[1:]

    def masks(self, embedding: tuple[Any, torch.Size], prompts: Sequence[PointPrompt]) -> Tensor:
        """Bool [K, H, W]. Raises UserError where the function returns no such mask."""
        given, size = embedding
        masks = torch.zeros(len(prompts), *size, dtype=torch.bool)
        for mask, prompt in zip(masks, prompts, strict=True):
            # A copy: what a function paints into the image must not reach the next prompt.
            mask.copy_(self._mask(given if self.embeds else given.clone(), prompt, size))
        return masks

    def _mask(self, given: Any, prompt: PointPrompt, size: torch.Size) -> Tensor:
        returned = self._call(given, prompt)
        dtype, shape = getattr(returned, "dtype", type(returned).__name__), tuple(getattr(returned, "shape", ()))
        if str(dtype) not in ("bool", "torch.bool") or shape != tuple(size):
            raise UserError(
                f"segmenter {self.name!r} must return a mask of bool {list(size)}, as a tensor or NumPy array, got"
                f" {dtype} {list(shape)}"
            )
        return torch.as_tensor(returned)


def true_box_and_points(record: PromptRecord) -> tuple[Box, tuple[Point, ...]]:
    """Returns the box and positive points in the metadata (`data.image_store` writes them), in pixels of the image."""
    x1, y1, x2, y2 = map(float, record.metadata["box"])
    return (x1, y1, x2, y2), tuple((float(x), float(y)) for x, y in record.metadata["points"])
