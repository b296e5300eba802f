"""Pairs that the policy draws now: two samples of one training prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.config import Parameters
from visual_grpo.errors import UserError
from visual_grpo.pipelines.vote.pictures import keep
from visual_grpo.records.table import RecordTable
from visual_grpo.rewards.votes.choices import Pair, append_line
from visual_grpo.trained_adapters import adapter_digest

if TYPE_CHECKING:
    from visual_grpo.types import PromptRecord

DRAW = "draw"
DRAWN = "pairs.jsonl"
"""Beside the choices: the pairs that have been drawn, so that none is drawn twice."""


@dataclass(frozen=True)
class Asked:
    """A pair to draw."""

    pair: str
    record: PromptRecord
    seeds: tuple[int, int]


def drawn_pairs(parameters: Parameters, records: RecordTable, file: Path) -> list[Pair]:
    """The pairs of ``vote``; only those that were not drawn before are drawn."""
    from visual_grpo import components
    from visual_grpo.saved_model import content_digest
    from visual_grpo.tracking.model_ref import adapters_of, model_of

    named = parameters.model_copy(update={"adapter": parameters.vote.adapter})
    adapters = adapters_of(named)
    model_path = model_of(named, adapters)
    sampler = getattr(parameters.sampling, parameters.vote.sampler)
    what = {
        "model": [model_path, content_digest(model_path)],
        "adapters": None if adapters is None else adapter_digest(adapters),
        "sampler": sampler.model_dump(mode="json"),
        "size": [parameters.data.height, parameters.data.width],
    }
    asked = _asked(parameters, records, what)
    kept = _kept(file)
    missing = [own for own in asked if own.pair not in kept]
    if missing:
        scorer = components.build_scorer(parameters, components.make_plan(parameters, model_path).modules)
        model = components.build_model(parameters, model_path, adapters)
        for pair in _draw(missing, model, sampler, scorer, parameters.evaluation.batch_size, file):
            kept[pair.pair] = pair
    return [kept[own.pair] for own in asked]


def _asked(parameters: Parameters, records: RecordTable, what: Mapping[str, Any]) -> list[Asked]:
    """As many pairs as asked for, one of each prompt before the second of any."""
    from visual_grpo.evaluation.generate import distinct_prompts, image_seed

    seed = parameters.vote.seed
    prompts = distinct_prompts(records.split("train"), None)
    if not prompts:
        raise UserError("vote needs training prompts to draw; lower data.eval_share or data.held_out_share")
    prompts.sort(key=lambda record: hashlib.sha256(f"{seed}\0{record.id}".encode()).digest())
    asked = []
    for number in range(parameters.vote.pairs):
        record, turn = prompts[number % len(prompts)], number // len(prompts)
        seeds = (image_seed(seed, record.id, 2 * turn), image_seed(seed, record.id, 2 * turn + 1))
        key = json.dumps({**what, "record": record.id, "prompt": record.prompt, "seeds": seeds}, sort_keys=True)
        asked.append(Asked(hashlib.sha256(key.encode()).hexdigest()[:16], record, seeds))
    return asked


def _kept(file: Path) -> dict[str, Pair]:
    """Those that were drawn before and whose pictures are there; a damaged line is as one that is not there."""
    found: dict[str, Pair] = {}
    listed = file.with_name(DRAWN)
    for line in listed.read_bytes().splitlines() if listed.is_file() else ():
        try:
            pair = Pair.of_line(json.loads(line))
        except (ValueError, TypeError, KeyError):
            continue
        if all((file.parent / name).is_file() for name in (pair.first, pair.second, *pair.sources)):
            found[pair.pair] = pair
    return found


def _draw(missing: Sequence[Asked], model: Any, sampler: Any, scorer: Any, batch_size: int, file: Path) -> list[Pair]:
    from visual_grpo import console
    from visual_grpo.evaluation.generate import check_samples
    from visual_grpo.evaluation.pictures import of_sample
    from visual_grpo.images import read_image

    size = max(1, batch_size // 2)
    pairs = []
    with console.progress("Drawing pairs", len(missing)) as bar:
        for start in range(0, len(missing), size):
            batch = missing[start : start + size]
            chosen = [own.record for own in batch for _ in range(2)]
            samples = model.generate(chosen, [seed for own in batch for seed in own.seeds], sampler)
            check_samples(samples, chosen)
            pictures = [
                keep(of_sample(record, sample, scorer), file) for record, sample in zip(chosen, samples, strict=True)
            ]
            for number, own in enumerate(batch):
                pair = Pair(
                    pair=own.pair,
                    source=DRAW,
                    prompt=own.record.prompt,
                    record=own.record.id,
                    family=str(own.record.metadata.get("family") or own.record.prompt),
                    unit=own.record.held_with or own.record.id,
                    first=pictures[2 * number],
                    second=pictures[2 * number + 1],
                    sources=tuple(keep(read_image(path), file) for path in own.record.source_images),
                )
                append_line(file.with_name(DRAWN), asdict(pair))
                pairs.append(pair)
            bar.advance(len(batch))
    return pairs
