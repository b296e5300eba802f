"""Is a command of the pages one that works? Checked without running it, up to the point where its work would start."""

from __future__ import annotations

import itertools
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from kedro.config import OmegaConfigLoader
from kedro.framework.cli.project import run
from torch.distributed.run import get_args_parser

from tests.markdown import ROOT
from visual_grpo.config import Parameters
from visual_grpo.config.presets import AUTO
from visual_grpo.config.validation import _section, validate
from visual_grpo.models.run_spec import resolve
from visual_grpo.pipeline_registry import NAMES
from visual_grpo.settings import CONFIG_LOADER_ARGS
from visual_grpo.starter.world_defaults import with_world
from visual_grpo.training.components import build_scorer


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
    return validate(with_world(loader["parameters"], env))


def check_parameters(config: Parameters) -> None:
    """They fit the family, and the rewards can be built; on a machine without a GPU too."""
    spec = resolve(config)
    if config.reward == AUTO:  # The records decide it (tests/operations/preflight).
        return
    rewards = {name: r.model_copy(update={"options": _on_cpu(r.options)}) for name, r in config.rewards.items()}
    for module in spec.modules:
        build_scorer(replace(spec, config=config.model_copy(update={"rewards": rewards})), [module])


def is_parameter(name: str) -> bool:
    """Whether ``grpo.steps`` is in the schema; modules, rewards, options and weights have names of one's own."""
    if re.fullmatch(r"(modules|rewards)\.\w+", name):
        return True
    *section, last = name.split(".")
    model = _section(section)
    if model is None:
        return "options" in section or section[-1:] == ["rewards"]
    return last in model.model_fields


def _on_cpu(options: Any) -> Any:
    if isinstance(options, dict):
        return {name: _on_cpu(value) for name, value in options.items()}
    return "cpu" if options == "cuda" else options


def _kedro(words: list[str], project: Path) -> None:
    assert words[1] == "run", f"only kedro run is checked, got {words}"
    params = run.make_context("kedro run", words[2:]).params
    assert {name for name in (params["pipeline"], *(params["pipelines"] or ())) if name} <= set(NAMES)
    check_parameters(parameters_of(project, params["env"], params["params"]))


def _torchrun(words: list[str], project: Path) -> None:
    args = get_args_parser().parse_args(words[1:])
    assert (args.module, args.training_script) == (True, "kedro"), words
    _kedro(["kedro", *args.training_script_args], project)


def _make(words: list[str], project: Path) -> None:
    """``-n`` runs nothing."""
    subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)


def _python(words: list[str], project: Path) -> None:
    """A benchmark or module takes these arguments: its parser is called, its work is not."""
    is_module = words[1] == "-m"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words[2:] if is_module else words[1:])
        if is_module:
            parse = getattr(import_module(words[2]), "_arguments", lambda: None)
        else:
            assert words[1].startswith("benchmarks/")
            patch.syspath_prepend(ROOT / "benchmarks")
            parse = runpy.run_path(str(ROOT / words[1]), run_name="not main")["_arguments"]
        parse()


def _cp(words: list[str], project: Path) -> None:
    assert words[1] == "-r"
    assert words[2].startswith("conf/")
    shutil.copytree(project / words[2], project / words[3])


def _dvc(words: list[str], project: Path) -> None:
    verbs = {"exp": ("run", "show"), "metrics": ("show",), "plots": ("show", "diff")}
    if words[1] not in verbs:
        _tool("repro")(words, project)
        return
    assert words[2] in verbs[words[1]], words[2]
    for option, value in itertools.pairwise(words):
        if option == "-S":
            file, _, setting = value.partition(":")
            assert (ROOT / file).is_file(), file
            assert is_parameter(setting.partition("=")[0]), setting


def _tool(*allowed: str, paths: bool = True) -> Callable[[list[str], Path], None]:
    """Only these subcommands; what follows are options and paths of this project."""

    def check(words: list[str], project: Path) -> None:
        assert not allowed or words[1] in allowed, f"{words[0]} {words[1]} is not checked"
        for word in words[2 if allowed else 1 :] if paths else ():
            assert word.startswith("-") or (ROOT / word.partition("::")[0]).exists(), word

    return check


CHECKERS: dict[str, Callable[[list[str], Path], None]] = {
    "kedro": _kedro,
    "torchrun": _torchrun,
    "make": _make,
    "python": _python,
    "cp": _cp,
    "jupyter": _tool("lab"),
    "mlflow": _tool("ui"),
    "dvc": _dvc,
    "pytest": _tool(),
    "pre-commit": _tool("install", "run"),
    "openssl": _tool("ecparam", "ec", paths=False),
    "git": _tool("clone", "status", "switch"),
}
