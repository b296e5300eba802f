"""``resume=same``: whether the checkpoints that are there are of the very training that is asked for now."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from visual_grpo.computed_with import MEANING
from visual_grpo.config import Parameters
from visual_grpo.decisive_parameters import decisive
from visual_grpo.files import write_atomically
from visual_grpo.grpo import checkpoint
from visual_grpo.resuming import FORMAT

FINISHED = "finished.json"
"""Beside the checkpoints: the one with which a training ended whose adapters are in their place."""
_MOST = 3
"""Names in the reason."""


def mark_finished(folder: Path) -> None:
    """Notes that the training of the newest checkpoint has left its adapters."""
    newest = next(iter(checkpoint.checkpoints(folder)), None)
    if newest is not None:
        write_atomically(folder / FINISHED, json.dumps({"checkpoint": newest.name}))


def why_another(config: Parameters, identity: Mapping[str, str], computed: Mapping[str, str]) -> str | None:
    """Why the newest intact checkpoint is not one to go on from; None where it is. Only reads.

    Args:
        identity: what the training depends on beside the parameters: digests of model, data and own rewards.
        computed: `computed_with` of the pipeline train.
    """
    folder = Path(config.tracking.checkpoints)
    there = checkpoint.checkpoints(folder)
    newest = next((path for path in there if checkpoint.damage(path) is None), None)
    if newest is None:
        return f"{folder} has {'no intact' if there else 'no'} checkpoint"
    facts = checkpoint.load_facts(newest)
    if facts.get("format") != FORMAT:
        return f"the checkpoints in {folder} are of another version of this program"
    if _finished(folder) == newest.name:
        return f"the training of the checkpoints in {folder} is finished"
    different = list(_differences(facts, config, identity, computed))
    if not different:
        return None
    more = f" and {len(different) - _MOST} more" if len(different) > _MOST else ""
    return f"the checkpoints in {folder} are of a training with another {', '.join(different[:_MOST])}{more}"


def _finished(folder: Path) -> str | None:
    try:
        named: str = json.loads((folder / FINISHED).read_text(encoding="utf-8"))["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return named


def _differences(
    facts: Mapping[str, Any], config: Parameters, identity: Mapping[str, str], computed: Mapping[str, str]
) -> Iterator[str]:
    was, now = (decisive("train", tree) for tree in (facts["parameters"], config.public()))
    for name in sorted(was.keys() | now.keys()):
        if was.get(name) != now.get(name):
            yield f"{name} (was {was.get(name)!r}, is {now.get(name)!r})"
    yield from (
        name for name in sorted({*facts["identity"], *identity}) if facts["identity"].get(name) != identity.get(name)
    )
    lineage = facts.get("lineage", {})
    for name, value in computed.items():
        if lineage.get(name) != value or f"resumed.{name}" in lineage:
            yield MEANING[name]
