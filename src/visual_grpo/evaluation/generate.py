"""Draws images at fixed seeds, keeps them as PNG and scores exactly the pixels that were kept."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pandas as pd
import torch

from visual_grpo.config import Parameters, SamplerConfig
from visual_grpo.errors import UserError
from visual_grpo.evaluation.seeds import image_seed
from visual_grpo.images import to_pil
from visual_grpo.types import PromptRecord, Scorer, Scores

if TYPE_CHECKING:
    from torch import Tensor

SCORES = "scores.parquet"
SPLITS = ("held_out", "eval")


class ImageGenerator(Protocol):
    """A policy at inference."""

    def generate(
        self, prompts: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig
    ) -> Sequence[Tensor]:
        """One uint8 [3, height, width] image per prompt, each a function of its own prompt and seed only."""
        ...


class Advance(Protocol):
    """Called after every batch with the number of images done (``console.progress(...).advance``)."""

    def __call__(self, n: int = 1, **fields: float) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """One image to draw."""

    split: str
    record: PromptRecord
    index: int
    """Which image of this prompt: 0, 1, ..."""
    seed: int


def conditions(config: Parameters, *, model: str, dataset: str) -> dict[str, Any]:
    """Everything but the adapter that images and scores depend on: equal for two results that pair.

    ``model`` and ``dataset`` are digests.
    """
    tree = config.model_dump(mode="json")
    return {
        "seed": config.seed,
        "model": {"digest": model, "dtype": config.model.dtype},
        "dataset": dataset,
        "data": {side: tree["data"][side] for side in ("height", "width")},
        "sampling": {name: sampler.model_dump(mode="json") for name, sampler in config.judged_samplers.items()},
        "flow": tree["policy"]["flow"],
        # Not their weights: a total can be taken anew, a score cannot.
        "rewards": {name: {"function": r.function, "options": r.options} for name, r in config.rewards.items()},
        "evaluation": {name: tree["evaluation"][name] for name in ("images_per_prompt", "max_prompts")},
    }


def plan_images(
    splits: Mapping[str, Iterable[PromptRecord]],
    *,
    seed: int,
    images_per_prompt: int,
    max_prompts: int | None,
) -> list[Request]:
    """Every image to draw at each sampler: ``images_per_prompt`` of each distinct prompt of each split."""
    return [
        Request(split=split, record=record, index=index, seed=image_seed(seed, record.id, index))
        for split, records in splits.items()
        for record in distinct_prompts(records, max_prompts)
        for index in range(images_per_prompt)
    ]


def distinct_prompts(records: Iterable[PromptRecord], limit: int | None) -> list[PromptRecord]:
    """The first record (by id) of each distinct prompt, at most ``limit`` of them, in order of id.

    Records of one prompt ask for the same image: counting each would claim more evidence than there
    is. A limit keeps the prompts whose ids hash lowest, so that the choice favours no part of the data.
    """
    first: dict[tuple[str, tuple[Path, ...]], PromptRecord] = {}
    for record in records:
        key = (record.prompt, record.source_images)
        if key not in first or record.id < first[key].id:
            first[key] = record
    chosen = sorted(first.values(), key=lambda record: hashlib.sha256(record.id.encode()).digest())[:limit]
    return sorted(chosen, key=lambda record: record.id)


def draw_and_score(
    policy: ImageGenerator,
    scorer: Scorer,
    requests: Sequence[Request],
    samplers: Mapping[str, SamplerConfig],
    folder: Path,
    *,
    batch_size: int,
    facts: Mapping[str, Any],
    advance: Advance | None = None,
) -> pd.DataFrame:
    """Writes ``<sampler>/<id>_<index>.png`` and ``scores.parquet`` into ``folder``; returns the scores.

    Columns: sampler, split, id, prompt, index, seed, file, total, reward/<name>, part/<reward>/<part>;
    NaN = unscored. ``facts`` (what the images depend on) and the rewards' weights travel in
    ``DataFrame.attrs``, which Parquet keeps. Images of different samplers share their seeds.
    """
    if not requests:
        raise UserError(
            "no eval and no held-out prompts to draw images for: raise data.eval_share or data.held_out_share"
        )
    frames: list[pd.DataFrame] = []
    weights: dict[str, float] = {}
    for sampler, settings in samplers.items():
        (folder / sampler).mkdir(parents=True, exist_ok=True)
        for batch in _batches(requests, batch_size):
            records = [request.record for request in batch]
            images = policy.generate(records, [request.seed for request in batch], settings)
            check_images(images, records)
            scores = scorer(records, images)
            weights = dict(scores.weights)
            frames.append(_rows(sampler, batch, scores))
            for file, image in zip(frames[-1]["file"], images, strict=True):
                to_pil(image).save(folder / file)
            if advance is not None:
                advance(len(batch), reward=float(scores.total.nanmean()))
    table = pd.concat(frames, ignore_index=True)
    table.attrs = {"facts": dict(facts), "weights": weights}
    table.to_parquet(folder / SCORES, index=False)
    return table


def check_images(images: Sequence[Any], records: Sequence[PromptRecord]) -> None:
    """Refuses anything but one uint8 [3, height, width] tensor per record."""
    if len(images) != len(records):
        raise ValueError(f"the policy was asked for {len(records)} images and returned {len(images)}")
    for image, record in zip(images, records, strict=True):
        tensor = isinstance(image, torch.Tensor)
        if not tensor or image.dtype != torch.uint8 or image.ndim != 3 or len(image) != 3:
            got = f"{image.dtype} {list(image.shape)}" if tensor else type(image).__name__
            raise TypeError(f"record {record.id!r}: expected a uint8 tensor [3, height, width], got {got}")


def file_stem(record_id: str) -> str:
    """A file name for an id: itself where that is safe, else a cleaned one made unique by a hash.

    Upper case counts as unsafe because some file systems ignore case.
    """
    stem = re.sub(r"[^\w.-]", "_", record_id)[:60]
    if stem == record_id == record_id.lower():
        return stem
    return f"{stem}-{hashlib.sha256(record_id.encode()).hexdigest()[:8]}"


def read_scores(folder: Path) -> pd.DataFrame:
    """The scores that ``draw_and_score`` wrote into ``folder``, with their ``attrs``."""
    return pd.read_parquet(folder / SCORES)


def _rows(sampler: str, batch: Sequence[Request], scores: Scores) -> pd.DataFrame:
    frame = pd.DataFrame(
        [
            {
                "sampler": sampler,
                "split": request.split,
                "id": request.record.id,
                "prompt": request.record.prompt,
                "index": request.index,
                "seed": request.seed,
                "file": f"{sampler}/{file_stem(request.record.id)}_{request.index}.png",
            }
            for request in batch
        ]
    )
    columns = {"total": scores.total}
    columns |= {f"reward/{name}": values for name, values in scores.rewards.items()}
    columns |= {f"part/{name}": values for name, values in scores.parts.items()}
    return frame.assign(**{name: values.cpu().numpy() for name, values in columns.items()})


def _batches(requests: Sequence[Request], size: int) -> Iterator[list[Request]]:
    remaining = iter(requests)
    while batch := list(itertools.islice(remaining, size)):
        yield batch
