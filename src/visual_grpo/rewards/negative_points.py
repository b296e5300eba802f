"""Rewards an answer for the segmenter's mask of its points, and for the effect of its negative points."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from cachetools import LRUCache, cached
from torch import Tensor

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.geometry import Box, Point
from visual_grpo.common.images import read_image, to_tensor
from visual_grpo.common.masks import read_mask
from visual_grpo.common.types import Needs, PromptRecord, RewardOutput, TextSample
from visual_grpo.rewards.segmentation import DEFAULT, PointPrompt, build_segmenter, true_box_and_points
from visual_grpo.rewards.segmentation.answer import Answer, AnswerError, draw_answer, parse_answer

_MOST, _SPACING = 4, 0.05
"""Most negatives that the segmenter gets, and their least distance as a share of the image's shorter side."""
Embedded = tuple[Tensor, Any]
"""An image, uint8 [3, H, W], and its embedding by the segmenter."""
WEIGHTS = {"iou": 1.0, "contrast": 0.5, "placement": 0.2, "number": 0.05, "format": 0.1, "box": 0.0, "points": 0.0}
"""The weight of each term in the reward.

iou, 0..1: IoU of the answer's mask with the true mask. contrast, -1..1: change of the IoU when the negatives are added
to the true points. placement, -1..1, number, -1..0, box and points, 0..1: `placement_term` and so on. format: 1 for an
answer that can be parsed, else 0.
"""


@dataclass(frozen=True, kw_only=True)
class Query:
    """The ground truth of a record's query."""

    truth: Tensor
    """Bool [H, W]: the true mask."""
    box: Box
    points: tuple[Point, ...]
    positive_mask: Tensor
    """Bool [H, W]: the segmenter's mask of the true points and box, without negative points."""

    @property
    def size(self) -> tuple[int, int]:
        return (self.truth.shape[0], self.truth.shape[1])

    @property
    def confused(self) -> Tensor:
        """Bool [H, W]: pixels that the segmenter wrongly adds to the object without negative points."""
        return self.positive_mask & ~self.truth


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The masks and terms of one answer."""

    answer: Answer | None
    """None if it cannot be parsed."""
    fault: str | None
    masks: Tensor
    """Bool [2, H, W]: without and with the negatives; empty if the answer cannot be parsed."""
    counts: tuple[tuple[int, int], tuple[int, int]]
    """Pixels in the intersection and the union of each mask with the truth, from which gIoU and cIoU are computed."""
    terms: Mapping[str, float] = field(default_factory=dict)


class NegativePointsReward:
    """The weighted sum of the terms of an answer in the format of ``rewards.segmentation.answer``.

    The contrast uses the true positive points, so that a policy cannot increase it by placing its own positive points
    badly. An answer that cannot be parsed scores lower than any other and has an empty mask. Parts: ``gIoU`` and
    ``gIoU_without`` (mean IoU with and without the negatives), every other term, ``truncated`` and ``malformed``.
    Ratios: ``cIoU`` and ``cIoU_without``, sums of intersections over sums of unions. Image embeddings are in an LRU
    cache, shared by all records of an image; the segmenter gets all prompts of a record in one batch.
    """

    needs = Needs(target=True)
    measure = ("gIoU", "gIoU")

    def __init__(
        self,
        *,
        segmenter: Mapping[str, Any] | None = None,
        weights: Mapping[str, float] | None = None,
        think: bool = False,
        cache: int = 256,
    ) -> None:
        """
        Args:
            segmenter: a ``kind`` with its options, or ``function: package.module:name``; None = the watershed.
            weights: of the terms, where they differ from `WEIGHTS`.
            think: require reasoning in ``<think>`` tags before the answer.
            cache: image embeddings that are kept; SAM 2 needs about 16 MB each, the watershed 24 bytes per pixel.
        """
        self.segmenter = build_segmenter(DEFAULT if segmenter is None else segmenter)
        if unknown := [term for term in weights or {} if term not in WEIGHTS]:
            hint = nearest_hint(unknown[0], WEIGHTS)
            raise UserError(f"reward negative_points: {unknown[0]!r} in weights is none of {', '.join(WEIGHTS)}.{hint}")
        self.weights = {**WEIGHTS, **(weights or {})}
        for term, weight in self.weights.items():
            if not isinstance(weight, int | float):
                raise UserError(f"reward negative_points: the weight of {term} must be a number, got {weight!r}")
        self.think = think
        self._images: LRUCache[str, Embedded] = LRUCache(cache)
        self._queries: LRUCache[tuple[Path, Path | None], Query] = LRUCache(cache)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[TextSample]) -> RewardOutput:
        judged: dict[int, Judgement] = {}
        for name in dict.fromkeys(record.id for record in prompts):
            rows = [row for row, record in enumerate(prompts) if record.id == name]
            (_, embedding), query = self._prepare(prompts[rows[0]])
            judged |= zip(rows, self._judge(embedding, query, [samples[row] for row in rows]), strict=True)
        return self._output([judged[row] for row in range(len(prompts))])

    def check_machine(self) -> None:
        if hasattr(self.segmenter, "check_machine"):
            self.segmenter.check_machine()

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        """Refuses records without an image, box or points, which ``data.task=segmentation`` prepares."""
        for record in records:
            missing = [key for key in ("box", "points") if key not in record.metadata]
            if len(record.source_images) != 1 or missing:
                raise UserError(
                    f"reward negative_points: record {record.id!r} has {len(record.source_images)} source images and"
                    f" lacks {missing or 'nothing'} in its metadata; it needs one image, box and points."
                    " Prepare the data with data.task=segmentation"
                )

    def picture(self, record: PromptRecord, sample: TextSample) -> Tensor:
        """uint8 [3, h, w]: the image with truth and answer, and the masks without and with the negatives."""
        (pixels, embedding), query = self._prepare(record)
        (judgement,) = self._judge(embedding, query, [sample])
        return draw_answer(pixels, query.truth, judgement.answer, judgement.fault, judgement.masks)

    def masks(self, pixels: Tensor, samples: Sequence[TextSample]) -> list[Tensor | None]:
        """The mask, bool [H, W], of each answer about an image, uint8 [3, H, W], as the reward judges it; no truth is
        needed. None for an answer that cannot be parsed."""
        size = (pixels.shape[1], pixels.shape[2])
        parsed = [self._parse(sample, size) for sample in samples]
        prompts = [
            replace(answer.prompt, negatives=self._used_negatives(answer, size))
            for answer in parsed
            if isinstance(answer, Answer)
        ]
        masks = iter(self.segmenter.masks(self.segmenter.embed(pixels), prompts) if prompts else ())
        return [next(masks) if isinstance(answer, Answer) else None for answer in parsed]

    def _prepare(self, record: PromptRecord) -> tuple[Embedded, Query]:
        """The record's image, cached by content because records may share it, and the ground truth of its query."""
        content = record.source_images[0].read_bytes()
        image = cached(self._images, lambda content: hashlib.sha256(content).hexdigest())(self._embed)(content)
        by_files = cached(self._queries, lambda record, embedding: (record.source_images[0], record.target_image))
        return image, by_files(self._read_query)(record, image[1])

    def _embed(self, content: bytes) -> Embedded:
        pixels = to_tensor(read_image(io.BytesIO(content)))
        return pixels, self.segmenter.embed(pixels)

    def _read_query(self, record: PromptRecord, embedding: Any) -> Query:
        assert record.target_image is not None
        box, points = true_box_and_points(record)
        (positive_mask,) = self.segmenter.masks(embedding, [PointPrompt(positives=points, box=box)])
        return Query(truth=read_mask(record.target_image), box=box, points=points, positive_mask=positive_mask)

    def _judge(self, embedding: Any, query: Query, samples: Sequence[TextSample]) -> list[Judgement]:
        """Judges all answers to a query with one batch of segmenter prompts."""
        parsed = [self._parse(sample, query.size) for sample in samples]
        usable = [(a, self._used_negatives(a, query.size)) for a in parsed if isinstance(a, Answer)]
        prompts = [prompt for answer, used in usable for prompt in _prompts(answer, used, query)]
        masks = self.segmenter.masks(embedding, prompts).view(len(usable), 3, *query.size)
        judged = iter([self._judgement(query, *pair, mask) for pair, mask in zip(usable, masks, strict=True)])
        return [next(judged) if isinstance(answer, Answer) else _unusable(answer, query) for answer in parsed]

    def _parse(self, sample: TextSample, size: tuple[int, int]) -> Answer | AnswerError:
        try:
            answer = parse_answer(sample, size)
        except AnswerError as error:
            return error
        if self.think and not answer.thought:
            return AnswerError("no_answer", "no <think>...</think> before the answer")
        return answer

    def _used_negatives(self, answer: Answer, size: tuple[int, int]) -> tuple[Point, ...]:
        return spaced(answer.negatives, _MOST, _SPACING * min(size))

    def _judgement(self, query: Query, answer: Answer, used: tuple[Point, ...], masks: Tensor) -> Judgement:
        """``masks``: bool [3, H, W] of the answer without and with its negatives, and of the true points with them."""
        without, with_ = _counts(masks[0], query.truth), _counts(masks[1], query.truth)
        terms = {
            "iou": _iou(with_),
            "contrast": _iou(_counts(masks[2], query.truth)) - _iou(_counts(query.positive_mask, query.truth)),
            "placement": placement_term(answer.negatives, query.confused, query.truth),
            "number": number_term(answer.negatives, used),
            "format": 1.0,
            "box": box_term(answer.box, query.box, query.size),
            "points": points_term(answer.points, query.points, query.box, query.size),
        }
        return Judgement(answer=answer, fault=None, masks=masks[:2], counts=(without, with_), terms=terms)

    def _output(self, judged: Sequence[Judgement]) -> RewardOutput:
        weights = self.weights
        # The lowest possible total of a usable answer: these three terms at -1, the others at 0.
        floor = -(weights["contrast"] + weights["placement"] + weights["number"])
        totals = [sum(weights[t] * j.terms[t] for t in weights) if j.answer else floor for j in judged]
        terms = {term: _column(j.terms.get(term, 0.0) for j in judged) for term in weights if term != "iou"}
        without, with_ = ([judgement.counts[side] for judgement in judged] for side in (0, 1))
        return RewardOutput(
            values=_column(totals),
            parts={
                "gIoU": _column(map(_iou, with_)),
                "gIoU_without": _column(map(_iou, without)),
                **terms,
                "truncated": _column(j.fault == "truncated" for j in judged),
                "malformed": _column(j.fault not in (None, "truncated") for j in judged),
            },
            ratios={
                "cIoU": (_column(i for i, _ in with_), _column(u for _, u in with_)),
                "cIoU_without": (_column(i for i, _ in without), _column(u for _, u in without)),
            },
        )


def _unusable(error: AnswerError, query: Query) -> Judgement:
    empty = torch.zeros(2, *query.size, dtype=torch.bool)
    nothing = _counts(empty[0], query.truth)
    return Judgement(answer=None, fault=error.fault, masks=empty, counts=(nothing, nothing))


def _prompts(answer: Answer, used: tuple[Point, ...], query: Query) -> tuple[PointPrompt, PointPrompt, PointPrompt]:
    """The answer without and with its negatives, and the true points with its negatives."""
    true = PointPrompt(positives=query.points, negatives=used, box=query.box)
    return replace(answer.prompt, negatives=()), replace(answer.prompt, negatives=used), true


def _counts(mask: Tensor, truth: Tensor) -> tuple[int, int]:
    """Number of pixels in the intersection and in the union."""
    return int((mask & truth).sum()), int((mask | truth).sum())


def _iou(counts: tuple[int, int]) -> float:
    return counts[0] / counts[1]


def _column(values: Any) -> Tensor:
    return torch.tensor([float(value) for value in values])


_CANVAS = 840
"""Side in pixels of Seg-Zero's images, to which its thresholds refer."""
_BOX_IOU, _BOX_L1, _POINT_L1 = 0.5, 10 / _CANVAS, 100 / _CANVAS
"""Seg-Zero's thresholds (arXiv 2503.06520), distances as shares of an image's side."""


def placement_term(negatives: Sequence[Point], confused: Tensor, truth: Tensor) -> float:
    """Share of the negatives inside ``confused`` minus share inside ``truth`` (bool [H, W]), -1..1.

    No negatives score 1 if ``confused`` is empty, so that none is needed, else 0.
    """
    if not negatives:
        return float(not confused.any())
    return _share_inside(negatives, confused) - _share_inside(negatives, truth)


def spaced(negatives: Sequence[Point], cap: int, spacing: float) -> tuple[Point, ...]:
    """The first ``cap`` negatives, skipping those closer than ``spacing`` pixels to one that was kept before."""
    kept: list[Point] = []
    for point in negatives:
        if len(kept) < cap and all(math.dist(point, other) >= spacing for other in kept):
            kept.append(point)
    return tuple(kept)


def number_term(negatives: Sequence[Point], kept: Sequence[Point]) -> float:
    """Minus the share of the negatives that were dropped as too many or too close, -1..0."""
    return (len(kept) - len(negatives)) / max(len(negatives), 1)


def box_term(box: Box, truth: Box, size: tuple[int, int]) -> float:
    """Seg-Zero's box term: 0.5 for an IoU above 0.5, plus 0.5 for a mean L1 distance below 10 of 840 pixels."""
    sides = (size[1], size[0]) * 2
    distance = sum(abs(a - b) / side for a, b, side in zip(box, truth, sides, strict=True)) / len(sides)
    return (int(_box_iou(box, truth) > _BOX_IOU) + int(distance < _BOX_L1)) / 2


def points_term(points: Sequence[Point], truth_points: Sequence[Point], truth: Box, size: tuple[int, int]) -> float:
    """Seg-Zero's point term: 1 if all points are in the true box and their mean distance to the nearest true point is
    below 100 of 840 pixels, else 0."""
    inside = all(truth[0] <= x <= truth[2] and truth[1] <= y <= truth[3] for x, y in points)
    scaled = [(x / size[1], y / size[0]) for x, y in truth_points]
    distances = [min(math.dist((x / size[1], y / size[0]), other) for other in scaled) for x, y in points]
    return float(inside and sum(distances) / len(distances) < _POINT_L1)


def _share_inside(points: Sequence[Point], mask: Tensor) -> float:
    return sum(bool(mask[_pixel(y, mask.shape[0]), _pixel(x, mask.shape[1])]) for x, y in points) / len(points)


def _pixel(value: float, side: int) -> int:
    return min(max(round(value), 0), side - 1)


def _box_iou(a: Box, b: Box) -> float:
    """IoU of boxes with inclusive corners."""
    overlap = _area(max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
    return overlap / (_area(*a) + _area(*b) - overlap)


def _area(x1: float, y1: float, x2: float, y2: float) -> float:
    return max(x2 - x1 + 1, 0.0) * max(y2 - y1 + 1, 0.0)
