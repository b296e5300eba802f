"""Measures the repository (`make house`): what a newcomer has to read, and how long they wait."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "visual_grpo"
SMALL = 60
RESOLVE = "resolve"
"""The function that turns parameters into what a command needs."""
COMMAND_STATE = "visual_grpo.operations.command"
STARTER = ("starter/", "pipelines/starter.py")
ABOVE_CORE = ("starter/", "pipelines/")
WORLDS = {"shapes", "rendering"}
LAYERS = re.compile(r"0\d_(raw|model_input|models|model_output|reporting)\b")
ORIGIN = (
    *("provenance.py", "config/adapter_folder.py", "training/resuming.py", "operations/candidates.py"),
    *("operations/lineage.py", "operations/reproduction/repeat.py", "pipelines/compare.py"),
)
"""The modules that decide whether two things have the same origin."""

Trees = dict[Path, ast.Module]


def main() -> None:
    sources, examples, tests = tracked("src/*.py"), tracked("examples/*.py"), tracked("tests/*.py")
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources}
    functions = [(path, node) for path, tree in trees.items() for node in defined(tree)]
    path, longest = max(functions, key=lambda found: length(found[1]))
    local = sum(isinstance(inner, ast.Import | ast.ImportFrom) for _, node in functions for inner in ast.walk(node))
    pages = tracked("docs/*.md")
    small = sum(lines(path) <= SMALL for path in sources)
    measures = {
        "source files": f"{len(sources)}, {small} of at most {SMALL} lines",
        "lines of src": f"{sum(map(lines, sources)):,}",
        "lines of examples": f"{sum(map(lines, examples)):,}",
        "lines of tests": f"{sum(map(lines, tests)):,}",
        "entries of src/visual_grpo": len({path.relative_to(PACKAGE).parts[0] for path in sources}),
        "floors (import-linter)": len(floors()),
        "imports inside functions": local,
        "longest function": f"{length(longest)} lines: {longest.name}, {path.relative_to(PACKAGE)}",
        "words of docs": f"{sum(map(words, pages)):,} in {len(pages)} pages",
        "words of the README": f"{words(ROOT / 'README.md'):,}",
        "kedro registry list": f"{startup():.1f} s of CPU",
    }
    for name, value in measures.items():
        print(f"{name:28}{value}")
    print()
    for name, (count, target) in ways(trees).items():
        print(f"{name:52}{count:>5,}   target {target:,}")


def ways(trees: Trees) -> dict[str, tuple[int, int]]:
    """Measure -> (value, target): how many ways there are of doing one thing."""
    graph = grimp.build_graph("visual_grpo", exclude_type_checking_imports=False, cache_dir=None)
    importers = graph.find_modules_that_directly_import(COMMAND_STATE)
    below = set().union(*floors()[floors().index({"operations"}) + 1 :])
    origin = [path for path in trees if inside(path) in ORIGIN]
    return {
        "signatures that take the whole Parameters": (sum(map(whole_parameters, trees.values())), 35),
        f"calls of {RESOLVE}": (sum(map(resolving_calls, trees.values())), 1),
        "files that know the starter's report": (sum(knows_report(path) for path in trees), 0),
        "files of the core that know the drawn worlds": (sum(knows_worlds(*item) for item in trees.items()), 0),
        "files below operations that import command state": (sum(name.split(".")[1] in below for name in importers), 0),
        "lists of pipelines beside their module": (pipeline_lists(trees), 2),
        "path literals that repeat the catalog": (sum(map(catalog_paths, trees.values())), 0),
        "import circles, typing imports counted": (circles(graph), 0),
        "lines of provenance and its predecessors": (sum(map(lines, origin)), 700),
    }


def whole_parameters(tree: ast.Module) -> int:
    return sum(
        any(re.search(r"\bParameters\b", ast.unparse(each.annotation)) for each in arguments(node) if each.annotation)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    given = node.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]


def resolving_calls(tree: ast.Module) -> int:
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sum(isinstance(function, ast.Name) and function.id == RESOLVE for function in calls)


def knows_report(path: Path) -> bool:
    return not inside(path).startswith(STARTER) and "starter_report" in path.read_text(encoding="utf-8")


def knows_worlds(path: Path, tree: ast.Module) -> bool:
    """By a string or an import, not by the words: tensors have shapes, and texts have words."""
    if inside(path).startswith(ABOVE_CORE):
        return False
    named = [*strings(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            named += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
    return any(text in WORLDS or text.startswith("visual_grpo.starter") for text in named)


def catalog_paths(tree: ast.Module) -> int:
    """Without texts, which have spaces: they tell a reader where something is."""
    return sum(LAYERS.search(text) is not None and " " not in text for text in strings(tree))


def pipeline_lists(trees: Trees) -> int:
    """Module-level tuples, lists, sets and keys, of which half or more are names of pipelines or of datasets."""
    pipelines = {path.stem for path in trees if inside(path).startswith("pipelines/")}
    catalog = (ROOT / "conf/base/catalog.yml").read_text(encoding="utf-8")
    datasets = set(re.findall(r"^(\w+):", catalog, re.MULTILINE))
    found = 0
    for path, tree in trees.items():
        for node in tree.body if not inside(path).startswith("pipelines/") else ():
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if isinstance(value, ast.Tuple | ast.List | ast.Set | ast.Dict):
                elements = value.keys if isinstance(value, ast.Dict) else value.elts
                names = {text for element in elements if element for text in strings(element)}
                known = max(len(names & pipelines), len(names & datasets))
                found += known > 1 and 2 * known >= len(names)
    return found


def strings(tree: ast.AST) -> Iterator[str]:
    """String constants, without docstrings."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def circles(graph: grimp.ImportGraph) -> int:
    arrows = [(one, other) for one in graph.modules for other in graph.find_modules_directly_imported_by(one)]
    return sum(len(group) > 1 for group in networkx.strongly_connected_components(networkx.DiGraph(arrows)))


def inside(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


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


def floors() -> list[set[str]]:
    """The packages of each floor, from the top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [contract] = [each for each in settings["tool"]["importlinter"]["contracts"] if "layers" in each]
    return [set(layer.split(" | ")) for layer in contract["layers"]]


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
