"""Finds the pairs of pictures for people to choose between.

They are generated now, or come from a baseline and its trained model, or from a folder that ``generate`` wrote; their
pictures are kept next to the file of choices.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL.Image import Image

from visual_grpo import provenance
from visual_grpo.adapter_folder import weights_digest
from visual_grpo.common import console
from visual_grpo.common.digests import content_digest
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.common.files import file_in, settled, write_atomically
from visual_grpo.common.images import read_image, to_png
from visual_grpo.common.types import PromptRecord
from visual_grpo.config.pipelines import VoteConfig
from visual_grpo.data.manifest import RecordTable
from visual_grpo.data.tabular import LISTED
from visual_grpo.evaluation.comparison import EVAL_SAMPLER
from visual_grpo.evaluation.pictures import of_sample
from visual_grpo.evaluation.report import all_pairs
from visual_grpo.evaluation.samples import SCORES, Request, distinct_prompts, generate_batches, image_seed
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.rewards.build import negative_points
from visual_grpo.rewards.votes.choices import AB, Pair, append_line
from visual_grpo.tracking.adapter_lookup import adapters_or_base
from visual_grpo.training import components

SIDES = {"baseline": "baseline", "trained": "evaluate"}
"""Datasets whose samples ``vote.source=ab`` pairs, and their pipelines."""
DRAW = "draw"
PAIRS_FILE = "pairs.jsonl"
"""File next to the choices: the pairs that have been generated, so that none is generated twice."""


def find_pairs(spec: RunSpec, records: RecordTable, file: Path, latest: Path, sides: tuple[Path, Path]) -> list[Pair]:
    """Returns as many pairs as ``vote`` asks for, one of each prompt before the second of any.

    Args:
        file: of the choices; pictures are kept next to it.
        latest: adapters of the last training.
        sides: samples of the base model and of the trained one, each where it would be.
    """
    settings = spec.config.vote
    if settings.source == DRAW:
        return _generated_pairs(spec, records, file, latest)
    if settings.source == AB:
        return _blind_pairs(settings, sides, records, file)
    return _folder_pairs(settings, file)


def _generated_pairs(spec: RunSpec, records: RecordTable, file: Path, latest: Path) -> list[Pair]:
    """Generates two samples of a training prompt for each pair that was not generated before."""
    parameters = spec.config
    adapters = adapters_or_base(parameters.vote.adapter, latest)
    name = parameters.vote.sampler
    sampler, sized = spec.sampler(name), spec.settings if name == "eval" else spec.rollout_settings
    what = {
        "model": [parameters.model.path, content_digest(parameters.model.path)],
        "adapters": None if adapters is None else weights_digest(adapters),
        # Also what the parameter alone has, so that pairs of earlier versions keep their names where nothing differs.
        "sampler": {**getattr(parameters.sampling, name).model_dump(mode="json"), **sampler.model_dump(mode="json")},
        "size": list(sized.size),
    }
    asked, generated = _asked(parameters.vote, records, what), _generated_before(file)
    missing = {pair: requests for pair, requests in asked.items() if pair not in generated}
    if missing:
        painter, model = negative_points(parameters.rewards), components.build_generator(spec, adapters, name)
        pending, names = list(itertools.chain(*missing.values())), iter(missing)
        size = 2 * max(1, parameters.evaluation.batch_size // 2)
        with console.progress("Generating pairs", len(missing)) as bar:
            for batch, samples in generate_batches(model, pending, sampler, size):
                pictures = [of_sample(asks.record, s, painter) for asks, s in zip(batch, samples, strict=True)]
                for row in range(0, len(batch), 2):
                    record = batch[row].record
                    pair = Pair(
                        pair=next(names),
                        source=DRAW,
                        prompt=record.prompt,
                        record=record.id,
                        family=_family(record),
                        unit=record.split_group or record.id,
                        first=keep(pictures[row], file),
                        second=keep(pictures[row + 1], file),
                        sources=tuple(keep(read_image(path), file) for path in record.source_images),
                    )
                    append_line(file.with_name(PAIRS_FILE), asdict(pair))
                    generated[pair.pair] = pair
                bar.advance(len(batch) // 2)
    return [generated[pair] for pair in asked]


def _asked(settings: VoteConfig, records: RecordTable, what: Mapping[str, Any]) -> dict[str, tuple[Request, Request]]:
    """Maps the id of each pair to its two requests."""
    seed = settings.seed
    prompts = distinct_prompts(records.split("train"), None)
    if not prompts:
        raise UserError("vote needs training prompts to generate from. Add records")
    prompts.sort(key=lambda record: hashlib.sha256(f"{seed}\0{record.id}".encode()).digest())
    asked = {}
    for number in range(settings.pairs):
        record, turn = prompts[number % len(prompts)], number // len(prompts)
        seeds = [image_seed(seed, record.id, 2 * turn + side) for side in (0, 1)]
        key = {**what, "record": record.id, "prompt": record.prompt, "seeds": seeds}
        first, second = (Request(record=record, seed=each) for each in seeds)
        asked[_hash(json.dumps(key, sort_keys=True))] = first, second
    return asked


def _generated_before(file: Path) -> dict[str, Pair]:
    """Reads the pairs whose pictures are still there, without damaged lines."""
    pairs: dict[str, Pair] = {}
    listed = file.with_name(PAIRS_FILE)
    for line in listed.read_bytes().splitlines() if listed.is_file() else ():
        with suppress(ValueError, TypeError, KeyError):
            pair = Pair.of_line(json.loads(line))
            if all((file.parent / name).is_file() for name in (pair.first, pair.second, *pair.sources)):
                pairs[pair.pair] = pair
    return pairs


def _blind_pairs(settings: VoteConfig, folders: Sequence[Path], records: RecordTable, file: Path) -> list[Pair]:
    """Pairs samples of held-out prompts with the same seed, the base model's first."""
    for folder, maker in zip(folders, SIDES.values(), strict=True):
        if not (folder / SCORES).is_file():
            raise UserError(f"vote.source=ab compares {folders[0]} with {folders[1]}. Make {folder}.", remedy=maker)
    baseline, trained = (provenance.read(*side) for side in zip(folders, SIDES.values(), strict=True))
    provenance.require_pair(baseline, trained)
    table = all_pairs(*folders)
    rows: list[Any] = table[(table["split"] == "held_out") & (table["sampler"] == EVAL_SAMPLER)].to_dict("records")
    if not rows:
        raise UserError("vote.source=ab: no prompt is held out. Add records, or raise data.held_out_share if it is 0")
    families = {record.id: _family(record) for record in records.split("held_out")}
    rows.sort(key=lambda row: (row["index"], _hash(settings.seed, row["id"])))
    pairs = []
    for row in rows[: settings.pairs]:
        first, second = (
            keep(read_image(folder / row[f"file_{side}"]), file) for side, folder in zip(SIDES, folders, strict=True)
        )
        sources = row.get("source")  # An array, or None.
        pairs.append(
            Pair(
                pair=_hash(AB, row["id"], row["index"], first, second),
                source=AB,
                prompt=row["prompt"],
                record=row["id"],
                family=families.get(row["id"], row["prompt"]),
                unit=row["unit"],
                first=first,
                second=second,
                sources=() if sources is None else tuple(keep(read_image(folders[0] / p), file) for p in sources),
            )
        )
    return pairs


def _folder_pairs(settings: VoteConfig, file: Path) -> list[Pair]:
    """Pairs pictures of one prompt, or of one record if it has sources: the first and the second, and so on."""
    folder = settled(Path(settings.source))
    if not (folder / LISTED).is_file():
        raise UserError(
            f"vote.source must be draw, ab, or a folder that generate wrote, and {folder} has no {LISTED}. With"
            " generate.prompts=FILE,generate.samples=2, generate makes such a folder; draw needs none.",
            remedy=Remedy("vote", {"vote.source": DRAW}),
        )
    records: dict[str, list[dict[str, Any]]] = {}
    # Of bytes: texts split at U+2028, too.
    for number, text in enumerate(file_in(folder, LISTED).read_bytes().splitlines(), start=1):
        try:
            line = json.loads(text)
            prompt, sources = str(line["text"]), tuple(map(str, line.get("source_images") or ()))
            record = str(line["record"]) if sources or "answer" in line else _hash(prompt)
            row: dict[str, Any] = {
                "prompt": prompt,
                "file": str(line["file_name"]),
                "sources": sources,
                "record": record,
            }
        except (ValueError, TypeError, KeyError) as error:
            why = f"without {error.args[0]}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"vote.source: expected {folder / LISTED} as generate writes it; line {number} cannot be read ({why})"
            ) from error
        records.setdefault(record, []).append(row)
    couples = [list(zip(rows[::2], rows[1::2], strict=False)) for rows in records.values()]
    # The first pair of each record, then the second of each, and so on.
    couples_in_turn = [couple for turn in itertools.zip_longest(*couples) for couple in turn if couple is not None]
    if not couples_in_turn:
        raise UserError(
            f"vote.source: {folder} has no prompt with two pictures; generate more of each: generate.samples=2"
        )
    pairs = []
    for couple in couples_in_turn[: settings.pairs]:
        row = couple[0]
        first, second = (keep(read_image(file_in(folder, each["file"])), file) for each in couple)
        sources = tuple(keep(read_image(file_in(folder, name)), file) for name in row["sources"])
        pairs.append(
            Pair(
                pair=_hash("folder", row["prompt"], first, second, *sources),
                source=settings.source,
                prompt=row["prompt"],
                record=row["record"],
                family=row["prompt"],
                unit=sources[0] if sources else row["prompt"],  # Edits of one picture are held out together.
                first=first,
                second=second,
                sources=sources,
            )
        )
    return pairs


def keep(picture: Image, beside: Path) -> str:
    """Writes a PNG next to the file of choices and returns its path relative to that; a picture is kept once."""
    content = to_png(picture.convert("RGB"))
    # Named by its pixels' file, so that the name says nothing of who drew it.
    name = f"pictures/{hashlib.sha256(content).hexdigest()[:24]}.png"
    if not (beside.parent / name).is_file():
        write_atomically(beside.parent / name, content)
    return name


def _family(record: PromptRecord) -> str:
    return str(record.metadata.get("family") or record.prompt)


def _hash(*of: object) -> str:
    return hashlib.sha256("\0".join(map(str, of)).encode()).hexdigest()[:16]
