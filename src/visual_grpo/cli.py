"""``kedro run`` as Kedro has it, but for ``--params``: commas, colons and brackets may be in a text.

Kedro looks for this module by its name.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click
from kedro.framework.cli.project import run as run_of_kedro
from kedro.utils import find_kedro_project
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from visual_grpo.command import NEXT_PARAMETER

_FORM = (
    "expected NAME=VALUE, several separated by commas; a VALUE may be in double quotes, as in 'seed=3,name=\"a, b=c\"'"
)
_QUOTED = r'"(?:[^"\\]|\\.)*"|' + r"'[^']*'"
_PARAMETER = re.compile(
    rf"\s*(?P<name>[^\s,=]+)\s*=\s*(?P<value>(?:{_QUOTED})(?=\s*(?:,|$))|.*?)\s*(?:(?=(?:,\s*)*{NEXT_PARAMETER})|[,\s]*$)",
    re.DOTALL,
)
_BETWEEN = ", \t\r\n"
_UNREADABLE = (YAMLError, OmegaConfBaseException, ValueError)


def parsed(text: str) -> dict[str, Any]:
    """The tree of ``--params``.

    A comma separates parameters where another NAME= follows; several commas are one. A value is YAML, as for Kedro;
    what is no YAML, or a YAML mapping, list or comment without brackets, is a text.

    Raises:
        click.UsageError: something has no NAME=, or no value.
    """
    items, rest = [], text.strip(_BETWEEN)
    while rest:
        found = _PARAMETER.match(rest)
        if found is None:
            raise click.UsageError(f"--params: {_FORM}; got {rest!r}")
        if not found["value"]:
            name = found["name"]
            raise click.UsageError(
                f"--params: {name}= has no value; is a variable of the shell empty? To set none, write {name}=null"
            )
        items.append(f"{found['name']}={_yaml(found['value'])}")
        rest = rest[found.end() :].lstrip(_BETWEEN)
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.from_dotlist(items))
    except _UNREADABLE as error:
        raise click.UsageError(f"--params: {_FORM}; got {text!r}: {error}") from error
    return dict(tree)


def _yaml(value: str) -> str:
    """The value, quoted if it is a text that YAML would read as something else."""
    quoted = json.dumps(value, ensure_ascii=False)
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
    except _UNREADABLE:
        return quoted
    content = read["value"] if isinstance(read, dict) else None
    cut = isinstance(content, str) and content != value and value[:1] not in ('"', "'")
    structure = isinstance(content, dict | list) and value[:1] not in ("{", "[")
    return quoted if cut or structure else value


def _callback(context: click.Context, option: click.Parameter, value: Any) -> Any:
    return value if isinstance(value, dict) else parsed(value)


@click.group(name="visual_grpo")
def cli() -> None:
    """Commands of this project, beside Kedro's."""


def _in_the_project(command: Callable[..., Any] | None) -> Callable[..., Any]:
    """Refuses a folder below the project's, from which Kedro finds the project, but its files are not found."""
    assert command is not None

    @wraps(command)
    def checked(*args: Any, **kwargs: Any) -> Any:
        root = find_kedro_project(Path.cwd())
        if root is not None and root != Path.cwd():
            raise click.UsageError(f"Run this in the project's folder: cd {shlex.quote(str(root))}")
        return command(*args, **kwargs)

    return checked


run = copy.copy(run_of_kedro)
run.params = [copy.copy(option) for option in run_of_kedro.params]
for _option in run.params:
    if _option.name == "params":
        _option.callback = _callback
run.callback = _in_the_project(run_of_kedro.callback)
cli.add_command(run)
