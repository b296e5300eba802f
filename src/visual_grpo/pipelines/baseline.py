"""Generates and scores the reference policy's samples of the eval and held-out prompts."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten
from typing import Any

from kedro.pipeline import Node, Pipeline

from visual_grpo import provenance
from visual_grpo.common import console
from visual_grpo.common.errors import UserError
from visual_grpo.common.hub import is_commit
from visual_grpo.config.decides import DEPENDS_ON
from visual_grpo.data.manifest import RecordTable
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.training import components, made_with
from visual_grpo.training.evaluation_samples import generate_samples

_LONGEST_REASON = 300
"""Characters."""


def create_pipeline() -> Pipeline:
    return Pipeline(
        [
            Node(
                generate_baseline,
                ["params:run_spec", "base_model", "records", "path:baseline", "draft"],
                "baseline",
                name="generate_baseline",
            )
        ],
        tags=["tracked", "distributed", "training", "rewards", "parameters_of.named_adapter"],
    )


def generate_baseline(
    spec: RunSpec, base_model: dict[str, Any], records: RecordTable, earlier: Path, draft: Path
) -> Path:
    """Generates and scores samples of the policy without an adapter, also at each control's settings.

    The ``earlier`` baseline, at its place, is kept if the same one would be generated.
    """
    components.check_unchanged(base_model, spec)
    now = made_with.of(spec, base_model, records.digest)
    # The files of a model on the hub may have changed, unless its revision is a commit.
    known = base_model["content"] is not None or is_commit(spec.config.model.revision)
    why = _redraw_reason(earlier, now, spec.config.evaluation.redraw, known)
    if why is None:
        console.note(f"Kept the baseline in {earlier}: nothing that it depends on has changed (evaluation.redraw)")
        return earlier
    if earlier.is_dir():
        console.note(f"Generating the baseline again: {why}")
    generate_samples(draft, spec, records, adapters=None, title="baseline: samples")
    provenance.write(draft, now)
    return draft


def _redraw_reason(folder: Path, now: provenance.Provenance, redraw: bool, known: bool) -> str | None:
    """Says why the baseline in ``folder`` is not kept; None if a new one would be the same, byte for byte.

    Args:
        redraw: ``evaluation.redraw``.
        known: the files of the base model are known.
    """
    if redraw:
        return "evaluation.redraw is true"
    if not folder.is_dir():
        return "there is none"
    try:
        before = provenance.read(folder, "baseline")
    except UserError as error:
        return str(error).rstrip(".")
    if not known:
        return "model.path is on the hub and model.revision names no commit, so its files may have changed"
    if different := provenance.differences(before, now, DEPENDS_ON["baseline"]):
        return shorten(f"different {', '.join(provenance.described(different))}", _LONGEST_REASON, placeholder=" ...")
    return None if provenance.is_intact(folder, before) else f"a file in {folder} was changed, added or removed"
