"""The command line of a run, and what to run after an error: a printed command runs when it is pasted."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from visual_grpo.common.errors import CombinedError, Remedy, UserError, numbered, sanitize
from visual_grpo.common.files import from_here
from visual_grpo.common.processes import under_torchrun
from visual_grpo.config import flatten

_OPTIONS = {
    "pipeline_names": "pipelines",
    "namespaces": "namespaces",
    "tags": "tags",
    "from_inputs": "from-inputs",
    "to_outputs": "to-outputs",
    "from_nodes": "from-nodes",
    "to_nodes": "to-nodes",
    "node_names": "nodes",
}
"""Kedro's run parameter -> its option."""
APART = "VISUAL_GRPO_APART"
"""Environment variable of a command in a temporary folder: it names neither its results nor a next command."""
_DEFAULT = "local"
"""The environment of a run that names none."""
_current: list[Command] = []
_BETWEEN = ", \t\r\n"
"""Characters between two parameters."""
# A comma separates where a further NAME= follows, except within a value in quotes.
_PARAM = re.compile(
    r"""(?P<name>[^\s,=]+)\s*=\s*(?P<value>"(?:[^"\\]|\\.)*"|'[^']*'|.*?)\s*(?:$|,[\s,]*(?=$|[^\s,=]+\s*=))""",
    re.DOTALL,
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_WORDS = {"null": None, "true": True, "false": False}


@dataclass(frozen=True)
class Command:
    """``kedro run`` with its options."""

    environment: str | None
    options: tuple[str, ...]
    parameters: Mapping[str, Any]
    """Dotted names and values."""
    source: str | None = None
    """The folder of the configuration, where it is not the project's."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the run that ``resume`` names without which no other pipeline judges its results."""

    @classmethod
    def current(cls) -> Command:
        """Returns the running command; an empty one outside ``kedro run``."""
        return _current[-1] if _current else cls(None, (), {})

    def set_current(self) -> None:
        _current[:] = [self]

    @classmethod
    def from_run_params(cls, run_params: Mapping[str, Any]) -> Command:
        """Builds the command from what Kedro passes to ``before_pipeline_run``; its source is the current one's."""
        values = {option: run_params.get(key) for key, option in _OPTIONS.items()}
        options = tuple(f"--{option}={','.join(names)}" for option, names in values.items() if names)
        environment = None if run_params.get("env") == _DEFAULT else run_params.get("env")
        given = flatten(run_params.get("runtime_params") or {})
        # No run reads them, and the command is stored with it: an address to notify may be secret.
        kept = {name: value for name, value in given.items() if not name.startswith("retrain.")}
        return cls(environment, options, kept, cls.current().source)

    def with_parameters(self, parameters: Mapping[str, Any]) -> Command:
        return replace(self, parameters={**self.parameters, **parameters})

    def without(self, name: str) -> Command:
        return replace(self, parameters={key: value for key, value in self.parameters.items() if key != name})

    def for_pipeline(self, name: str) -> Command:
        """Returns the command for a pipeline, or several with commas; ``resume`` is kept for train only.

        The others get what is `kept` from the resumed run.
        """
        command = self if name == "train" else self.without("resume").with_parameters(self.kept)
        return replace(command, options=(f"--pipeline{'s' * (',' in name)}={name}",))

    def applying(self, remedy: Remedy) -> Command:
        """Returns the command of ``remedy``, with the environment and parameters of this one."""
        command = self if remedy.pipeline is None else self.for_pipeline(remedy.pipeline)
        for name, value in remedy.parameters.items():
            command = command.without(name) if value is None else command.with_parameters({name: value})
        return replace(command, environment=remedy.environment or command.environment)

    def resuming(self, resume: str, folder: Path) -> Command:
        """Returns the command that resumes this training, whose checkpoints are in ``folder``."""
        checkpoint = "auto" if resume in ("auto", "never") else str(folder)
        return self.for_pipeline("train").with_parameters({"resume": checkpoint})

    def __str__(self) -> str:
        words = [*(["torchrun", "OPTIONS", "-m", "kedro"] if under_torchrun() else [_kedro()]), "run"]
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


def render(error: BaseException) -> str:
    """Returns the message of an error and, on its own line, the command that corrects it; for the command line."""
    if isinstance(error, CombinedError):
        return numbered([render(each) for each in error.errors])
    message, remedy = sanitize(str(error)), error.remedy if isinstance(error, UserError) else None
    if remedy is None:
        return message
    command = f"make {remedy.make}" if remedy.make else Command.current().applying(remedy)
    return f"{message.rstrip()}\nRun: {command}"


def split_params(text: str) -> Iterator[tuple[str, str]]:
    """Yields name and value of each parameter of ``--params``; raises UserError where there is no NAME= or no value."""
    at, text = 0, text.strip(_BETWEEN)
    while at < len(text):
        match = _PARAM.match(text, at)
        if match is None or not match["value"]:  # A shell's empty variable would give the default without a word.
            raise UserError(f"--params: expected NAME=VALUE, several with commas (none: null); got {text[at:]!r}")
        yield match["name"], match["value"]
        at = match.end()


def value_of(text: str, *, has_numbers: bool = True) -> Any:
    """Returns what a value of ``--params`` means: null, true, false and decimal numbers are these, what is in quotes,
    brackets or braces is YAML, and any other text is itself.

    Without ``has_numbers``, digits are text too: the id 12e45678 begins like a number.
    """
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if has_numbers and _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    if text[0] in "\"'[{":
        with suppress(YAMLError, OmegaConfBaseException, ValueError):
            value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index,call-overload]
            if isinstance(value, str) == (text[0] in "\"'"):
                return value
    return text


def _quoted(value: Any) -> str:
    """Formats a value for ``--params``; quotes a text that would be read as a number or anything else."""
    if not isinstance(value, str):
        return json.dumps(value)
    is_plain = bool(value) and value_of(value) == value and list(split_params(f"value={value}")) == [("value", value)]
    return value if is_plain else json.dumps(value)


def _kedro() -> str:
    """Returns ``kedro`` as the user called it, else a path by which it can be called from the working directory."""
    called = Path(sys.argv[0])
    script = called if called.name == "kedro" else Path(sys.executable).with_name("kedro")
    on_path = shutil.which("kedro")
    if not script.is_file() or (on_path is not None and Path(on_path) == script.absolute()):
        return "kedro"
    return str(from_here(script))
