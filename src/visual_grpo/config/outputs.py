"""Where a run writes: each environment and each dataset has a separate folder of outputs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLOW = ("starter", "data_preparation", "baseline", "train", "evaluate")
"""The pipelines of the data flow, in their order."""
ROOT = "data"
UNNAMED_ENVIRONMENTS = (None, "base", "local")
DRAWN_TASKS = {"shapes": "t2i", "words": "t2i", "scenes": "segmentation"}
"""What each of the starter's worlds is drawn for, unless data.task says otherwise."""


def with_output_folders(tree: Mapping[str, Any], environment: str | None) -> dict[str, Any]:
    """The parameter tree with every folder that it leaves open (null): ``output``, and the folders in it.

    The default environment with the drawn shapes writes into ``data``, an environment NAME into ``data/NAME``, another
    task into a folder named after it. The user's own data has a folder in that, named after ``data.path`` (and
    ``model.path``, if given), and shares the pretrained model: results of other data or another model are kept apart.
    """
    data, starter, tracking = (_section(tree, name) for name in ("data", "starter", "tracking"))
    if data is None or starter is None or tracking is None:
        return dict(tree)  # The validation says what is wrong with it.
    path, model = data.get("path"), _section(tree, "model")
    home = _or(tree.get("output"), _home(data, starter, environment))
    output = _or(
        tree.get("output"), f"{home}/{_named_after(str(path), (model or {}).get('path'))}" if path is not None else home
    )
    dataset = _or(starter.get("dataset"), f"{home}/01_raw/{starter.get('world', 'shapes')}")
    return {
        **tree,
        "output": output,
        "data": {**data, "path": _or(path, dataset)},
        "starter": {**starter, "dataset": dataset, "model": _or(starter.get("model"), f"{home}/06_models/base")},
        "tracking": {**tracking, "checkpoints": _or(tracking.get("checkpoints"), f"{output}/06_models/checkpoints")},
    }


def _home(data: Mapping[str, Any], starter: Mapping[str, Any], environment: str | None) -> str:
    """Where an environment draws its dataset and pretrains its model for a task."""
    parts = [ROOT] if environment in UNNAMED_ENVIRONMENTS else [ROOT, str(environment)]
    task = data.get("task", "t2i")
    drawn_for = DRAWN_TASKS.get(str(starter.get("world", "shapes")))
    return "/".join(parts if task == drawn_for else [*parts, str(task)])


def _or(value: Any, default: str) -> Any:
    """Nothing but null is left open; what else is no folder's name is for the validation to refuse."""
    return default if value is None else value


def _named_after(path: str, model: str | None) -> str:
    """The folder's name, with a hash over its place and the model's; the same for every spelling of them."""
    name = re.sub(r"[^\w.-]+", "_", Path(path).expanduser().resolve().name)[:40]
    places = "\0".join(_place(str(each)) for each in (path, model) if each is not None)
    return f"{name}-{hashlib.sha256(places.encode()).hexdigest()[:6]}"


def _place(path: str) -> str:
    full = Path(path).expanduser().resolve()
    return (full.relative_to(Path.cwd()) if full.is_relative_to(Path.cwd()) else full).as_posix()


def _section(tree: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    section = tree.get(name, {})
    return dict(section) if isinstance(section, Mapping) else None
