"""Measures the repository (`make house`): what a newcomer has to read, and how long they wait."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "visual_grpo"
SMALL = 60


def main() -> None:
    sources, tests = tracked("src/*.py"), tracked("tests/*.py")
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources}
    functions = [(path, node) for path, tree in trees.items() for node in defined(tree)]
    path, longest = max(functions, key=lambda found: length(found[1]))
    local = sum(isinstance(inner, ast.Import | ast.ImportFrom) for _, node in functions for inner in ast.walk(node))
    pages = tracked("docs/*.md")
    small = sum(lines(path) <= SMALL for path in sources)
    measures = {
        "source files": f"{len(sources)}, {small} of at most {SMALL} lines",
        "lines of src": f"{sum(map(lines, sources)):,}",
        "lines of tests": f"{sum(map(lines, tests)):,}",
        "entries of src/visual_grpo": len({path.relative_to(PACKAGE).parts[0] for path in sources}),
        "floors (import-linter)": floors(),
        "imports inside functions": local,
        "longest function": f"{length(longest)} lines: {longest.name}, {path.relative_to(PACKAGE)}",
        "words of docs": f"{sum(map(words, pages)):,} in {len(pages)} pages",
        "words of the README": f"{words(ROOT / 'README.md'):,}",
        "kedro registry list": f"{startup():.1f} s of CPU",
    }
    for name, value in measures.items():
        print(f"{name:28}{value}")


def tracked(pattern: str) -> list[Path]:
    found = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in found.stdout.splitlines()]


def defined(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, without those that they define themselves."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            yield from defined(node)


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def words(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split())


def floors() -> int:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    return max(len(contract.get("layers", ())) for contract in contracts)


def startup() -> float:
    """Seconds of CPU, the median of three: other programs on the machine count less than in a wall time."""
    command = [str(Path(sys.executable).parent / "kedro"), "registry", "list"]
    found = []
    for _ in range(3):
        before = children_seconds()
        subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        found.append(children_seconds() - before)
    return sorted(found)[1]


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
