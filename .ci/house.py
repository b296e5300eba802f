"""Measures the repository (`make house`): is each thing done in one place, and how much is there to read."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))
from tests.small_project import paste, small_project  # noqa: E402

SECTIONS = set(yaml.safe_load((ROOT / "conf/base/parameters.yml").read_text(encoding="utf-8")))
COUNT_MODULES = """

import sys

from torch.optim.optimizer import register_optimizer_step_pre_hook


def count_modules(*_):
    handle.remove()
    print("MODULES", sum(name.partition(".")[0] == "visual_grpo" for name in sys.modules), file=sys.stderr)


handle = register_optimizer_step_pre_hook(count_modules)
"""

IMPORTS = ast.Import | ast.ImportFrom


def main() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in tracked("src/*.py")}
    source = sum(map(lines, trees))
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    imports = sum((node.end_lineno or 0) - node.lineno + 1 for node in nodes if isinstance(node, IMPORTS))
    files = [path.name for path in trees if path.name != "__init__.py"]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    for name, value, target in (
        ("lists of parameters outside their definitions", sum(map(parameter_lists, trees.values())), "0"),
        ("calls of place(), the second reading of the catalog", sum(map(catalog_reads, trees.values())), "0"),
        ("modules before the first gradient of a training", modules_of_training(), "at most 80"),
        ("unittest.mock, and private names of Kedro", sum(map(reaches_inside, trees.values())), "0"),
        ("names of several files", twice(files), "at most 3"),
        ("names of several classes", twice(classes), "0"),
        ("percent of the lines that are imports", round(100 * imports / source, 1), "at most 7"),
        ("lines of src/visual_grpo", source, "-"),
        ("lines of tests", sum(map(lines, tracked("tests/*.py"))), "-"),
        ("lines of examples", sum(map(lines, tracked("examples/*.py"))), "-"),
    ):
        print(f"{name:56}{value:>8,}   target: {target}")


def parameter_lists(tree: ast.Module) -> int:
    """Module-level literals of two or more parameters' names (``grpo.steps``), half of their texts or more."""
    found = 0
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        texts = [each.value for each in ast.walk(value) if isinstance(each, ast.Constant)] if value else []
        names = [text for text in texts if isinstance(text, str) and text.partition(".")[0] in SECTIONS and "." in text]
        found += len(names) > 1 and 2 * len(names) >= len(texts)
    return found


def catalog_reads(tree: ast.Module) -> int:
    """Calls of ``place``, but not of the function of this name that puts networks on a device."""
    of_config = any(
        isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("visual_grpo.config")
        and any(alias.name == "place" for alias in node.names)
        for node in ast.walk(tree)
    )
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    methods = sum(isinstance(function, ast.Attribute) and function.attr == "place" for function in calls)
    return methods + of_config * sum(isinstance(function, ast.Name) and function.id == "place" for function in calls)


def modules_of_training() -> int:
    """Counts this project's modules when the optimiser of a small training takes its first step."""
    with TemporaryDirectory() as folder:
        project = small_project(Path(folder, "project"))
        with (project / "src/visual_grpo/settings.py").open("a", encoding="utf-8") as settings:
            settings.write(COUNT_MODULES)
        for pipelines in ("starter,data_preparation,baseline", "train"):
            done = paste(f".venv/bin/kedro run --pipelines={pipelines}", project)
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
    return int(re.findall(r"^MODULES (\d+)$", done.stderr, re.MULTILINE)[0])


def reaches_inside(tree: ast.Module) -> int:
    """Imports of `unittest.mock`; in modules that import Kedro, private names that they do not define."""
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    mocks = sum(module.startswith("unittest") for module in imported)
    if not any(module.partition(".")[0] == "kedro" for module in imported):
        return mocks
    own, read = defined(tree), [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return mocks + sum(re.match("_[a-z]", name) is not None and name not in own for name in read)


def defined(tree: ast.Module) -> set[str]:
    """Names of functions and attributes that a module defines."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return names | {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def twice(names: list[str]) -> int:
    return sum(count > 1 for count in Counter(names).values())


def tracked(pattern: str) -> list[Path]:
    found = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in found.stdout.splitlines()]


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    main()
