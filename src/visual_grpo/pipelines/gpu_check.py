"""Checks a GPU, and ends the command where a step could not be taken."""

from __future__ import annotations

from typing import Any

from visual_grpo.config import Parameters
from visual_grpo.errors import UserError
from visual_grpo.gpu_check import check_gpu, show


def check(parameters: Parameters) -> dict[str, Any]:
    """Measures steps on the GPU and prints them beside the plan."""
    found = check_gpu(parameters)
    show(found)
    return found


def require_whole(gpu_check: dict[str, Any]) -> None:
    """Raises UserError where a case ended with an error."""
    failed = [f"{case['module']}: {case['error']}" for case in gpu_check["cases"] if "error" in case]
    if failed:
        raise UserError("\n".join(["These steps could not be taken:", *failed]))
