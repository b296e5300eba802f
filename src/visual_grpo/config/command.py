"""The command line of a run, to print it with further parameters: what is printed runs when it is pasted."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from visual_grpo.common.processes import OWN_TORCHRUN, is_rank
from visual_grpo.config import flatten

_OPTIONS = {
    "pipeline_names": "pipelines",
    "tags": "tags",
    "from_nodes": "from-nodes",
    "to_nodes": "to-nodes",
    "node_names": "nodes",
}
"""Kedro's run parameter -> its option."""
_DEFAULT = "local"
"""The environment of a run that names none."""
_current: list[Command] = []
_source: list[str | None] = [None]


def use_source(source: str | None) -> None:
    """Sets the folder of the configuration of this process's commands; None = the project's."""
    _source[:] = [source]


def under_torchrun() -> bool:
    """Returns whether the user has started this command with torchrun."""
    return is_rank() and os.environ["TORCHELASTIC_RUN_ID"] != OWN_TORCHRUN


def program() -> list[str]:
    """Returns the words that start this process's commands, before ``run``."""
    return ["torchrun", "OPTIONS", "-m", "kedro"] if under_torchrun() else [_kedro()]


@dataclass(frozen=True)
class Command:
    """``kedro run`` with its options."""

    environment: str | None
    options: tuple[str, ...]
    parameters: Mapping[str, Any]
    """Dotted names and values."""
    source: str | None = None
    """The folder of the configuration, where it is not the project's."""

    @classmethod
    def current(cls) -> Command:
        """Returns the running command; an empty one outside ``kedro run``."""
        return _current[-1] if _current else cls(None, (), {})

    def set_current(self) -> None:
        _current[:] = [self]

    @classmethod
    def from_run_params(cls, run_params: Mapping[str, Any]) -> Command:
        """Builds the command from what Kedro passes to ``before_pipeline_run``."""
        values = {option: run_params.get(key) for key, option in _OPTIONS.items()}
        options = tuple(f"--{option}={','.join(names)}" for option, names in values.items() if names)
        environment = None if run_params.get("env") == _DEFAULT else run_params.get("env")
        return cls(environment, options, flatten(run_params.get("runtime_params") or {}), _source[-1])

    def with_parameters(self, parameters: Mapping[str, Any]) -> Command:
        return replace(self, parameters={**self.parameters, **parameters})

    def without(self, name: str) -> Command:
        return replace(self, parameters={key: value for key, value in self.parameters.items() if key != name})

    def with_environment(self, environment: str) -> Command:
        return replace(self, environment=environment)

    def for_pipeline(self, name: str) -> Command:
        """Returns the command for one pipeline; ``resume`` is kept for train only."""
        command = self if name == "train" else self.without("resume")
        return replace(command, options=(f"--pipeline={name}",))

    def resuming(self, resume: str, folder: Path) -> Command:
        """Returns the command that resumes this training, whose checkpoints are in ``folder``."""
        checkpoint = "auto" if resume in ("auto", "never") else str(folder)
        return self.for_pipeline("train").with_parameters({"resume": checkpoint})

    def __str__(self) -> str:
        words = [*program(), "run"]
        if self.source is not None:
            words.append(f"--conf-source={self.source}")
        if self.environment is not None:
            words.append(f"--env={self.environment}")
        words += self.options
        if self.parameters:
            words.append("--params=" + ",".join(f"{name}={_quoted(value)}" for name, value in self.parameters.items()))
        return shlex.join(words)


def is_stage_of_dvc() -> bool:
    """Returns whether DVC runs this command, and the next one by itself."""
    return "DVC_STAGE" in os.environ


def rerun_command(pipeline: str) -> str:
    """Returns the line that runs ``pipeline`` with the environment and parameters of the current command."""
    return str(Command.current().for_pipeline(pipeline))


def _quoted(value: Any) -> str:
    """Formats a value for ``--params``; quotes a text that would be read as a number or anything else."""
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        plain = OmegaConf.from_dotlist([f"value={value}"])["value"] == value
    except (YAMLError, OmegaConfBaseException, ValueError):
        plain = False
    return value if plain and value.strip() == value else json.dumps(value)


def _kedro() -> str:
    """Returns ``kedro`` as it was called, else a path by which it can be called from the working directory."""
    called = Path(sys.argv[0])
    script = called if called.name == "kedro" else Path(sys.executable).with_name("kedro")
    on_path = shutil.which("kedro")
    if not script.is_file() or (on_path is not None and Path(on_path) == script.absolute()):
        return "kedro"
    return str(script.relative_to(Path.cwd())) if script.is_relative_to(Path.cwd()) else str(script)
