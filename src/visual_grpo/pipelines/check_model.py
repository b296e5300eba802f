"""Compares the model's family with the plain pipeline, and refuses one that differs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch
from kedro.pipeline import Node, Pipeline

from visual_grpo.common import console
from visual_grpo.common.errors import UserError
from visual_grpo.common.quiet_libraries import hidden_progress_bars
from visual_grpo.models.family_check import Finding, check_family
from visual_grpo.models.run_spec import RunSpec


def create_pipeline() -> Pipeline:
    return Pipeline(
        [
            Node(check, "params:run_spec", "model_check", name="check_model"),
            Node(require_equal, "model_check", None, name="require_equal"),
        ],
        tags=["model"],
    )


_LARGEST, _CELL = 512, 32
"""Pixels of a side, and what its length is a multiple of."""
_LEAST_SOURCE = 64
"""Pixels of a side of the smallest source that FLUX.2's pipeline takes."""
_GUIDANCE = 4.0
"""Used if the eval sampler has none."""


def check(spec: RunSpec) -> dict[str, Any]:
    """Runs the checks at a size that is not square and prints them as a table; returns JSON."""
    parameters, model, data = spec.config, spec.config.model.path, spec.config.data
    torch.set_num_threads(parameters.model.threads)
    least = _LEAST_SOURCE if "i2i" in spec.family.tasks else _CELL
    sides = min(data.height, _LARGEST), min(data.width, _LARGEST) // 2
    height, width = (max(side // _CELL * _CELL, least) for side in sides)
    size = (height + _CELL * (height == width), width)
    scale = parameters.sampling.eval.guidance_scale or 0
    with hidden_progress_bars():
        findings = check_family(
            spec.family, model, parameters.model, size, spec.options, scale if scale > 1 else _GUIDANCE, data.frames
        )
    title = f"{spec.family.name} against its pipeline, {model}, {size[0]} x {size[1]} px, {parameters.model.dtype}"
    console.table(title, ["check", "largest difference", "at most", "verdict"], [_row(finding) for finding in findings])
    checks = [
        {**asdict(finding), "difference": _finite(finding.difference), "passed": finding.passed} for finding in findings
    ]
    return {"family": spec.family.name, "model": model, "size": size, "checks": checks}


def _row(finding: Finding) -> list[str]:
    difference = "not comparable" if _finite(finding.difference) is None else f"{finding.difference:.2g}"
    verdict = "reported" if math.isinf(finding.limit) else "equal" if finding.passed else "DIFFERENT"
    return [finding.name, difference, f"{finding.limit:g}", verdict]


def _finite(difference: float) -> float | None:
    return difference if math.isfinite(difference) else None


def require_equal(model_check: dict[str, Any]) -> None:
    """Raises UserError where a check failed, with where to look."""
    hints = {row["hint"]: None for row in model_check["checks"] if not row["passed"]}
    if hints:
        raise UserError(
            "\n".join(
                [f"The family {model_check['family']} does not generate what its pipeline generates. See in its file:"]
                + [f"  {hint}" for hint in hints]
            )
        )
    console.note(f"The family {model_check['family']} generates, replays and saves what its pipeline does.")
