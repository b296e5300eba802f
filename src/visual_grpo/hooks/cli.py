"""``kedro run`` as Kedro has it, except that a text in ``--params`` needs no quotes and may contain commas.

The entry point `kedro.project_commands` in pyproject.toml replaces Kedro's own by it.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem
from kedro.framework.cli.project import run as run_of_kedro
from kedro.framework.project import pipelines
from kedro.pipeline import Pipeline
from kedro.utils import find_kedro_project
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.processes import is_rank
from visual_grpo.config.validation import is_text
from visual_grpo.operations.command import split_params, value_of


def parsed(text: str) -> dict[str, Any]:
    """Returns the tree of ``--params``; raises click.UsageError where something has no NAME= or no value."""
    tree = OmegaConf.create()
    try:
        for name, value in split_params(text):
            OmegaConf.update(tree, name, value_of(value, has_numbers=not is_text(name)))
    except (UserError, OmegaConfBaseException, ValueError) as error:
        raise click.UsageError(str(error)) from error
    return dict(OmegaConf.to_container(tree))  # type: ignore[arg-type]


_PARAMS_HELP = """Change parameters for this run: NAME=VALUE, several separated by commas, with a dot between a section
and its parameter. A text needs no quotes and may contain commas. Example: seed=3,grpo.steps=40"""
_REFUSED = {
    "only_missing_outputs": "it checks whether results exist, not whether they match these parameters and data;"
    " `make repro` runs what has changed",
    "runner": "only SequentialRunner: a stop must reach the training, and nodes pass on what is in memory",
}
_CHOOSING = {name: name for name in ("tags", "from_nodes", "to_nodes", "node_names", "from_inputs", "to_outputs")}
_CHOOSING["namespaces"] = "node_namespaces"
"""Option of Kedro -> argument of `Pipeline.filter`."""


class _Names(click.types.StringParamType):
    """A text, or several with commas between them, that the shell completes."""

    def __init__(self, known: Callable[[], Iterable[str]]) -> None:
        self._known = known

    def shell_complete(self, context: click.Context, option: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, begun = incomplete.rpartition(",")
        return [CompletionItem(f"{before}{comma}{name}") for name in self._known() if name.startswith(begun)]


def _pipelines() -> list[str]:
    return [name for name in pipelines if name != "__default__"]


def _environments() -> list[str]:
    return sorted(file.parent.name for file in Path("conf").glob("*/parameters.yml"))


_COMPLETED = {"pipeline": _pipelines, "pipelines": _pipelines, "env": _environments}


def _callback(context: click.Context, option: click.Parameter, value: Any) -> Any:
    return value if isinstance(value, dict) else parsed(value)


def _checked(command: Callable[..., Any] | None) -> Callable[..., Any]:
    """Refuses unknown pipelines and nodes, harmful options, and a folder below the project's, which lacks its files."""
    assert command is not None

    @wraps(command)
    def checked(*args: Any, **kwargs: Any) -> Any:
        root = find_kedro_project(Path.cwd())
        if root is not None and root != Path.cwd():
            raise click.UsageError(f"Run this in the project's folder: cd {shlex.quote(str(root))}")
        for option, why in _REFUSED.items():
            if kwargs.get(option) not in (None, False, "SequentialRunner"):
                raise click.UsageError(f"--{option.replace('_', '-')}: {why}")
        named = [*filter(None, [kwargs.get("pipeline"), *(kwargs.get("pipelines") or [])])]
        for name in named:
            if name not in pipelines:
                known = _pipelines()
                several = f" Name several with --pipelines={name}." if "," in name else ""
                hint = several or nearest_hint(name, known)
                raise click.ClickException(f"The pipeline {name!r} does not exist.{hint} Pipelines: {', '.join(known)}")
        if chosen := {option: kwargs[name] for name, option in _CHOOSING.items() if kwargs.get(name)}:
            whole = sum((pipelines[name] for name in named or ["__default__"]), Pipeline([]))
            try:
                whole.filter(**chosen)
            except ValueError as error:
                raise click.ClickException(f"{error} Its nodes: {', '.join(n.name for n in whole.nodes)}") from error
        return command(*args, **kwargs)

    return checked


def _on_all_ranks(command: Callable[..., Any]) -> Callable[..., Any]:
    """Under torchrun, runs the command on rank 0, which the other ranks follow."""

    @wraps(command)
    def followed(*args: Any, **kwargs: Any) -> Any:
        if not is_rank():
            return command(*args, **kwargs)
        from visual_grpo.grpo.distributed.launch import run_under_torchrun

        return run_under_torchrun(lambda: command(*args, **kwargs))

    return followed


run = copy.copy(run_of_kedro)
run.params = [copy.copy(option) for option in run_of_kedro.params]
for _option in run.params:
    assert isinstance(_option, click.Option)
    if _option.name == "params":
        _option.callback, _option.help = _callback, _PARAMS_HELP
    if _option.name in _COMPLETED:
        _option.type = _Names(_COMPLETED[_option.name])
    _option.hidden = _option.name in _REFUSED
run.callback = _on_all_ranks(_checked(run_of_kedro.callback))
# Kedro merges groups of one name, and the first `run` counts: with a different name, `kedro --help` lists both.
cli = click.Group("kedro", commands=[run])
