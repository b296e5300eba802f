"""Objects named in parameters as ``package.module:attribute``."""

from __future__ import annotations

import importlib
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


def _module(module_name: str, path: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # The module exists; something that it imports does not.
        raise UserError(
            f"no module {error.name!r} (from {path!r}): put the file into the project's root or install its package"
        ) from error
