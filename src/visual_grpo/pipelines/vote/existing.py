"""Pairs of pictures that are there: the base model's and the trained model's samples, or a folder of ``generate``."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from visual_grpo.command import again
from visual_grpo.config import Parameters
from visual_grpo.errors import UserError
from visual_grpo.pipelines.vote.pictures import keep
from visual_grpo.records.table import RecordTable
from visual_grpo.rewards.votes.choices import AB, Pair

LISTED = "metadata.jsonl"
"""What ``generate`` writes beside its pictures."""


def blind_pairs(parameters: Parameters, records: RecordTable, file: Path) -> list[Pair]:
    """Samples of held-out prompts with the same seed, the base model's first: one of each prompt, then the next."""
    from visual_grpo.evaluation.compare import STOCK
    from visual_grpo.evaluation.generate import SCORES, read_scores
    from visual_grpo.evaluation.pairing import check_facts
    from visual_grpo.evaluation.report import all_pairs
    from visual_grpo.images import read_image

    folders = [Path(parameters.output) / "07_model_output" / name for name in ("baseline", "trained")]
    for folder, maker in zip(folders, ("baseline", "evaluate"), strict=True):
        if not (folder / SCORES).is_file():
            raise UserError(f"vote.source=ab compares {folders[0]} with {folders[1]}. Make {folder}: {again(maker)}")
    baseline, trained = folders
    check_facts(read_scores(baseline).attrs["facts"], read_scores(trained).attrs["facts"])
    table = all_pairs(baseline, trained)
    rows: list[Any] = table[(table["split"] == "held_out") & (table["sampler"] == STOCK)].to_dict("records")
    if not rows:
        raise UserError("vote.source=ab: there are no samples of held-out prompts; raise data.held_out_share")
    families = {record.id: record.metadata.get("family") for record in records.split("held_out")}
    rows.sort(key=lambda row: (row["index"], _hash(parameters.vote.seed, row["id"])))
    pairs = []
    for row in rows[: parameters.vote.pairs]:
        first, second = (keep(read_image(folder / row[f"file_{folder.name}"]), file) for folder in (baseline, trained))
        sources = row.get("source")
        pairs.append(
            Pair(
                pair=_hash(AB, row["id"], row["index"], first, second),
                source=AB,
                prompt=row["prompt"],
                record=row["id"],
                family=str(families.get(row["id"]) or row["prompt"]),
                unit=row["unit"],
                first=first,
                second=second,
                sources=() if sources is None else tuple(keep(read_image(baseline / p), file) for p in sources),
            )
        )
    return pairs


def folder_pairs(parameters: Parameters, file: Path) -> list[Pair]:
    """Pictures of one prompt, two by two: the first with the second, the third with the fourth, and so on."""
    from visual_grpo.images import read_image

    folder = Path(parameters.vote.source)
    prompts: dict[str, list[str]] = defaultdict(list)
    for name, prompt in _listed(folder):
        prompts[prompt].append(name)
    couples = [list(zip(names[::2], names[1::2], strict=False)) for names in prompts.values()]
    # One of each prompt, then the next.
    turns = [couple for turn in itertools.zip_longest(*_with_prompts(prompts, couples)) for couple in turn if couple]
    if not turns:
        raise UserError(f"vote.source: {folder} has no prompt with two pictures; draw more of each: generate.samples=2")
    pairs = []
    for prompt, names in turns[: parameters.vote.pairs]:
        first, second = (keep(read_image(folder / name), file) for name in names)
        pairs.append(
            Pair(
                pair=_hash("folder", prompt, first, second),
                source=parameters.vote.source,
                prompt=prompt,
                record=_hash(prompt),
                family=prompt,
                unit=prompt,
                first=first,
                second=second,
            )
        )
    return pairs


def _with_prompts(prompts: Iterable[str], couples: Iterable[list[tuple[str, str]]]) -> list[list[Any]]:
    return [[(prompt, names) for names in own] for prompt, own in zip(prompts, couples, strict=True)]


def _listed(folder: Path) -> list[tuple[str, str]]:
    """(file, prompt) of each picture."""
    listed = folder / LISTED
    try:
        lines = [json.loads(line) for line in listed.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [(str(line["file_name"]), str(line["text"])) for line in lines]
    except FileNotFoundError:
        raise UserError(
            f"vote.source must be draw, ab, or a folder that generate wrote; {listed} does not exist. Make one:"
            f" {again('generate')}"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"vote.source: {listed} cannot be read ({error!r})") from error


def _hash(*of: object) -> str:
    return hashlib.sha256("\0".join(map(str, of)).encode()).hexdigest()[:16]
