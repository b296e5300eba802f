"""Objects named in parameters as ``package.module:attribute``."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import pkgutil
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from visual_grpo.common.digests import option_texts
from visual_grpo.common.errors import UserError, nearest_hint

_PACKAGE = "visual_grpo"
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_INSTALLED = {"site-packages", "dist-packages"}


def load_attribute(path: str, setting: str) -> Any:
    """Imports ``package.module:attribute``; errors call the parameter ``setting``.

    Raises UserError for any other spelling, a missing module or attribute, and a module whose code fails.
    """
    module_name, separator, attribute = path.partition(":")
    if not (module_name and separator and attribute):
        raise UserError(f"{setting} is named package.module:name, got {path!r}")
    module = _module(module_name, path)
    try:
        return pkgutil.resolve_name(path)
    except AttributeError as error:
        hint = nearest_hint(attribute, dir(module))
        raise UserError(f"{module_name!r} has no {attribute!r} ({path!r}).{hint}") from error


def code_digest(path: str) -> str:
    """12 hex digits of the code of ``package.module:attribute``: they change when it is edited.

    Covers the module's file and those that it imports from the same folder; neither installed packages, nor this one,
    nor files that it reads at run time.
    """
    name = path.partition(":")[0]
    first = _file_of(name)
    if first is None:
        return "unknown"
    files = {name: first}
    root = first.parents[name.count(".") + (first.name == "__init__.py")]  # The folder on Python's path.
    _follow(name, first, root, files)
    digest = hashlib.sha256()
    for _, file in sorted(files.items()):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def option_code(options: Mapping[str, Any]) -> dict[str, str]:
    """`code_digest` of each function that an option names as ``package.module:name``, by the option's dotted name.

    A text of that form whose module is not there names no function.
    """
    named = ((name, text) for name, text in option_texts(options) if _FUNCTION.fullmatch(text))
    return {name: code_digest(text) for name, text in named if _file_of(text.partition(":")[0]) is not None}


def _follow(name: str, file: Path, root: Path, modules: dict[str, Path]) -> None:
    """Adds the modules below ``root`` that ``file`` imports, and those that they import, to ``modules``."""
    for imported in _imports(name, file):
        path = _file_below(root, imported) if imported.partition(".")[0] != _PACKAGE else None
        if imported in modules or path is None or _INSTALLED & set(path.parts):
            continue
        modules[imported] = path
        _follow(imported, path, root, modules)


def _imports(name: str, file: Path) -> Iterator[str]:
    """Dotted names that a file's import statements name, wherever they stand; some are attributes, not modules."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    with suppress(SyntaxError, ValueError):  # Said when it is imported.
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                with suppress(ImportError):
                    base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                    yield base
                    yield from (f"{base}.{alias.name}" for alias in node.names)


def _file_of(name: str) -> Path | None:
    """The file of a module; None for built-in ones, and if the module does not exist."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    file = Path(spec.origin) if spec is not None and spec.origin is not None else None
    return file if file is not None and file.suffix == ".py" and file.is_file() else None


def _file_below(root: Path, name: str) -> Path | None:
    """The file of a module below ``root``; imports no package, as `_file_of` does for a module inside one."""
    place = root.joinpath(*name.split("."))
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((file for file in files if file.is_file()), None)


def _module(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise UserError(
                f"no module {error.name!r} (from {path!r}): put the file into the project's root or install its package"
            ) from error
        file, frames = _file_of(name), traceback.extract_tb(error.__traceback__)
        first = next((number for number, frame in enumerate(frames) if frame.filename == str(file)), len(frames))
        lines = [*traceback.format_list(frames[first:]), *traceback.format_exception_only(error)]
        raise UserError(
            f"the module {name!r} (from {path!r}) cannot be imported:\n{''.join(lines).rstrip()}"
        ) from error
