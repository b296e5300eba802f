"""The command line of a run, to print it with further parameters: what is printed runs when it is pasted."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
_launcher: list[str] = []
_running: list[Command] = []
_source: list[str | None] = [None]


def use_source(source: str | None) -> None:
    """Sets where the configuration of this process's commands is; None = in the project."""
    _source[:] = [source]


def use_launcher(words: Sequence[str]) -> None:
    """Sets what starts this process's commands in the place of ``kedro``: torchrun, for several machines."""
    _launcher[:] = words


def launched_by() -> list[str]:
    """Returns the words that `use_launcher` was given; none for ``kedro``."""
    return list(_launcher)


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
    def now(cls) -> Command:
        """The one that is running, as far as the hooks have said so."""
        return _running[-1] if _running else cls(None, (), {})

    def begins(self) -> None:
        """Makes it the one that is running."""
        _running[:] = [self]

    @classmethod
    def of(cls, run_params: Mapping[str, Any]) -> Command:
        """The command of a run, from what Kedro passes to ``before_pipeline_run``."""
        given = {option: run_params.get(key) for key, option in _OPTIONS.items()}
        options = tuple(f"--{name}={','.join(values)}" for name, values in given.items() if values)
        environment = None if run_params.get("env") == _DEFAULT else run_params.get("env")
        return cls(environment, options, flatten(run_params.get("runtime_params") or {}), _source[-1])

    def adding(self, parameters: Mapping[str, Any]) -> Command:
        return replace(self, parameters={**self.parameters, **parameters})

    def without(self, name: str) -> Command:
        return replace(self, parameters={key: value for key, value in self.parameters.items() if key != name})

    def of_environment(self, environment: str) -> Command:
        return replace(self, environment=environment)

    def of_pipeline(self, name: str) -> Command:
        """For one pipeline; only a training is resumed."""
        command = self if name == "train" else self.without("resume")
        return replace(command, options=(f"--pipeline={name}",))

    def resuming(self, resume: str, folder: Path) -> Command:
        """The command that goes on with the training of this one, whose checkpoints are in ``folder``."""
        return self.of_pipeline("train").adding({"resume": "auto" if resume in ("auto", "never") else str(folder)})

    def __str__(self) -> str:
        words = [*(_launcher or [_kedro()]), "run"]
        if self.source is not None:
            words.append(f"--conf-source={self.source}")
        if self.environment is not None:
            words.append(f"--env={self.environment}")
        words += self.options
        if self.parameters:
            words.append("--params=" + ",".join(f"{name}={_shown(value)}" for name, value in self.parameters.items()))
        return shlex.join(words)


def is_stage_of_dvc() -> bool:
    """Returns whether DVC runs this command, and goes on with the next one by itself."""
    return "DVC_STAGE" in os.environ


def rerun_command(pipeline: str) -> str:
    """The line that runs ``pipeline`` in the environment and with the parameters of the running command."""
    return str(Command.now().of_pipeline(pipeline))


def _shown(value: Any) -> str:
    """As ``--params`` takes it: a text that would be read as a number, or as anything else, is quoted."""
    if not isinstance(value, str):
        return json.dumps(value)
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        plain = OmegaConf.from_dotlist([f"value={value}"])["value"] == value
    except (YAMLError, OmegaConfBaseException, ValueError):
        plain = False
    return value if plain and value.strip() == value else json.dumps(value)


def _kedro() -> str:
    """As Kedro was called; else as it can be called from here."""
    called = Path(sys.argv[0])
    own = called if called.name == "kedro" else Path(sys.executable).with_name("kedro")
    found = shutil.which("kedro")
    if not own.is_file() or (found is not None and Path(found) == own.absolute()):
        return "kedro"
    return str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)
