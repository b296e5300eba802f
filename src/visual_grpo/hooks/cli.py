"""``kedro run`` as Kedro has it, but that a comma within a value of ``--params`` separates nothing.

The entry point `kedro.project_commands` in pyproject.toml puts it in the place of Kedro's own.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click
from kedro.framework.cli.project import run as run_of_kedro
from kedro.framework.project import pipelines
from kedro.utils import find_kedro_project
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from visual_grpo.common.errors import nearest_hint
from visual_grpo.common.processes import under_torchrun

_NEXT = re.compile(r",(?=\s*[^\s,=]+\s*=)")
"""A comma that separates two parameters: another NAME= follows."""


def parsed(text: str) -> dict[str, Any]:
    """Returns the tree of ``--params``. A value is YAML, as for Kedro: in double quotes it is a text.

    Raises click.UsageError: something has no NAME=, no value, or is no YAML.
    """
    items = []
    for item in filter(None, (part.strip(", \t\r\n") for part in _NEXT.split(text))):
        name, _, value = (part.strip() for part in item.partition("="))
        if not name or not value:  # A shell's empty variable would give the default without a word.
            raise click.UsageError(f"--params: expected NAME=VALUE, several with commas (none: null); got {item!r}")
        items.append(f"{name}={value}")
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.from_dotlist(items))
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise click.UsageError(f"--params: {text!r} cannot be read; put a text into double quotes: {error}") from error
    return dict(tree)


def _callback(context: click.Context, option: click.Parameter, value: Any) -> Any:
    return value if isinstance(value, dict) else parsed(value)


@click.group(name="visual_grpo")
def cli() -> None:
    """Commands of this project, beside Kedro's."""


def _checked(command: Callable[..., Any] | None) -> Callable[..., Any]:
    """Refuses unknown pipelines, and a folder below the project's: Kedro finds the project, but not its files."""
    assert command is not None

    @wraps(command)
    def checked(*args: Any, **kwargs: Any) -> Any:
        root = find_kedro_project(Path.cwd())
        if root is not None and root != Path.cwd():
            raise click.UsageError(f"Run this in the project's folder: cd {shlex.quote(str(root))}")
        named = [kwargs.get("pipeline"), *(kwargs.get("pipelines") or [])]
        for name in filter(None, named):
            if name not in pipelines:
                known = [own for own in pipelines if own != "__default__"]
                hint = nearest_hint(name, known)
                raise click.ClickException(f"There is no pipeline {name!r}.{hint} There are: {', '.join(known)}")
        return command(*args, **kwargs)

    return checked


def _on_all_ranks(command: Callable[..., Any]) -> Callable[..., Any]:
    """Under torchrun, runs the command on rank 0, which the other ranks follow."""

    @wraps(command)
    def followed(*args: Any, **kwargs: Any) -> Any:
        if not under_torchrun():
            return command(*args, **kwargs)
        from visual_grpo.grpo.distributed.launch import run_under_torchrun

        return run_under_torchrun(lambda: command(*args, **kwargs))

    return followed


run = copy.copy(run_of_kedro)
run.params = [copy.copy(option) for option in run_of_kedro.params]
for _option in run.params:
    if _option.name == "params":
        _option.callback = _callback
run.callback = _on_all_ranks(_checked(run_of_kedro.callback))
cli.add_command(run)
