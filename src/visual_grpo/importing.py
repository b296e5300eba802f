"""Objects named in parameters as ``package.module:attribute``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError, nearest_hint


def load_attribute(path: str, setting: str) -> Any:
    """What ``package.module:attribute`` names; ``setting`` is what an error calls the parameter.

    Raises UserError for another spelling, and where the module or the attribute does not exist.
    """
    module_name, separator, attribute = path.partition(":")
    if not (module_name and separator and attribute):
        raise UserError(f"{setting} is named package.module:name, got {path!r}")
    found: Any = _module(module_name, path)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserError(f"{module_name!r} has no {attribute!r} ({path!r}).{nearest_hint(part, dir(found))}")
        found = getattr(found, part)
    return found


def code_digest(path: str) -> str:
    """12 hex digits of the file in which the module of ``package.module:attribute`` is: they change when it is edited.

    What the file imports is not part of it.
    """
    spec = importlib.util.find_spec(path.partition(":")[0])
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return "unknown"
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:12]


def _module(module_name: str, path: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # The module exists; something that it imports does not.
        raise UserError(
            f"no module {error.name!r} (from {path!r}): put the file into the project's root or install its package"
        ) from error
