"""Repeats a training in a git worktree of its commit, and compares the two."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from visual_grpo.computed_with import MEANING, NUMERICS, SOURCES
from visual_grpo.config.presets import pinned
from visual_grpo.config.reproduce import ReproduceConfig
from visual_grpo.errors import UserError, counted
from visual_grpo.programs import ProgramError, git, output_of, run
from visual_grpo.reproduction import comparison
from visual_grpo.reproduction.comparison import Row
from visual_grpo.reproduction.inputs import AGAIN, bring_inputs
from visual_grpo.resuming import ROUNDING
from visual_grpo.trained_adapters import ADJUSTED, CHANGES, read_facts

ADAPTERS, LOCK, GPU = "06_models/adapters", "requirements.lock", "cuda"
_OPTION = re.compile(r"(?:--env[= ]|-e[= ]?)([\w.-]+)")
_CODE = {"git.commit": "commit", "git.state": "uncommitted changes", SOURCES: MEANING[SOURCES]}
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


def repeat(training: Training, settings: ReproduceConfig, note: Callable[[str], None]) -> dict[str, Any]:
    """Trains again; returns what matched (``rows``), whether all did (``matches``), and the first ``difference``.

    Raises:
        UserError: the code, the environment, the data or the base model of the training cannot be had again, or the
            training fails.
    """
    check_repeatable(training.adapters, training.facts)
    began, commit = time.monotonic(), str(training.facts["git.commit"])
    with checked_out(training.project, commit, training.changes, note) as place:
        note(f"The code of commit {commit[:12]} is in {place.code}")
        rows = _rows(training, place, settings.tolerance, note)
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
    mixed = next(_mixed(facts), None)
    if mixed is not None:
        raise UserError(
            f"The training of {folder} was resumed with other {mixed}, so no single training is the same. Train again"
            " from step 1 (resume=never)."
        )
    if facts.get("git.state") == "dirty" and not (folder / CHANGES).is_file():
        raise UserError(
            f"The training of {folder} was started with uncommitted changes, and the folder has no {CHANGES} any more."
        )


def _mixed(facts: Mapping[str, Any]) -> Iterator[str]:
    """What the parts of a resumed training did not share; rounding counts on a CPU only."""
    for name, meaning in _CODE.items():
        if f"resumed.{name}" in facts:
            values = [str(facts.get(name)), *str(facts[f"resumed.{name}"]).splitlines()]
            yield f"code than it began with ({meaning}: {', '.join(value[:12] for value in values)})"
    on_cpu = not _on_gpu(facts)
    if on_cpu and f"resumed.{NUMERICS}" in facts:
        yield MEANING[NUMERICS]
    for line in str(facts.get(ADJUSTED, "")).splitlines():
        if on_cpu or not any(fnmatchcase(line.partition(":")[0], pattern) for pattern in ROUNDING):
            yield f"parameters than it began with ({line})"


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
def checked_out(project: Path, commit: str, changes: str, note: Callable[[str], None]) -> Iterator[Place]:
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
            git(tree, "apply", "--whitespace=nowarn", "-", given=changes)
        yield place
    except ProgramError as error:
        raise UserError(
            f"The code of the run, {commit} with {CHANGES} of its adapters, cannot be had again: {error}"
        ) from error
    finally:
        if place.kept:
            note(f"Kept: {folder} (to remove it: rm -r {folder} && git worktree prune)")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(ProgramError):
                git(project, "worktree", "prune")


def parameters_to_repeat(own: Mapping[str, Any], start: Path | None = None) -> dict[str, Any]:
    """The parameter tree of a training, to be run in a worktree: from step 1, with no other tracker.

    What it writes is relative to the worktree: a run with its output elsewhere is repeated in ``data``. ``start`` are
    the adapters that the training started from, whatever their name means by now.
    """
    tree = pinned(own)
    output = _inside(tree["output"], "data")
    starter = tree["starter"]
    drawn = _inside(starter["dataset"], f"{output}/01_raw/{starter.get('world', 'shapes')}")
    quiet = {name: None for name in ("tensorboard", "wandb") if name in tree["tracking"]}
    return {
        **tree,
        "output": output,
        "resume": "never",
        "adapter": "latest",
        "train": tree["train"] | ({} if start is None else {"start": str(start)}),
        "data": tree["data"] | ({"path": drawn} if tree["data"]["path"] == starter["dataset"] else {}),
        "starter": starter | {"dataset": drawn, "model": _inside(starter["model"], f"{output}/06_models/base")},
        "tracking": {**tree["tracking"], **quiet, "checkpoints": f"{output}/06_models/checkpoints"},
    }


def _inside(path: str, otherwise: str) -> str:
    """The path, or ``otherwise`` where it leads out of the working folder."""
    pure = PurePosixPath(path)
    return otherwise if pure.is_absolute() or ".." in pure.parts or path.startswith("~") else path


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


def python_of(place: Place, project: Path, version: str | None, note: Callable[[str], None]) -> Path:
    """The Python with the packages of the run's lock: the present one, or one of ``version`` in a new environment.

    Raises:
        UserError: the run's commit has no lock, or it cannot be installed.
    """
    lock = place.code / LOCK
    if not lock.is_file():
        raise UserError(f"The commit of the run has no {LOCK}, so its environment is not known.")
    if (project / LOCK).is_file() and lock.read_bytes() == (project / LOCK).read_bytes():
        return Path(sys.executable)
    note(f"{LOCK} of the run is another than the present one: installing it into a new environment")
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


def _rows(training: Training, place: Place, tolerance: float, note: Callable[[str], None]) -> list[Row]:
    """All rows; those of adapters and metrics only where the data and the base model are the run's."""
    facts, tree = training.facts, parameters_to_repeat(training.facts["parameters"], training.start)
    here, there = place.code / tree["output"] / ADAPTERS, training.adapters
    python = python_of(place, training.project, facts.get("version.python"), note)
    rows = list(_rows_of_code(training, place, python))
    origins = bring_inputs(training.project, place.code, place.folder, facts, tree, training.hashes, note)
    note("; ".join(f"{name}: {origin}" for name, origin in origins.items()))
    options = write_configuration(place, tree, str(facts.get("command", "")))
    if AGAIN in origins.values():
        # Not data that are linked: they would be replaced where they are.
        _run(place, python, options, ["starter", *(["data_preparation"] if origins["data"] == AGAIN else [])])
        made = list(comparison.made_rows(facts, place.code / tree["output"]))
        if any(row.result == "differs" for row in made):
            return [*rows, *made]
    _run(place, python, options, ["baseline", "train"])
    repeated = read_facts(here)
    rows += [*comparison.environment_rows(facts, repeated), *comparison.identity_rows(facts, repeated, origins)]
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
    for line in str(facts.get(ADJUSTED, "")).splitlines():
        name, _, values = line.partition(": ")
        yield Row(f"parameter {name}", values, "the last of them", "noted")


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
