"""Kedro hooks: checks before the first node, locks, typed parameters, the MLflow run.

Nodes only transform data; everything around them is here.
"""

from visual_grpo.hooks.ending import EndingHooks, MemoryHooks
from visual_grpo.hooks.folders import InputHooks, OutputHooks
from visual_grpo.hooks.parameters import AdapterHooks, ParameterHooks
from visual_grpo.hooks.tracking import TrackingHooks

__all__ = [
    "AdapterHooks",
    "EndingHooks",
    "InputHooks",
    "MemoryHooks",
    "OutputHooks",
    "ParameterHooks",
    "TrackingHooks",
]
