"""Faults by theme, planted in a small project. ``python -m tests.fault_cases`` writes docs/faults.md."""

from __future__ import annotations

from tests.fault_cases import (
    checkpoints,
    data,
    folders,
    machine,
    parameters,
    results,
    rewards,
    signals,
    tracking,
)
from tests.fault_cases.fault import Fault

THEMES: dict[str, tuple[Fault, ...]] = {
    "Stopped from outside": signals.FAULTS,
    "Checkpoints": checkpoints.FAULTS,
    "Results of earlier commands": results.FAULTS,
    "Two at once": folders.FAULTS,
    "MLflow": tracking.FAULTS,
    "Disk, memory, permissions": machine.FAULTS,
    "Rewards": rewards.FAULTS,
    "Data": data.FAULTS,
    "Parameters": parameters.FAULTS,
}
