"""The default parameters, with changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from visual_grpo.config import Parameters

FILE = Path(__file__).parents[2] / "conf" / "base" / "parameters.yml"


def parameters(**changes: Any) -> Parameters:
    """The default parameters with changed leaves, as in ``parameters(grpo={"steps": 2})``."""
    tree = yaml.safe_load(FILE.read_text(encoding="utf-8")) | {"seed": 0}
    return Parameters.model_validate(_merged(tree, changes))


def _merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(tree)
    for key, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if nested else value
    return merged
