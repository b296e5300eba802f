"""Where results are: the folder of each environment, and of each dataset of the catalog."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from visual_grpo.common.errors import UserError
from visual_grpo.common.files import from_here, settled

CATALOG = Path(__file__).parents[3] / "conf/base/catalog.yml"
OUTPUT = "${output:}"
"""Stands for the parameter ``output`` in the catalog."""
ROOT = "data"
UNNAMED_ENVIRONMENTS = (None, "base", "local")


def home_folder(tree: Mapping[str, Any], environment: str | None, task: str) -> str:
    """The folder of an environment's results, with a subfolder for every ``data.task`` other than ``task``.

    The default environment has ``data``, an environment NAME ``data/NAME``; ``output``, if given, is the folder.
    """
    parts = [ROOT] if environment in UNNAMED_ENVIRONMENTS else [ROOT, str(environment)]
    asked = section(tree, "data").get("task", "t2i")
    return or_default(tree.get("output"), "/".join(parts if asked == task else [*parts, str(asked)]))


def with_output_folders(tree: Mapping[str, Any], home: str) -> dict[str, Any]:
    """The parameter tree with the folders that it leaves open (null): ``output`` and ``tracking.checkpoints``.

    The output is ``home``. The user's own data has a folder in that, named after ``data.path`` (and ``model.path``, if
    given): results of other data or a different model are kept apart.
    """
    path, model = (section(tree, name).get("path") for name in ("data", "model"))
    output = or_default(tree.get("output"), home if path is None else f"{home}/{_named_after(path, model)}")
    tracking = section(tree, "tracking")
    checkpoints = or_default(tracking.get("checkpoints"), str(place(output, "adapters").with_name("checkpoints")))
    return {**tree, "output": output, "tracking": {**tracking, "checkpoints": checkpoints}}


def place(output: str | Path, dataset: str) -> Path:
    """Returns where a dataset of the catalog is; ``output`` is the folder of results that stands for `OUTPUT` in it.

    Raises UserError if the catalog of the project has moved it to where no command could read it.
    """
    if not _catalog:
        use_catalog(yaml.safe_load(CATALOG.read_text(encoding="utf-8")))
    filepath = _catalog[0].get(dataset)
    if filepath is None or "://" in filepath:
        raise UserError(
            f"The catalog says that {dataset} is {'not in a file' if filepath is None else f'at {filepath}'}: expected"
            " the filepath of a file or folder of this machine, which other commands read. Change its entry in"
            " conf/*/catalog.yml."
        )
    return settled(Path(filepath.replace(OUTPUT, str(output))))


def use_catalog(entries: Mapping[str, Any]) -> None:
    """Takes over the catalog of a project: its merged entries, in which `OUTPUT` stands for the folder of results."""
    _catalog[:] = [{name: entry["filepath"] for name, entry in entries.items() if "filepath" in entry}]


_catalog: list[dict[str, str]] = []
"""Dataset -> filepath, as the loaded project's catalog says. A script uses that of conf/base."""


def or_default(value: Any, default: str) -> Any:
    """Returns ``default`` for null only; the validation refuses whatever else is not a folder's name."""
    return default if value is None else value


def _named_after(path: object, model: object) -> str:
    """The folder's name, with a hash over its place and the model's; the same for every spelling of them."""
    full = [Path(str(each)).expanduser().resolve() for each in (path, model) if each is not None]
    name = re.sub(r"[^\w.-]+", "_", full[0].name)[:40]
    places = "\0".join(from_here(each).as_posix() for each in full)
    return f"{name}-{hashlib.sha256(places.encode()).hexdigest()[:6]}"


def section(tree: Mapping[str, Any], name: str, path: str = "") -> Mapping[str, Any]:
    """Returns a section of the tree at ``path``; raises UserError if it is none."""
    found = tree.get(name, {})
    if not isinstance(found, Mapping):
        raise UserError(f"{path}{name} = {found!r}: expected a section, with a name and a value on each line.")
    return found
