"""Objects named in parameters as ``package.module:attribute``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import traceback
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError, nearest_hint


def load_attribute(path: str, setting: str) -> Any:
    """What ``package.module:attribute`` names; ``setting`` is what an error calls the parameter.

    Raises UserError for another spelling, where the module or the attribute does not exist, and where the module's own
    code fails.
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
            raise UserError(_own_failure(module_name, path, error)) from error
        raise UserError(
            f"no module {error.name!r} (from {path!r}): put the file into the project's root or install its package"
        ) from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(_own_failure(module_name, path, error)) from error


def _own_failure(module_name: str, path: str, error: BaseException) -> str:
    """The error of a module's code, and the lines that led to it from the module on."""
    spec = importlib.util.find_spec(module_name)
    own = spec.origin if spec is not None else None
    frames = traceback.extract_tb(error.__traceback__)
    first = next((number for number, frame in enumerate(frames) if frame.filename == own), len(frames))
    lines = [*traceback.format_list(frames[first:]), *traceback.format_exception_only(error)]
    return f"the module {module_name!r} (from {path!r}) cannot be imported:\n{''.join(lines).rstrip()}"
