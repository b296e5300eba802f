"""The parameters behind a result: which differ from conf/base, and what they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from visual_grpo.config import flatten
from visual_grpo.config.validation import validate
from visual_grpo.errors import UserError

BASE = Path("conf/base/parameters.yml")
_RUNS_OWN = ("output", "resume")
"""Parameters that say where a run writes and how it went on: never a difference in settings."""


def configuration(parameters: Mapping[str, Any], base: Path = BASE) -> dict[str, list[tuple[str, Any, Any]]]:
    """``changed`` and ``all`` parameters as (dotted name, value, value in conf/base).

    ``parameters`` is the tree, or already flat. Without a usable file ``base``, nothing counts as changed.
    """
    own = flatten(parameters)
    before = _base_parameters(base)
    rows = [(name, value, before.get(name)) for name, value in sorted(own.items())]
    sections = {name.partition(".")[0] for name in own}
    # A section that is not there at all, such as how to retrain, is none of the result's.
    absent = (name for name in sorted(before) if name not in own and name.partition(".")[0] in sections)
    rows += [(name, None, before[name]) for name in absent]
    changed = [row for row in rows if before and row[1] != row[2] and row[0] not in _RUNS_OWN]
    return {"changed": changed, "all": [row for row in rows if row[0] in own]}


def _base_parameters(path: Path) -> dict[str, Any]:
    """Those of a file, with the schema's defaults; none where there is no such file or it is no whole configuration."""
    if not path.is_file():
        return {}
    try:
        return flatten(validate(yaml.safe_load(path.read_text(encoding="utf-8"))).model_dump(mode="json"))
    except (UserError, yaml.YAMLError, TypeError):
        return {}
