"""The default parameters, with changes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from visual_grpo import provenance
from visual_grpo.config import Parameters
from visual_grpo.config.decides import DEPENDS_ON
from visual_grpo.config.schema import merged
from visual_grpo.models.run_spec import resolve
from visual_grpo.starter.world_defaults import with_world

FILE = Path(__file__).parents[2] / "conf" / "base" / "parameters.yml"


def parameters(**changes: Any) -> Parameters:
    """The default parameters with changed leaves, as in ``parameters(grpo={"steps": 2})``."""
    return Parameters.model_validate(with_world(merged(deepcopy(_tree()) | {"seed": 0}, changes)))


@cache
def _tree() -> dict[str, Any]:
    """Reading it takes longer than validating it."""
    tree: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return tree


def samples_record(config: Parameters, commits: Mapping[str, Any] | None = None, **report: Any) -> dict[str, Any]:
    """What samples pair by; ``report`` are entries of the starter's report, ``commits`` those of the hub's files that
    rewards read."""
    starter = {"model": "m", "digest": "model", "content": None} | report
    with (
        patch.object(provenance, "reward_commits", return_value=commits or {}),
        patch.object(provenance, "runtime", return_value={}),  # It asks for the device, which need not be here.
    ):
        record = provenance.of(resolve(config), starter, "data")
    return provenance.values(record, DEPENDS_ON["baseline"], rounding=False)
