"""Generates samples at fixed seeds and scores them; saves each image or video as scored, of a text sample a picture."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import pandas as pd

from visual_grpo.common.errors import UserError
from visual_grpo.common.images import described, is_image
from visual_grpo.common.types import PromptRecord, Sample, Scores, TextSample, VideoSample, begin_scoring
from visual_grpo.common.videos import encoded_video, read_sample
from visual_grpo.config import EvaluationConfig, SamplerConfig
from visual_grpo.evaluation.pictures import save, suffix_of
from visual_grpo.rewards.combine import RewardSet

SCORES = "scores.parquet"
SPLITS = ("held_out", "eval")


class SampleGenerator(Protocol):
    """A `Model`, or a `DistributedModel`."""

    def generate(
        self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig
    ) -> Sequence[Sample]:
        """Generates one sample per record, each a function of that record and its seed only."""
        ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sample to generate."""

    record: PromptRecord
    seed: int
    index: int = 0
    """Number of the sample among those of its prompt: 0, 1, ..."""
    split: str = ""


Asked = Mapping[str, tuple[SamplerConfig, Sequence[Request]]]
"""Name of a sampler -> its settings and what it is to generate."""
Generated = tuple[Sequence[Request], Sequence[Sample]]
"""Requests with the sample of each."""


def image_seed(seed: int, record_id: str, index: int) -> int:
    """Returns a seed in [0, 2**63) for image ``index`` of a record: the same on every machine and Python version."""
    key = f"{seed}\0{index}\0{record_id}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def requests(records: Iterable[PromptRecord], samples: int, seed: int, split: str = "") -> list[Request]:
    """Asks for ``samples`` samples of each record; a record's samples are neighbours."""
    return [
        Request(record=record, seed=image_seed(seed, record.id, index), index=index, split=split)
        for record in records
        for index in range(samples)
    ]


def plan_images(
    splits: Mapping[str, Iterable[PromptRecord]],
    settings: EvaluationConfig,
    samplers: Mapping[str, SamplerConfig],
    controls: Mapping[str, SamplerConfig] = MappingProxyType({}),
) -> Asked:
    """Requests samples of each distinct prompt of each split, at shared seeds; of ``controls`` held-out ones only."""
    asked = [
        request
        for split, records in splits.items()
        for request in requests(
            distinct_prompts(records, settings.max_prompts), settings.images_per_prompt, settings.seed, split
        )
    ]
    held_out = [request for request in asked if request.split == "held_out"]
    plan = {name: (sampler, asked) for name, sampler in samplers.items()}
    return plan | {name: (sampler, held_out) for name, sampler in controls.items()}


def distinct_prompts(records: Iterable[PromptRecord], limit: int | None) -> list[PromptRecord]:
    """Selects the first record (by id) of each distinct prompt, at most ``limit`` of them, in order of id.

    Records with the same prompt ask for the same image and are not independent evidence. A limit keeps the records
    whose ids have the lowest hashes, so that the choice is not biased towards a part of the data.
    """
    first: dict[tuple[str, tuple[Path, ...]], PromptRecord] = {}
    for record in records:
        key = (record.prompt, record.source_images)
        if key not in first or record.id < first[key].id:
            first[key] = record
    chosen = sorted(first.values(), key=lambda record: hashlib.sha256(record.id.encode()).digest())[:limit]
    return sorted(chosen, key=lambda record: record.id)


def generate_batches(
    policy: SampleGenerator, asked: Sequence[Request], sampler: SamplerConfig, batch_size: int
) -> Iterator[Generated]:
    """Generates the samples in batches.

    Raises:
        ValueError, TypeError: not one uint8 [3, height, width] tensor, `VideoSample` or `TextSample` per request.
    """
    for start in range(0, len(asked), batch_size):
        batch = asked[start : start + batch_size]
        samples = policy.generate([r.record for r in batch], [r.seed for r in batch], sampler)
        if len(samples) != len(batch):
            raise ValueError(f"the policy was asked for {len(batch)} samples and returned {len(samples)}")
        for request, sample in zip(batch, samples, strict=True):
            if not isinstance(sample, TextSample | VideoSample) and not is_image(sample):
                raise TypeError(
                    f"record {request.record.id!r}: expected a uint8 tensor [3, height, width], a VideoSample or a"
                    f" TextSample, got {described(sample)}"
                )
        yield batch, samples


def generate_and_score(
    policy: SampleGenerator,
    scorer: RewardSet,
    asked: Asked,
    folder: Path,
    *,
    batch_size: int,
    advance: Callable[[int], object] | None = None,
) -> pd.DataFrame:
    """Writes ``<sampler>/<id>_<index>.png`` (videos: .webp) and ``scores.parquet`` into ``folder``; returns the scores.

    Columns: sampler, split, id, prompt, unit (equal for records that are held out together), index, seed, file, total,
    reward/<name>, part/<reward>/<part>, numerator/<reward>/<ratio> and denominator/<reward>/<ratio>; NaN = unscored.
    Optional columns: ``answer``, the text of a text sample, and, relative to ``folder``, ``source``, the images that
    were edited, and ``target`` (the picture of a text sample already shows its image). ``DataFrame.attrs``, which
    Parquet preserves, has the weights, judges, measures and guards of the rewards, and which compare samples.
    ``advance`` is called after every batch with the number of samples.
    """
    frames: list[pd.DataFrame] = []
    scored = False
    for sampler, (settings, requested) in asked.items():
        if not requested:  # Controls, where nothing is held out.
            continue
        (folder / sampler).mkdir(parents=True, exist_ok=True)
        batches = generate_batches(policy, requested, settings, batch_size)
        for batch, samples, scores in _scored(scorer, _whole_groups(batches) if scorer.needs_whole_groups else batches):
            frames.append(_rows(sampler, batch, samples, scores, folder))
            scored = scored or not bool(scores.total.isnan().all())
            if not scored and _can_be_scored(scorer, batch):
                _check_any_scored(pd.concat(frames), scorer.comparing)
            for file, request, sample in zip(frames[-1]["file"], batch, samples, strict=True):
                # Level 1: a third of the time, a third more bytes.
                save(request.record, sample, scorer, folder / file, compress_level=1)
            if advance is not None:
                advance(len(batch))
    table = pd.concat(frames, ignore_index=True)
    _check_any_scored(table, scorer.comparing)
    table = table.drop(columns=[column for column in ("answer", "source", "target") if table[column].isna().all()])
    return _write_scores(table, scorer, folder)


def write_no_scores(scorer: RewardSet, folder: Path) -> None:
    """Writes what ``generate_and_score`` would if it were asked for no sample."""
    kinds = {
        **dict.fromkeys(("sampler", "split", "id", "prompt", "unit", "file"), "object"),
        **dict.fromkeys(("index", "seed"), "int64"),
        **dict.fromkeys(("total", *(f"reward/{name}" for name in scorer.weights)), "float32"),
    }
    table = pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in kinds.items()})
    _write_scores(table, scorer, folder)


def _write_scores(table: pd.DataFrame, scorer: RewardSet, folder: Path) -> pd.DataFrame:
    table.attrs = {"weights": dict(scorer.weights), "judges": scorer.judges}
    table.attrs |= {"measures": scorer.measures, "guards": scorer.guards, "comparing": scorer.comparing}
    table.to_parquet(folder / SCORES, index=False)
    return table


def read_scores(folder: Path) -> pd.DataFrame:
    """Reads the scores that ``generate_and_score`` wrote into ``folder``, with their ``attrs``."""
    return pd.read_parquet(folder / SCORES)


def file_stem(record_id: str) -> str:
    """Returns a file name for an id: the id if it is safe, else a cleaned version with a hash.

    Upper case is unsafe because some file systems ignore case.
    """
    stem = re.sub(r"[^\w.-]", "_", record_id)[:60]
    if stem == record_id == record_id.lower():
        return stem
    return f"{stem}-{hashlib.sha256(record_id.encode()).hexdigest()[:8]}"


def _scored(
    scorer: RewardSet, batches: Iterable[Generated]
) -> Iterator[tuple[Sequence[Request], Sequence[Sample], Scores]]:
    """Scores each batch while the next is generated, if a different process scores."""
    begun: tuple[Sequence[Request], Sequence[Sample], Callable[[], Scores]] | None = None
    for batch, samples in batches:
        if begun is not None:
            yield begun[0], begun[1], begun[2]()
        begun = batch, samples, begin_scoring(scorer, [request.record for request in batch], samples)
    if begun is not None:
        yield begun[0], begun[1], begun[2]()


def _whole_groups(batches: Iterable[Generated]) -> Iterator[Generated]:
    """Regroups samples into portions that hold all of a record."""
    held: list[tuple[Request, Sample]] = []
    for batch, samples in batches:
        held += zip(batch, samples, strict=True)
        last = held[-1][0].record.id
        whole = [pair for pair in held if pair[0].record.id != last]
        held = held[len(whole) :]
        if whole:
            yield [request for request, _ in whole], [sample for _, sample in whole]
    yield [request for request, _ in held], [sample for _, sample in held]


def _can_be_scored(scorer: RewardSet, batch: Sequence[Request]) -> bool:
    """False if a reward says that it scores none of these records, as in a dataset where only others ask for text."""
    try:
        scorer.check_records([request.record for request in batch])
    except UserError:
        return False
    return True


def _check_any_scored(table: pd.DataFrame, comparing: Sequence[str]) -> None:
    """``comparing``: the rewards that compare the samples of a prompt."""
    if table["total"].isna().all():
        empty = table.filter(regex="^reward/").isna().all()
        unscored = [*empty[empty].index.str.removeprefix("reward/")]
        alone = [name for name in unscored if name in comparing] if not table["index"].any() else []
        why = f". To compare samples, {', '.join(alone)} needs evaluation.images_per_prompt=2" if alone else ""
        raise UserError(
            f"none of {len(table)} samples could be scored, so that nothing could be compared;"
            f" unscored were: {', '.join(unscored)}{why}"
        )


def _target(record: PromptRecord, sample: Sample, folder: Path) -> str | None:
    """Returns the path of a sample's target relative to ``folder``, where a video is stored as samples are."""
    target = record.target_image
    if target is not None and target.is_dir():
        frames, target = target, folder / "targets" / f"{file_stem(record.id)}{suffix_of(sample)}"
        target.parent.mkdir(exist_ok=True)
        if not target.exists():
            target.write_bytes(encoded_video(read_sample(frames, sample.fps)))
    return None if target is None else os.path.relpath(target, folder)


def _rows(
    sampler: str, batch: Sequence[Request], samples: Sequence[Sample], scores: Scores, folder: Path
) -> pd.DataFrame:
    rows = []
    for request, sample in zip(batch, samples, strict=True):
        record, is_text = request.record, isinstance(sample, TextSample)
        # Relative paths stay valid if scores and prepared images are moved together.
        sources = [os.path.relpath(path, folder) for path in record.source_images]
        rows.append(
            {
                "sampler": sampler,
                "split": request.split,
                "id": record.id,
                "prompt": record.prompt,
                "unit": record.split_group or record.id,
                "index": request.index,
                "seed": request.seed,
                "file": f"{sampler}/{file_stem(record.id)}_{request.index}{suffix_of(sample)}",
                "answer": sample.text if is_text else None,
                "source": None if is_text else sources or None,
                "target": None if is_text else _target(record, sample, folder),
            }
        )
    columns = {"total": scores.total}
    columns |= {f"reward/{name}": values for name, values in scores.rewards.items()}
    columns |= {f"part/{name}": values for name, values in scores.parts.items()}
    columns |= {f"numerator/{name}": above for name, (above, _) in scores.ratios.items()}
    columns |= {f"denominator/{name}": below for name, (_, below) in scores.ratios.items()}
    return pd.DataFrame(rows).assign(**{name: values.cpu().numpy() for name, values in columns.items()})
