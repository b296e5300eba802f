"""Draws the reference policy's samples of the eval and held-out prompts and scores them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visual_grpo.common import console
from visual_grpo.common.digests import tree_digest
from visual_grpo.common.files import heal, new_folder
from visual_grpo.common.importing import code_digest
from visual_grpo.config import Parameters, flatten
from visual_grpo.data.manifest import RecordTable
from visual_grpo.training import components
from visual_grpo.training.cache_key import cache_key
from visual_grpo.training.evaluation_samples import conditions, generate_samples
from visual_grpo.training.runtime_fingerprint import MEANING, runtime_fingerprint

STAMP = "made_with.json"
"""File in the baseline's folder: what it depends on, and the digest of its other files."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def draw_baseline(parameters: Parameters, base_model: dict[str, Any], records: RecordTable) -> Path:
    """Draws and scores the policy without an adapter, also at each control's settings.

    An existing baseline is kept if the same one would be drawn.
    """
    components.check_unchanged(base_model, parameters.model.path)
    spec = components.make_run_spec(parameters, base_model["model"])
    made = _made_with(parameters, base_model, conditions(parameters, spec, base_model, records))
    present = Path(parameters.output) / "07_model_output/baseline"
    heal(present)
    why = "evaluation.redraw is true" if parameters.evaluation.redraw else _redraw_reason(present, made)
    if why is None:
        console.note(f"Kept the baseline in {present}: nothing that it depends on has changed (evaluation.redraw)")
        return present
    if present.is_dir():
        console.note(f"The baseline is drawn again: {why}")
    folder = new_folder(present)
    generate_samples(folder, parameters, base_model, records, adapters=None, title="baseline")
    stamp = {"made": made, "digest": _digest(folder)}
    (folder / STAMP).write_text(json.dumps(stamp, indent=1, ensure_ascii=False), encoding="utf-8")
    return folder


def _made_with(config: Parameters, base_model: Mapping[str, Any], conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a baseline depends on, as JSON: the conditions under which two results pair, what changes
    rounding, weights of rewards, and code."""
    known = base_model["content"] is not None or _COMMIT.fullmatch(config.model.revision or "") is not None
    made = {
        "base model": "known" if known else None,
        "conditions": conditions,
        "parameters": cache_key("baseline", config.public()),
        "family": code_digest(config.model.family) if ":" in config.model.family else None,
        **runtime_fingerprint(config),
    }
    written: dict[str, Any] = json.loads(json.dumps(made))
    return written


def _redraw_reason(folder: Path, made: Mapping[str, Any]) -> str | None:
    """Says why the baseline in ``folder`` is not kept; None if it is what would be drawn, byte for byte."""
    if not folder.is_dir():
        return "there is none"
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        before, digest = flatten(stamp["made"]), stamp["digest"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{folder} does not say what it was made with"
    if made["base model"] is None:
        return "model.path is on the hub and model.revision names no commit, so that its files may be others now"
    now = flatten(made)
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if changed:
        return f"other {', '.join(MEANING.get(name, name) for name in changed)}"
    return None if digest == _digest(folder) else f"a file in {folder} was changed, added or removed"


def _digest(folder: Path) -> str:
    """Returns the digest of every file but the stamp."""
    return tree_digest(folder, (file for file in folder.rglob("*") if file != folder / STAMP))
