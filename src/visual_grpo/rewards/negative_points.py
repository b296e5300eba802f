"""Judges an answer by the mask that a segmenter makes of it, and by what its negative points change."""

from __future__ import annotations

import hashlib
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cachetools import LRUCache, cached
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.images import read_image, read_mask, to_tensor
from visual_grpo.rewards import point_terms
from visual_grpo.rewards.point_pictures import draw_answer
from visual_grpo.segmentation.answer import FAULTS, Answer, AnswerError, parse_answer
from visual_grpo.segmentation.build import DEFAULT, build_segmenter
from visual_grpo.segmentation.segmenter import Box, Point, PointPrompt
from visual_grpo.types import PromptRecord, RewardOutput, TextSample

TERMS = ("iou", "contrast", "placement", "number", "format", "box", "points")


class Weights(BaseModel):
    """What each term counts for in the reward."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    iou: float = Field(1.0, description="of the answer's mask with the truth, 0..1")
    contrast: float = Field(0.5, description="what the negatives change of the IoU of the truth's own points, -1..1")
    placement: float = Field(0.2, description="negatives in the confused area minus those in the truth, -1..1")
    number: float = Field(0.05, description="minus the share of negatives too many or too close, -1..0")
    format: float = Field(0.1, description="1 for an answer that can be used, else 0")
    box: float = Field(0.0, description="Seg-Zero's box term, 0..1")
    points: float = Field(0.0, description="Seg-Zero's point term, 0 or 1")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """An image as the segmenter knows it."""

    image: Tensor
    """uint8 [3, H, W]."""
    embedding: Any


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a record means by its query."""

    truth: Tensor
    """Bool [H, W]."""
    box: Box
    points: tuple[Point, ...]
    alone: Tensor
    """Bool [H, W]: the mask of the truth's own points and box, without any negative."""

    @property
    def size(self) -> tuple[int, int]:
        return (self.truth.shape[0], self.truth.shape[1])

    @property
    def confused(self) -> Tensor:
        """Bool [H, W]: what the segmenter takes for the truth unless it is told not to."""
        return self.alone & ~self.truth


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """One answer's masks and terms."""

    answer: Answer | None
    """None = it cannot be used."""
    fault: str | None
    masks: Tensor
    """Bool [2, H, W]: without and with the negatives; empty masks for an answer that cannot be used."""
    counts: tuple[tuple[int, int], tuple[int, int]]
    """Pixels in the intersection and the union of either mask with the truth: gIoU and cIoU are made of them."""
    terms: Mapping[str, float] = field(default_factory=dict)


class NegativePointsReward:
    """Weighted terms of an answer in the format of ``segmentation.answer``.

    The contrast is measured from the truth's own points, so that a policy cannot earn it by pointing at the wrong thing
    first. An answer that cannot be used gets less than any other can, and no mask. Parts: ``gIoU`` and
    ``gIoU_without`` (mean IoU with and without the negatives), every term, and ``truncated`` and ``malformed``;
    ``cIoU`` and ``cIoU_without`` are sums of intersections over sums of unions. An image is embedded once while it is
    among the ``cache`` last used, however many records ask about it, and a record's prompts are answered in one batch.
    """

    needs_target = True

    def __init__(
        self,
        *,
        segmenter: Mapping[str, Any] | None = None,
        weights: Mapping[str, float] | None = None,
        cap: int = 4,
        spacing: float = 0.05,
        think: bool = False,
        cache: int = 256,
    ) -> None:
        """
        Args:
            segmenter: options of ``segmentation.build``; None = the watershed.
            weights: of the terms, where they differ from `Weights`.
            cap: negatives that are used; further ones only cost.
            spacing: least distance between two negatives, as a share of the image's shorter side.
            think: an answer in the right format has its reasoning in ``<think>`` tags before it.
            cache: images whose embeddings are kept; SAM2's take about 16 MB each, the watershed's 24 bytes a pixel.
        """
        if cap < 1 or not 0 <= spacing < 1 or cache < 1:
            raise UserError(
                f"reward negative_points: cap and cache must be at least 1 and spacing a share below 1,"
                f" got cap {cap}, cache {cache}, spacing {spacing}"
            )
        self.segmenter = build_segmenter(DEFAULT if segmenter is None else segmenter)
        self.weights = _checked_weights(weights or {})
        self.cap, self.spacing, self.think = cap, spacing, think
        self._seen: LRUCache[str, Seen] = LRUCache(cache)
        self._scenes: LRUCache[tuple[Path, Path | None], Scene] = LRUCache(cache)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[TextSample]) -> RewardOutput:
        judged: dict[int, Judgement] = {}
        rows_of: defaultdict[str, list[int]] = defaultdict(list)
        for row, record in enumerate(prompts):
            rows_of[record.id].append(row)
        for rows in rows_of.values():
            seen, scene = self._look(prompts[rows[0]])
            judged |= zip(rows, self._judge(seen, scene, [samples[row] for row in rows]), strict=True)
        return self._output([judged[row] for row in range(len(prompts))])

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
        """uint8 [3, h, w]: the image with the truth and the answer, the mask without and with the negatives."""
        seen, scene = self._look(record)
        (judgement,) = self._judge(seen, scene, [sample])
        return draw_answer(seen.image, scene.truth, judgement.answer, judgement.fault, judgement.masks)

    def _look(self, record: PromptRecord) -> tuple[Seen, Scene]:
        """The record's image by its content, since several records may show the same, and what its query means."""
        content = record.source_images[0].read_bytes()
        seen = cached(self._seen, lambda content: hashlib.sha256(content).hexdigest())(self._see)(content)
        by_files = cached(self._scenes, lambda record, seen: (record.source_images[0], record.target_image))
        return seen, by_files(self._understand)(record, seen)

    def _see(self, content: bytes) -> Seen:
        image = to_tensor(read_image(io.BytesIO(content)))
        return Seen(image=image, embedding=self.segmenter.embed(image))

    def _understand(self, record: PromptRecord, seen: Seen) -> Scene:
        assert record.target_image is not None
        x1, y1, x2, y2 = record.metadata["box"]
        points = tuple((float(x), float(y)) for x, y in record.metadata["points"])
        alone = self.segmenter.masks(seen.embedding, [PointPrompt(positives=points, box=(x1, y1, x2, y2))])[0]
        return Scene(truth=read_mask(record.target_image), box=(x1, y1, x2, y2), points=points, alone=alone)

    def _judge(self, seen: Seen, scene: Scene, samples: Sequence[TextSample]) -> list[Judgement]:
        """Each answer's terms; one batch of prompts for all of them."""
        parsed = [self._parse(sample, scene) for sample in samples]
        usable = [answer for answer in parsed if isinstance(answer, Answer)]
        kept = [self._kept(answer, scene) for answer in usable]
        prompts = [prompt for answer, own in zip(usable, kept, strict=True) for prompt in _prompts(answer, own, scene)]
        masks = iter(self.segmenter.masks(seen.embedding, prompts).view(len(usable), 3, *scene.size))
        negatives = iter(kept)
        return [
            self._judged(scene, answer, next(negatives), next(masks))
            if isinstance(answer, Answer)
            else _unusable(answer, scene)
            for answer in parsed
        ]

    def _parse(self, sample: TextSample, scene: Scene) -> Answer | AnswerError:
        try:
            answer = parse_answer(sample, scene.size)
        except AnswerError as error:
            return error
        if self.think and not answer.thought:
            return AnswerError("no_answer", "no <think>...</think> before the answer")
        return answer

    def _kept(self, answer: Answer, scene: Scene) -> tuple[Point, ...]:
        return point_terms.spaced(answer.negatives, self.cap, self.spacing * min(scene.size))

    def _judged(self, scene: Scene, answer: Answer, kept: tuple[Point, ...], masks: Tensor) -> Judgement:
        """``masks``: bool [3, H, W] of the answer without and with its negatives, of the truth's points with them."""
        without, with_ = _counts(masks[0], scene.truth), _counts(masks[1], scene.truth)
        terms = {
            "iou": _share(with_),
            "contrast": _share(_counts(masks[2], scene.truth)) - _share(_counts(scene.alone, scene.truth)),
            "placement": point_terms.placement(answer.negatives, scene.confused, scene.truth),
            "number": point_terms.number(answer.negatives, kept),
            "format": 1.0,
            "box": point_terms.box_term(answer.box, scene.box, scene.size),
            "points": point_terms.points_term(answer.points, scene.points, scene.box, scene.size),
        }
        return Judgement(answer=answer, fault=None, masks=masks[:2], counts=(without, with_), terms=terms)

    def _output(self, judged: Sequence[Judgement]) -> RewardOutput:
        weights = self.weights.model_dump()
        # No usable answer can do worse than all its terms at their lowest.
        floor = -(weights["contrast"] + weights["placement"] + weights["number"])
        totals = [sum(weights[t] * j.terms[t] for t in TERMS) if j.answer else floor for j in judged]
        terms = {term: _column(j.terms.get(term, 0.0) for j in judged) for term in TERMS if term != "iou"}
        without, with_ = ([judgement.counts[side] for judgement in judged] for side in (0, 1))
        return RewardOutput(
            values=_column(totals),
            parts={
                "gIoU": _column(map(_share, with_)),
                "gIoU_without": _column(map(_share, without)),
                **terms,
                "truncated": _column(j.fault == "truncated" for j in judged),
                "malformed": _column(j.fault in FAULTS[1:] for j in judged),
            },
            ratios={
                "cIoU": (_column(i for i, _ in with_), _column(u for _, u in with_)),
                "cIoU_without": (_column(i for i, _ in without), _column(u for _, u in without)),
            },
        )


def _unusable(error: AnswerError, scene: Scene) -> Judgement:
    empty = torch.zeros(2, *scene.size, dtype=torch.bool)
    nothing = _counts(empty[0], scene.truth)
    return Judgement(answer=None, fault=error.fault, masks=empty, counts=(nothing, nothing))


def _prompts(answer: Answer, kept: tuple[Point, ...], scene: Scene) -> tuple[PointPrompt, PointPrompt, PointPrompt]:
    own = PointPrompt(positives=answer.points, negatives=kept, box=answer.box)
    true = PointPrompt(positives=scene.points, negatives=kept, box=scene.box)
    return own.without_negatives(), own, true


def _counts(mask: Tensor, truth: Tensor) -> tuple[int, int]:
    """Pixels in the intersection and in the union."""
    return int((mask & truth).sum()), int((mask | truth).sum())


def _share(counts: tuple[int, int]) -> float:
    return counts[0] / counts[1]


def _column(values: Any) -> Tensor:
    return torch.tensor([float(value) for value in values])


def _checked_weights(weights: Mapping[str, float]) -> Weights:
    try:
        return Weights(**weights)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(
            f"reward negative_points: weights has {problems}. Its terms are {', '.join(TERMS)}, each a number"
        ) from error
