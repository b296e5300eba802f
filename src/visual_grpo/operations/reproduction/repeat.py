"""Repeats a training in a git worktree of its commit, and compares the two."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from visual_grpo.common import console
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.processes import ProgramError, git, output_of, run
from visual_grpo.config.adapter_folder import CHANGES, read_facts
from visual_grpo.config.defaults import ROOT, is_drawn, pinned, with_output_folders
from visual_grpo.config.pipelines import ReproduceConfig
from visual_grpo.operations.reproduction import comparison
from visual_grpo.operations.reproduction.comparison import Row
from visual_grpo.operations.reproduction.inputs import bring_inputs
from visual_grpo.training.runtime_fingerprint import MEANING, NUMERICS

LOCK, GPU = "requirements.lock", "cuda"
_REPORTS = {
    "starter": ("base model", "model_digest", "06_models/starter.json"),
    "data_preparation": ("data", "data", "08_reporting/data_preparation.json"),
}
"""What a pipeline makes before the training: its name, its fact, and the report with its digest."""
_OPTION = re.compile(r"(?:--env[= ]|-e[= ]?)([\w.-]+)")
_FIXED = {
    "git.commit": "commit",
    "git.state": "uncommitted changes",
    "parameters": "parameters",
    **MEANING,
}
"""Facts that all parts of a resumed training must share, as ``resumed.NAME`` tells."""
_PATIENCE = 10.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training that is repeated."""

    project: Path
    adapters: Path
    facts: Mapping[str, Any]
    hashes: Mapping[str, str]
    """Path -> DVC hash of what it read, as far as it is known."""
    start: Path | None = None
    """The adapters that it started from; None = fresh ones."""

    @property
    def changes(self) -> str:
        """Its uncommitted changes, as a patch."""
        file = self.adapters / CHANGES
        return file.read_text(encoding="utf-8") if file.is_file() else ""


@dataclass
class Place:
    """The temporary folder of one reproduction."""

    folder: Path
    code: Path
    """The project at the run's commit."""
    kept: bool = False
    """Whether it stays."""


def repeat(training: Training, settings: ReproduceConfig) -> dict[str, Any]:
    """Trains again; returns what matched (``rows``), whether all did (``matches``), and the first ``difference``.

    Raises:
        UserError: the code, the environment, the data or the base model of the training cannot be had again, or the
            training fails.
    """
    check_repeatable(training.adapters, training.facts)
    began, commit = time.monotonic(), str(training.facts["git.commit"])
    with checked_out(training.project, commit, training.changes) as place:
        console.note(f"The code of commit {commit[:12]} is in {place.code}")
        rows = _rows(training, place, settings.tolerance)
        difference = next((row for row in rows if row.result == "differs"), None)
        place.kept = settings.keep or difference is not None
    return {
        "adapters": str(training.adapters),
        "mlflow_run_id": training.facts.get("mlflow_run_id"),
        "matches": difference is None,
        "difference": None if difference is None else difference.what,
        "sentence": _sentence(rows, difference, settings.tolerance),
        "seconds": round(time.monotonic() - began),
        "rows": [asdict(row) for row in rows],
    }


def check_repeatable(folder: Path, facts: Mapping[str, Any]) -> None:
    """Raises UserError if no code is known that made the adapters, or the training was resumed with something else."""
    if "git.commit" not in facts or "parameters" not in facts:
        raise UserError(f"The training of {folder} was started outside of git: its training.json names no commit.")
    mixed = [
        f"{meaning} ({', '.join(str(facts[f'resumed.{name}']).splitlines())})"
        for name, meaning in _FIXED.items()
        if f"resumed.{name}" in facts
    ]
    if mixed:
        raise UserError(
            f"The training of {folder} was resumed with other {'; '.join(mixed)}, so no single training is the same."
            " Train again from step 1 (resume=never)."
        )
    if facts.get("git.state") == "dirty" and not (folder / CHANGES).is_file():
        raise UserError(
            f"The training of {folder} was started with uncommitted changes, and the folder has no {CHANGES} any more."
        )


def _on_gpu(facts: Mapping[str, Any]) -> bool:
    """A GPU does not give the same bits twice."""
    return str(facts.get(NUMERICS)).rpartition(", ")[2].startswith(GPU)


def check_commit(project: Path, commit: str) -> None:
    """Raises UserError if the repository of ``project`` has no such commit, or there is none."""
    try:
        git(project, "cat-file", "-e", f"{commit}^{{commit}}")
    except ProgramError as error:
        raise UserError(
            f"The commit of the run, {commit}, is not in the repository of {project}. Get it: git fetch --all"
        ) from error


@contextmanager
def checked_out(project: Path, commit: str, changes: str) -> Iterator[Place]:
    """The code at ``commit`` with the patch ``changes``; removed at the end unless it is marked as kept.

    Raises:
        UserError: there is no such commit, or the patch does not apply.
    """
    check_commit(project, commit)
    folder = Path(tempfile.mkdtemp(prefix="visual_grpo_reproduce_"))
    tree = folder / "code"
    place = Place(folder, tree / git(project, "rev-parse", "--show-prefix"))
    try:
        git(project, "worktree", "add", "--quiet", "--detach", tree, commit)
        if changes.strip():
            git(tree, "apply", "--whitespace=nowarn", "-", stdin=changes)
        yield place
    except ProgramError as error:
        raise UserError(
            f"The code of the run, {commit} with {CHANGES} of its adapters, cannot be had again: {error}"
        ) from error
    finally:
        if place.kept:
            console.note(f"Kept: {folder} (to remove it: rm -r {folder} && git worktree prune)")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(ProgramError):
                git(project, "worktree", "prune")


def parameters_to_repeat(own: Mapping[str, Any], start: Path | None = None) -> dict[str, Any]:
    """The parameter tree of a training, to be run in a worktree: from step 1, into ``data``, with no other tracker.

    ``start`` are the adapters that the training started from, whatever their name means by now.
    """
    tree = pinned(own)
    drawn = is_drawn(tree["data"]["path"], tree["starter"]["dataset"])
    again = {
        "output": ROOT,
        "resume": "never",
        "adapter": "latest",
        "train": tree["train"] | ({} if start is None else {"start": str(start)}),
        "data": tree["data"] | ({"path": None} if drawn else {}),
        "starter": tree["starter"] | {"dataset": None, "model": None},
        "tracking": tree["tracking"] | {"tensorboard": None, "wandb": None, "checkpoints": None},
    }
    return with_output_folders(tree | again, None)


def write_configuration(place: Place, tree: Mapping[str, Any], command: str) -> list[str]:
    """Writes the commit's configuration with the parameters ``tree`` alone; returns the options that name it.

    ``command`` is the training's, which may name an environment with another catalog.
    """
    made = place.folder / "conf"
    shutil.copytree(place.code / "conf", made, ignore=shutil.ignore_patterns("parameters*"))
    (made / "local").mkdir(exist_ok=True)
    # OmegaConf would look up what ${...} names.
    text = yaml.safe_dump(dict(tree), allow_unicode=True, sort_keys=False).replace("${", "\\${")
    (made / "base/parameters.yml").write_text(text, encoding="utf-8")
    named = _OPTION.search(command)
    environment = [f"--env={named[1]}"] if named and (made / named[1]).is_dir() else []
    return [f"--conf-source={made}", *environment]


def python_of(place: Place, project: Path, version: str | None) -> Path:
    """The Python with the packages of the run's lock: the present one, or one of ``version`` in a new environment.

    Raises:
        UserError: the run's commit has no lock, or it cannot be installed.
    """
    lock = place.code / LOCK
    if not lock.is_file():
        raise UserError(f"The commit of the run has no {LOCK}, so its environment is not known.")
    if (project / LOCK).is_file() and lock.read_bytes() == (project / LOCK).read_bytes():
        return Path(sys.executable)
    console.note(f"{LOCK} of the run is another than the present one: installing it into a new environment")
    tools, made = project / ".venv-tools/bin/uv", place.folder / "environment"
    uv, python = tools if tools.is_file() else "uv", made / "bin/python"
    minor = ".".join((version or platform.python_version()).split(".")[:2])
    present = platform.python_version().startswith(f"{minor}.")
    try:
        output_of(uv, "venv", "--quiet", "--python", sys.executable if present else minor, made, at=place.folder)
        output_of(uv, "pip", "sync", "--quiet", "--require-hashes", "--python", python, LOCK, at=place.code)
    except ProgramError as error:
        raise UserError(
            f"The packages of the run's {LOCK} cannot be installed; a network is needed where uv's cache (`make setup`"
            f" installs uv) lacks them.\n{error}"
        ) from error
    return python


def _rows(training: Training, place: Place, tolerance: float) -> list[Row]:
    """All rows; it is trained only where the data and the base model are the run's."""
    facts, tree = training.facts, parameters_to_repeat(training.facts["parameters"], training.start)
    python = python_of(place, training.project, facts.get("version.python"))
    rows = list(_rows_of_code(training, place, python))
    again = bring_inputs(training.project, place.code, facts, tree, training.hashes)
    options = write_configuration(place, tree, str(facts.get("command", "")))
    output, there = place.code / tree["output"], training.adapters
    if again:
        _run(place, python, options, again)
    made = [
        Row.of(name, facts.get(fact), json.loads((output / report).read_text(encoding="utf-8"))["digest"])
        for pipeline, (name, fact, report) in _REPORTS.items()
        if pipeline in again
    ]
    if any(row.result == "differs" for row in made):
        return [*rows, *made]
    _run(place, python, options, ["baseline", "train"])
    here = output / "06_models/adapters"
    repeated = read_facts(here)
    rows += [comparison.environment_row(facts, repeated), *comparison.identity_rows(facts, repeated)]
    if _on_gpu(facts) or _on_gpu(repeated):
        return [*rows, *comparison.tolerance_rows(there, here, tolerance)]
    return [*rows, *comparison.adapter_rows(facts.get("sums", {}), there, here), *comparison.metric_rows(there, here)]


def _rows_of_code(training: Training, place: Place, python: Path) -> Iterator[Row]:
    facts, changed = training.facts, counted(training.changes.count("diff --git "), "file")
    environment = "this environment" if python == Path(sys.executable) else "a new environment"
    yield Row.of("commit", facts["git.commit"], git(place.code, "rev-parse", "HEAD"))
    yield Row("uncommitted changes", changed, changed, "equal")
    yield Row(LOCK, "of the commit", environment, "equal")
    if "resumed.command" in facts:
        yield Row("trained in", f"{facts['resumed.command'].count(chr(10)) + 2} parts", "one go", "noted")


def _run(place: Place, python: Path, options: list[str], pipelines: list[str]) -> None:
    """Runs pipelines of the worktree's code, which logs to no MLflow of the user's."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "KEDRO"))}
    path = [str(place.code / "src"), *filter(None, [variables.get("PYTHONPATH")])]
    variables |= {"PYTHONPATH": os.pathsep.join(path), "MLFLOW_TRACKING_URI": f"sqlite:///{place.code / 'mlflow.db'}"}
    words = ["-m", "kedro", "run", *options, f"--pipelines={','.join(pipelines)}"]
    try:
        run(python, *words, at=place.code, patience=_PATIENCE, environment=variables)
    except ProgramError as error:
        place.kept = True
        raise UserError(
            f"The training could not be repeated: {', '.join(pipelines)} failed in {place.code}: {error}"
        ) from error


def _sentence(rows: list[Row], difference: Row | None, tolerance: float) -> str:
    noted = ", ".join(row.what for row in rows if row.result == "noted")
    beside = f" Not as in the run: {noted}." if noted else ""
    if difference is not None:
        return f"Not reproduced: {difference.what} was {difference.run} in the run, and is {difference.here}.{beside}"
    if any(row.what.startswith("adapter ") for row in rows):
        return f"Reproduced: every file of the adapters and every metric is the run's, bit for bit.{beside}"
    return f"Reproduced: the final metrics are those of the run within the tolerance of {tolerance:g}.{beside}"
