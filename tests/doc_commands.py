"""Is a command of the pages one that works? Checked without running it, up to the point where its work would start."""

from __future__ import annotations

import itertools
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from kedro.config import OmegaConfigLoader

from tests.markdown import ROOT
from visual_grpo.config import Parameters
from visual_grpo.config.defaults import AUTO, with_output_folders
from visual_grpo.config.schema import validate
from visual_grpo.pipeline_registry import PIPELINES
from visual_grpo.settings import CONFIG_LOADER_ARGS
from visual_grpo.training.components import build_scorer, make_run_spec


def check_command(words: list[str], project: Path) -> None:
    """Raises an error, or fails, where a command of a page would end with one.

    Args:
        project: a folder with a copy of conf, which ``cp`` may change.
    """
    checker = CHECKERS.get(Path(words[0]).name)
    assert checker is not None, f"no check for the command {words[0]}: add one to {Path(__file__).name}"
    checker(words, project)


def parameters_of(project: Path, env: str | None = None, changes: dict[str, Any] | None = None) -> Parameters:
    """What `kedro run` would see."""
    assert env is None or (project / "conf" / env).is_dir(), f"there is no conf/{env}"
    loader = OmegaConfigLoader(str(project / "conf"), env=env or "local", runtime_params=changes, **CONFIG_LOADER_ARGS)
    return validate(with_output_folders(loader["parameters"], env))


def check_parameters(config: Parameters) -> None:
    """They fit the family, and the rewards can be built; on a machine without a GPU too."""
    spec = make_run_spec(config)
    if config.reward == AUTO:  # The records decide it (tests/operations/preflight).
        return
    rewards = {name: r.model_copy(update={"options": _on_cpu(r.options)}) for name, r in config.rewards.items()}
    for module in spec.modules:
        build_scorer(config.model_copy(update={"rewards": rewards}), [module])


def _on_cpu(options: Any) -> Any:
    if isinstance(options, dict):
        return {name: _on_cpu(value) for name, value in options.items()}
    return "cpu" if options == "cuda" else options


def _kedro(words: list[str], project: Path) -> None:
    from kedro.framework.cli.project import run

    assert words[1] == "run", f"only kedro run is checked, got {words}"
    given = run.make_context("kedro run", words[2:]).params
    names = [name for name in (given["pipeline"], *(given["pipelines"] or ())) if name]
    assert set(names) <= set(PIPELINES)
    check_parameters(parameters_of(project, given["env"], given["params"]))


def _torchrun(words: list[str], project: Path) -> None:
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(words[1:])
    assert (given.module, given.training_script) == (True, "visual_grpo.grpo.distributed"), words
    _kedro(["kedro", *given.training_script_args], project)


def _make(words: list[str], project: Path) -> None:
    """``-n`` runs nothing."""
    subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)


def _python(words: list[str], project: Path) -> None:
    """A benchmark or module takes these arguments: its parser is called, its work is not."""
    if words[1] == "-m":
        _module(words[2:])
        return
    script = ROOT / words[1]
    assert script.parent == ROOT / "benchmarks"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words[1:])
        patch.syspath_prepend(script.parent)
        parse = runpy.run_path(str(script), run_name="not main").get("_arguments")
        assert parse is not None, f"{words[1]} has no _arguments()"
        parse()


def _module(words: list[str]) -> None:
    assert find_spec(words[0]) is not None, f"there is no module {words[0]}"
    parse = getattr(import_module(words[0]), "_arguments", None)
    if parse is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words)
            parse()


def _cp(words: list[str], project: Path) -> None:
    assert words[1] == "-r"
    assert words[2].startswith("conf/")
    shutil.copytree(project / words[2], project / words[3])


def _tool(*allowed: str) -> Callable[[list[str], Path], None]:
    def check(words: list[str], project: Path) -> None:
        assert words[1] in allowed, f"{words[0]} {words[1]} is not checked"
        for path in words[2:]:
            assert path.startswith("-") or (ROOT / path).exists(), path

    return check


def _dvc(words: list[str], project: Path) -> None:
    verbs = {"repro": (), "exp": ("run", "show"), "metrics": ("show",), "plots": ("show",)}
    allowed = verbs[words[1]]
    if not allowed:
        _tool("repro")(words, project)
        return
    assert words[2] in allowed, words[2]
    for option, value in itertools.pairwise(words):
        if option == "-S":
            file, _, setting = value.partition(":")
            assert (ROOT / file).is_file(), file
            assert is_parameter(setting.partition("=")[0]), setting


CHECKERS: dict[str, Callable[[list[str], Path], None]] = {
    "kedro": _kedro,
    "torchrun": _torchrun,
    "make": _make,
    "python": _python,
    "cp": _cp,
    "jupyter": _tool("lab"),
    "mlflow": _tool("ui"),
    "dvc": _dvc,
    "pytest": lambda words, project: _exist([w.partition("::")[0] for w in words[1:] if not w.startswith("-")]),
    "pre-commit": _tool("install", "run"),
    "openssl": lambda words, project: _is_in(words[1], ("ecparam", "ec")),
    "git": _tool("clone", "status", "switch"),
}


def _is_in(word: str, known: tuple[str, ...]) -> None:
    assert word in known, word


def _exist(paths: list[str]) -> None:
    assert all((ROOT / path).exists() for path in paths), paths


def is_parameter(name: str) -> bool:
    """Whether ``grpo.steps`` is in the schema; modules and rewards have names of one's own."""
    from visual_grpo.config.schema import _section

    if re.fullmatch(r"(modules|rewards)\.\w+", name):
        return True
    *section, last = name.split(".")
    model = _section(section)
    return last in model.model_fields if model is not None else _holds_anything(section)


def _holds_anything(path: list[str]) -> bool:
    """Options and the weights of rewards are dictionaries with keys of one's own."""
    return "options" in path or path[-1:] == ["rewards"]
