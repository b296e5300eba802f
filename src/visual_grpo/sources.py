"""Which files of this package a pipeline's results depend on: those that its modules import, however deep.

Imports within functions count, and what is named in a table of ``package.module:attribute``. What only shows results,
or words an error, does not: no result is another when it changes.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grimp

PACKAGE = "visual_grpo"
SHOWN_ONLY = (
    "command",
    "computed_with",
    "console",
    "decisive_parameters",
    "errors",
    "evaluation.fonts",
    "evaluation.pictures",
    "faults",
    "model_card",
    "sources",
    "stopping",
    "third_party_output",
    "tracking",
    "visible_text",
)
"""Modules and packages that show, word, record or tell results apart; none decides what is drawn or learned."""
NOT_CALLED = (
    # Only the training calls these, which also imports them itself.
    ("components", "grpo.trainer"),
    ("components", "grpo.two_stage"),
    # From there only the name of the starter's family.
    ("components", "starter.build"),
    ("policies.token_policy", "grpo.losses"),
)
"""Imports (of a module, of what) that a pipeline does not follow: it does not call what is imported there."""
_TRAINING = ("grpo.trainer", "grpo.two_stage", "grpo.losses")


def files_of(pipeline: str) -> list[Path]:
    """The modules' files that ``pipelines/<pipeline>`` depends on, sorted; paths relative to the package's folder."""
    return sorted(_file_of(module) for module in modules_of(pipeline))


def source_digest(pipeline: str) -> str:
    """64 hex digits over `files_of`: another if one of these files is."""
    digest = hashlib.sha256()
    for file in files_of(pipeline):
        content = (package_folder() / file).read_bytes()
        digest.update(f"{file.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def modules_of(pipeline: str) -> set[str]:
    """Dotted names of the modules that a pipeline's result depends on, its own among them."""
    graph = _graph()
    own = _with_descendants(graph, f"{PACKAGE}.pipelines.{pipeline}")
    starts = {*own, *(f"{PACKAGE}.{name}" for name in _TRAINING)} if pipeline == "train" else own
    upstream = (graph.find_upstream_modules(module) for module in starts)
    return starts.union(*upstream)


def package_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def _graph() -> grimp.ImportGraph:
    import grimp

    from visual_grpo.policies import families
    from visual_grpo.rewards import catalogue

    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=True, cache_dir=None)
    for table in (catalogue, families):
        for path in table.BUILT_IN.values():
            graph.add_import(importer=table.__name__, imported=path.partition(":")[0])
    _remove_imports(graph, NOT_CALLED)
    for name in SHOWN_ONLY:
        for module in _with_descendants(graph, f"{PACKAGE}.{name}"):
            graph.remove_module(module)
    return graph


def _remove_imports(graph: grimp.ImportGraph, pairs: Iterable[tuple[str, str]]) -> None:
    for importer, imported in pairs:
        a, b = f"{PACKAGE}.{importer}", f"{PACKAGE}.{imported}"
        if not graph.direct_import_exists(importer=a, imported=b):
            raise ValueError(f"{a} no longer imports {b}: take it out of NOT_CALLED")
        graph.remove_import(importer=a, imported=b)


def _with_descendants(graph: grimp.ImportGraph, module: str) -> set[str]:
    if module not in graph.modules:
        raise ValueError(f"there is no module {module}")
    return {module, *graph.find_descendants(module)}


def _file_of(module: str) -> Path:
    path = Path(*module.split(".")[1:])
    return path / "__init__.py" if (package_folder() / path).is_dir() else path.with_suffix(".py")
