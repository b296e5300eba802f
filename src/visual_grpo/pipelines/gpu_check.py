"""Nodes that check a GPU, and end the command where a step could not be taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from visual_grpo.config import Parameters
from visual_grpo.errors import UserError

_DATA, _REPORT = "check.json", "report.md"


def check(parameters: Parameters, gpu_check_draft: Path) -> Path:
    """The folder with a report to read, and its numbers."""
    from visual_grpo.gpu_check.check import check_gpu
    from visual_grpo.gpu_check.report import report_of

    found = check_gpu(parameters)
    (gpu_check_draft / _DATA).write_text(json.dumps(found, indent=2), encoding="utf-8")
    (gpu_check_draft / _REPORT).write_text(report_of(found), encoding="utf-8")
    _show(found)
    return gpu_check_draft


def require_whole(gpu_check: Path) -> None:
    """Raises UserError where a case ended with an error."""
    found = json.loads((gpu_check / _DATA).read_text(encoding="utf-8"))
    failed = [f"{case['module']}, {case['height']} x {case['width']}" for case in found["cases"] if "error" in case]
    if failed:
        raise UserError(
            f"These steps could not be taken: {'; '.join(failed)}. Why is in {gpu_check / _REPORT}, with what was"
            " measured of the others."
        )


def _show(found: dict[str, Any]) -> None:
    from visual_grpo import console
    from visual_grpo.gpu_check.report import COLUMNS, findings, rows_of

    console.heading(f"GPU check of {found['model']} on {found['machine']['gpu']}")
    for case in found["cases"]:
        if "error" not in case:
            console.table(f"{case['module']}, {case['height']} x {case['width']}", COLUMNS, rows_of(case))
    for finding in findings(found):
        console.note(finding)
