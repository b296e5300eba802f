"""Repeats a training in a worktree of its commit, and compares the two."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_grpo.computed_with import NUMERICS
from visual_grpo.errors import UserError, counted
from visual_grpo.reproduction import comparison
from visual_grpo.reproduction.comparison import Row
from visual_grpo.reproduction.configuration import parameters_to_repeat, write_configuration
from visual_grpo.reproduction.environment import LOCK, Environment, environment_of
from visual_grpo.reproduction.inputs import Inputs
from visual_grpo.reproduction.programs import ProgramError, run
from visual_grpo.reproduction.repeatable import GPU, check_repeatable, processor_of
from visual_grpo.reproduction.worktree import Place, checked_out, git
from visual_grpo.tracking.origins import recorded_hashes
from visual_grpo.trained_adapters import ADJUSTED, CHANGES, read_facts

ADAPTERS = "06_models/adapters"
LOG = "output.log"
_VERSION = "version."
_SHOWN = ("== ", "Signal check")
"""Beginnings of the lines that are shown of a training, beside those of its progress bars."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The one that is repeated."""

    project: Path
    adapters: Path
    facts: Mapping[str, Any]
    hashes: Mapping[str, str]
    """Path -> DVC hash of what it read, as far as it is known."""
    start: Path | None = None
    """The adapters that it started from; None = fresh ones."""


def repeat(
    training: Training,
    present: Mapping[str, Any],
    *,
    tolerance: float,
    keep: bool,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Trains again, and says what matched (``rows``), whether all of it did (``matches``), and what is the first that
    did not (``difference``).

    Args:
        present: parameters of this command, for what is secret in those of the training.
        tolerance: of the final metrics, where a GPU takes part; see `comparison.tolerance_rows`.
        keep: whether the worktree stays where everything matches; where something does not, it always stays.

    Raises:
        UserError: the code, the environment, the data or the base model of the training cannot be had again, or the
            training fails.
    """
    check_repeatable(training.adapters, training.facts)
    tree = parameters_to_repeat(training.facts["parameters"], training.start)
    began = time.monotonic()
    commit = str(training.facts["git.commit"])
    with checked_out(training.project, commit, _changes(training), note) as place:
        note(f"The code of commit {commit[:12]} is in {place.code}")
        attempt = _Attempt(training, place, tree, note)
        rows = attempt.rows(tolerance)
        difference = comparison.first_difference(rows)
        place.kept = keep or difference is not None
    return {
        "adapters": str(training.adapters),
        "mlflow_run_id": training.facts.get("mlflow_run_id"),
        "matches": difference is None,
        "difference": None if difference is None else difference.what,
        "sentence": _sentence(rows, difference, tolerance),
        "seconds": round(time.monotonic() - began),
        "rows": comparison.as_json(rows),
    }


class _Attempt:
    """One repetition, in its own place."""

    def __init__(self, training: Training, place: Place, tree: Mapping[str, Any], note: Callable[[str], None]) -> None:
        self.training, self.place, self.tree, self.note = training, place, tree, note
        self.facts = training.facts
        self.output = place.code / tree["output"]

    def rows(self, tolerance: float) -> list[Row]:
        """All rows; those of adapters and metrics only where the data and the base model are the run's."""
        environment = environment_of(
            self.place.code,
            self.training.project,
            self.place.folder,
            self.facts.get(f"{_VERSION}python"),
            self.note,
        )
        present = environment.facts([name for name in _versions(self.facts) if name != "python"])
        rows = [*self._code_rows(environment), *self._environment_rows(present)]
        inputs = Inputs(
            self.training.project,
            self.place.code,
            self.place.folder,
            self.facts,
            self.tree,
            recorded_hashes(self.place.code, self.training.hashes),
            self.note,
        )
        origins, pipelines = inputs.bring()
        self.note("; ".join(f"{name}: {origin}" for name, origin in origins.items()))
        options = write_configuration(self.place.code, self.place.folder, self.tree, str(self.facts.get("command", "")))
        if pipelines:
            self._run(environment, options, pipelines)
            made = list(self._made_rows(pipelines))
            if comparison.first_difference(made):
                return [*rows, *made]
        self._run(environment, options, ["baseline", "train"])
        return [*rows, *self._result_rows(present, origins, tolerance)]

    def _run(self, environment: Environment, options: list[str], pipelines: list[str]) -> None:
        log = self.place.folder / LOG

        def show(line: str) -> None:
            with log.open("a", encoding="utf-8") as file:
                file.write(line)
            if line.startswith(_SHOWN) or _is_progress(line):
                self.note(f"  {line.rstrip()}")

        words = [str(environment.python), "-m", "kedro", "run", *options, f"--pipelines={','.join(pipelines)}"]
        try:
            run(words, self.place.code, environment.variables(), show, [self.place.descriptor])
        except ProgramError as error:
            self.place.kept = True
            raise UserError(
                f"The training could not be repeated: {', '.join(pipelines)} failed in {self.place.code} (all of its"
                f" output is in {log}):\n{error}"
            ) from error

    def _code_rows(self, environment: Environment) -> Iterator[Row]:
        yield Row.of("commit", self.facts["git.commit"], git(self.place.code, "rev-parse", "HEAD"))
        files = _changes(self.training).count("diff --git ")
        changed = counted(files, "file") if files else "none"
        yield Row("uncommitted changes", changed, f"{changed}, applied" if files else changed, "equal")
        if "resumed.command" in self.facts:
            parts = len(str(self.facts["resumed.command"]).splitlines()) + 1
            yield Row("trained in", f"{parts} parts", "one go", "noted")
        for line in str(self.facts.get(ADJUSTED, "")).splitlines():
            name, _, values = line.partition(": ")
            yield Row(f"parameter {name}", values, "the last of them", "noted")
        yield Row(LOCK, "of the commit", "a new environment" if environment.new else "this environment", "equal")

    def _made_rows(self, pipelines: list[str]) -> Iterator[Row]:
        """Of what the run's own code prepared and pretrained."""
        if "starter" in pipelines:
            report = json.loads((self.output / "06_models/starter.json").read_text(encoding="utf-8"))
            yield Row.of("base model", self.facts.get("model_digest"), report["digest"])
            if self.facts.get("model_content") is not None:
                yield Row.of("base model's files", self.facts["model_content"], report.get("content"))
        if "data_preparation" in pipelines:
            report = json.loads((self.output / "08_reporting/data_preparation.json").read_text(encoding="utf-8"))
            yield Row.of("data", self.facts.get("data"), report["digest"])

    def _result_rows(self, present: Mapping[str, Any], origins: Mapping[str, str], tolerance: float) -> Iterator[Row]:
        here = self.output / ADAPTERS
        facts = read_facts(here)
        yield from comparison.identity_rows(self.facts, facts, origins)
        there = self.training.adapters
        on_gpu = self._is_of_gpu(present)
        if on_gpu:
            yield from comparison.tolerance_rows(there, here, tolerance)
        else:
            yield from comparison.adapter_rows(self.facts.get("sums", {}), there, here)
            yield from comparison.metric_rows(there, here)

    def _is_of_gpu(self, present: Mapping[str, Any]) -> bool:
        """Whether one of the two trainings computed on a GPU, which does not give the same bits twice."""
        return GPU in (processor_of(self.facts).split()[0], self._processor_here(present).split()[0])

    def _processor_here(self, present: Mapping[str, Any]) -> str:
        """As `computed_with` writes it."""
        device = str(self.tree["model"].get("device", "auto"))
        on_gpu = device.startswith(GPU) or (device == "auto" and present["gpu"] is not None)
        return f"{GPU} {present['processor']} {present['gpu']}" if on_gpu else f"cpu {present['processor']}"

    def _environment_rows(self, present: Mapping[str, Any]) -> Iterator[Row]:
        """Versions and the machine: what is another may change bits, and is then found in the adapters."""
        for name, version in _versions(self.facts).items():
            here = present["python"] if name == "python" else present["versions"][name]
            yield Row.of(name, version, here, "noted")
        yield Row.of("processor", processor_of(self.facts), self._processor_here(present), "noted")


def _changes(training: Training) -> str:
    file = training.adapters / CHANGES
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _versions(facts: Mapping[str, Any]) -> dict[str, str]:
    """Python and the libraries that the training computed with."""
    found = {name.removeprefix(_VERSION): str(facts[name]) for name in facts if name.startswith(_VERSION)}
    listed = [part.split() for part in str(facts.get(NUMERICS, "")).split(", ")[:-1]]
    return {**found, **{words[0]: words[1] for words in listed if len(words) == 2}}


def _is_progress(line: str) -> bool:
    words = line.split()
    return any(word.replace("/", "", 1).isdecimal() and "/" in word for word in words[:4])


def _sentence(rows: list[Row], difference: Row | None, tolerance: float) -> str:
    noted = ", ".join(row.what for row in rows if row.result == "noted")
    beside = f" Not as in the run: {noted}." if noted else ""
    if difference is not None:
        return f"Not reproduced: {difference.what} was {difference.run} in the run, and is {difference.here}.{beside}"
    if any(row.what.startswith("adapter ") for row in rows):
        return f"Reproduced: every file of the adapters and every metric is the run's, bit for bit.{beside}"
    return f"Reproduced: the final metrics are those of the run within the tolerance of {tolerance:g}.{beside}"
