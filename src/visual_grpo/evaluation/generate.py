"""Generates samples at fixed seeds and scores them; saves each image as scored, or a picture of each text sample."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import pandas as pd

from visual_grpo.config import Parameters, SamplerConfig
from visual_grpo.errors import UserError
from visual_grpo.hardware.device import device_kind
from visual_grpo.images import described, is_image
from visual_grpo.importing import code_digest
from visual_grpo.option_files import option_files
from visual_grpo.types import Judge, PromptRecord, Sample, SampleGenerator, Scores, TextSample, begin_scoring

SCORES = "scores.parquet"
SPLITS = ("held_out", "eval")


class Advance(Protocol):
    """Called after every batch with the number of samples done (``console.progress(...).advance``)."""

    def __call__(self, n: int = 1, **fields: float) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sample to generate."""

    split: str
    record: PromptRecord
    index: int
    """Which sample of this prompt: 0, 1, ..."""
    seed: int


Drawn = tuple[Sequence[Request], Sequence[Sample]]
"""Requests with the sample of each."""


def conditions(
    config: Parameters,
    samplers: Mapping[str, SamplerConfig],
    *,
    model: str,
    dataset: str,
    content: str | None = None,
    controls: Mapping[str, SamplerConfig] = MappingProxyType({}),
    commits: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    transport: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Everything but the adapter that samples and scores depend on: equal for two results that pair.

    ``model``, its files' ``content`` (None if they are not here) and ``dataset`` are digests; ``controls`` are the
    samplers of the base model alone; ``commits`` are those of the hub's files that rewards read, by reward and option;
    ``transport`` are the options of each reward that decide no score.
    """
    tree = config.public()
    device = device_kind(config.model.device)
    return {
        "seed": config.evaluation.seed,
        "model": {"digest": model, "content": content, "dtype": config.model.dtype}
        # As it was before devices and bases were told apart: results of a CPU, and of full weights, still pair.
        | ({} if device == "cpu" else {"device": device})
        | ({} if config.model.base_weights == "full" else {"base_weights": config.model.base_weights}),
        "dataset": dataset,
        "data": {side: tree["data"][side] for side in ("height", "width")},
        "sampling": {name: sampler.model_dump(mode="json") for name, sampler in samplers.items()},
        "controls": {name: sampler.model_dump(mode="json") for name, sampler in controls.items()},
        **({"flow": tree["policy"]["flow"]} if any(sampler.stochastic for sampler in samplers.values()) else {}),
        **({"options": tree["model"]["options"]} if config.model.options else {}),
        # Without their weights: a total can be computed again from the scores.
        "rewards": {
            name: _judge(reward, config.output, commits.get(name, {}), transport.get(name, ()))
            for name, reward in tree["rewards"].items()
        },
        "evaluation": {name: tree["evaluation"][name] for name in ("images_per_prompt", "max_prompts")},
    }


def _judge(
    reward: Mapping[str, Any], output: str, commits: Mapping[str, str], transport: Collection[str]
) -> dict[str, Any]:
    """What a reward's scores depend on, with the files in its options; of the user's own function also its code."""
    options = {name: value for name, value in reward["options"].items() if name not in transport}
    found = {"function": reward["function"], "options": options}
    # As it was before these parameters existed, where they are not used: earlier results still pair.
    if any(end is not None for end in reward["clip"]):
        found["clip"] = list(reward["clip"])
    if reward["only_where"]:
        found["only_where"] = reward["only_where"]
    files = option_files(options, output)
    found |= {"files": files} if files else {}
    found |= {"commits": dict(commits)} if commits else {}
    return found if reward["function"] is None else found | {"code": code_digest(reward["function"])}


def plan_images(
    splits: Mapping[str, Iterable[PromptRecord]],
    *,
    seed: int,
    images_per_prompt: int,
    max_prompts: int | None,
) -> list[Request]:
    """The samples to generate with each sampler: ``images_per_prompt`` of each distinct prompt of each split."""
    return [
        Request(split=split, record=record, index=index, seed=image_seed(seed, record.id, index))
        for split, records in splits.items()
        for record in distinct_prompts(records, max_prompts)
        for index in range(images_per_prompt)
    ]


def held_out(requests: Iterable[Request]) -> list[Request]:
    """Those on held-out prompts, which are all that a control draws."""
    return [request for request in requests if request.split == "held_out"]


def distinct_prompts(records: Iterable[PromptRecord], limit: int | None) -> list[PromptRecord]:
    """The first record (by id) of each distinct prompt, at most ``limit`` of them, in order of id.

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


def draw_and_score(
    policy: SampleGenerator,
    scorer: Judge,
    requests: Sequence[Request],
    samplers: Mapping[str, SamplerConfig],
    folder: Path,
    *,
    batch_size: int,
    facts: Mapping[str, Any],
    controls: Mapping[str, SamplerConfig] = MappingProxyType({}),
    advance: Advance | None = None,
) -> pd.DataFrame:
    """Writes ``<sampler>/<id>_<index>.png`` and ``scores.parquet`` into ``folder``; returns the scores.

    Columns: sampler, split, id, prompt, unit (equal for records that are held out together), index, seed, file, total,
    reward/<name>, part/<reward>/<part>, numerator/<reward>/<ratio> and denominator/<reward>/<ratio>; NaN = unscored.
    Optional columns: ``answer``, the text of a text sample, and ``source``, the images that were edited, relative to
    ``folder`` (the picture of a text sample already shows its image). ``facts`` (the conditions that samples depend on)
    and the rewards' weights are stored in ``DataFrame.attrs``, which Parquet preserves. Samplers share the seeds.
    ``controls`` are further samplers that draw the held-out requests only.
    """
    if not requests:
        raise UserError(
            "no eval and no held-out prompts to generate samples for: raise data.eval_share or data.held_out_share"
        )
    sheet = _Sheet(scorer, folder, advance)
    for sampler, settings in {**samplers, **controls}.items():
        (folder / sampler).mkdir(parents=True, exist_ok=True)
        asked = held_out(requests) if sampler in controls else requests
        drawn = _drawn(policy, asked, batch_size, settings)
        for batch in _whole_groups(drawn) if scorer.needs_whole_groups else drawn:
            # The batch before is judged by then, as far as another process does it.
            sheet.finish()
            sheet.begin(sampler, *batch)
        sheet.finish()
    table = _without_unused(pd.concat(sheet.frames, ignore_index=True))
    table.attrs = {"facts": dict(facts), "weights": sheet.weights}
    table.to_parquet(folder / SCORES, index=False)
    return table


def _drawn(
    policy: SampleGenerator, requests: Sequence[Request], batch_size: int, settings: SamplerConfig
) -> Iterator[Drawn]:
    for batch in _batches(requests, batch_size):
        records = [request.record for request in batch]
        samples = policy.generate(records, [request.seed for request in batch], settings)
        check_samples(samples, records)
        yield batch, samples


def _whole_groups(drawn: Iterable[Drawn]) -> Iterator[Drawn]:
    """The same samples in other portions, which hold all of a record."""
    held: list[tuple[Request, Sample]] = []
    for batch, samples in drawn:
        held += zip(batch, samples, strict=True)
        last = held[-1][0].record.id
        whole = [pair for pair in held if pair[0].record.id != last]
        held = held[len(whole) :]
        if whole:
            yield [request for request, _ in whole], [sample for _, sample in whole]
    yield [request for request, _ in held], [sample for _, sample in held]


@dataclass
class _Sheet:
    """Rows and pictures of the samples, batch by batch; one batch may still be with the rewards."""

    scorer: Judge
    folder: Path
    advance: Advance | None
    frames: list[pd.DataFrame] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    summed: float = 0.0
    scored: int = 0
    begun: tuple[str, Drawn, Callable[[], Scores]] | None = None

    def begin(self, sampler: str, batch: Sequence[Request], samples: Sequence[Sample]) -> None:
        records = [request.record for request in batch]
        self.begun = sampler, (batch, samples), begin_scoring(self.scorer, records, samples)

    def finish(self) -> None:
        """Writes the batch that was begun, if there is one."""
        if self.begun is None:
            return
        from visual_grpo.evaluation.pictures import of_sample

        sampler, (batch, samples), result = self.begun
        self.begun = None
        scores = result()
        if not self.frames and bool(scores.total.isnan().all()):
            unscored = [name for name, values in scores.rewards.items() if values.isnan().all()]
            raise UserError(
                f"none of the first {len(batch)} samples could be scored, so that nothing could be compared;"
                f" unscored were: {', '.join(unscored)}"
            )
        self.weights = dict(scores.weights)
        self.frames.append(_rows(sampler, batch, samples, scores, self.folder))
        for file, request, sample in zip(self.frames[-1]["file"], batch, samples, strict=True):
            picture = of_sample(request.record, sample, self.scorer)
            picture.save(self.folder / file, compress_level=1)  # A third of the time, a third more bytes.
        self.summed += float(scores.total.nansum())
        self.scored += int((~scores.total.isnan()).sum())
        if self.advance is not None:
            self.advance(len(batch), reward=self.summed / self.scored)


def check_samples(samples: Sequence[Sample], records: Sequence[PromptRecord]) -> None:
    """Raises an error unless there is one uint8 [3, height, width] tensor or one ``TextSample`` per record."""
    if len(samples) != len(records):
        raise ValueError(f"the policy was asked for {len(records)} samples and returned {len(samples)}")
    for sample, record in zip(samples, records, strict=True):
        if not isinstance(sample, TextSample) and not is_image(sample):
            raise TypeError(
                f"record {record.id!r}: expected a uint8 tensor [3, height, width] or a TextSample,"
                f" got {described(sample)}"
            )


def file_stem(record_id: str) -> str:
    """A file name for an id: the id if it is safe, else a cleaned version with a hash that makes it unique.

    Upper case is unsafe because some file systems ignore case.
    """
    stem = re.sub(r"[^\w.-]", "_", record_id)[:60]
    if stem == record_id == record_id.lower():
        return stem
    return f"{stem}-{hashlib.sha256(record_id.encode()).hexdigest()[:8]}"


def read_scores(folder: Path) -> pd.DataFrame:
    """The scores that ``draw_and_score`` wrote into ``folder``, with their ``attrs``."""
    return pd.read_parquet(folder / SCORES)


def _rows(
    sampler: str, batch: Sequence[Request], samples: Sequence[Sample], scores: Scores, folder: Path
) -> pd.DataFrame:
    frame = pd.DataFrame(
        [
            {
                "sampler": sampler,
                "split": request.split,
                "id": request.record.id,
                "prompt": request.record.prompt,
                "unit": request.record.held_with or request.record.id,
                "index": request.index,
                "seed": request.seed,
                "file": f"{sampler}/{file_stem(request.record.id)}_{request.index}.png",
                **_beside_the_picture(request.record, sample, folder),
            }
            for request, sample in zip(batch, samples, strict=True)
        ]
    )
    columns = {"total": scores.total}
    columns |= {f"reward/{name}": values for name, values in scores.rewards.items()}
    columns |= {f"part/{name}": values for name, values in scores.parts.items()}
    columns |= {f"numerator/{name}": above for name, (above, _) in scores.ratios.items()}
    columns |= {f"denominator/{name}": below for name, (_, below) in scores.ratios.items()}
    return frame.assign(**{name: values.cpu().numpy() for name, values in columns.items()})


def _beside_the_picture(record: PromptRecord, sample: Sample, folder: Path) -> dict[str, str | list[str] | None]:
    if isinstance(sample, TextSample):
        return {"answer": sample.text, "source": None}
    # Relative paths stay valid if scores and prepared images are moved together.
    return {"answer": None, "source": [os.path.relpath(path, folder) for path in record.source_images] or None}


def _without_unused(table: pd.DataFrame) -> pd.DataFrame:
    return table.drop(columns=[column for column in ("answer", "source") if table[column].isna().all()])


def _batches(requests: Sequence[Request], size: int) -> Iterator[list[Request]]:
    remaining = iter(requests)
    while batch := list(itertools.islice(remaining, size)):
        yield batch


def image_seed(seed: int, record_id: str, index: int) -> int:
    """A seed in [0, 2**63) for image ``index`` of a record: the same on every machine and Python version."""
    key = f"{seed}\0{index}\0{record_id}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
