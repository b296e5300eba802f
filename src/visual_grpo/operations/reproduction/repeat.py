"""Repeats a training in a git worktree of its commit, and compares the two, row by row."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from visual_grpo import provenance
from visual_grpo.adapter_folder import BASELINE, CHANGES, DATA_COMMIT, HISTORY, read_facts, weight_sums
from visual_grpo.common import console
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.processes import ProgramError, git, run
from visual_grpo.config import Parameters
from visual_grpo.config.decides import DEPENDS_ON
from visual_grpo.config.pipelines import ReproduceConfig
from visual_grpo.config.places import ROOT
from visual_grpo.grpo.metrics import is_timing
from visual_grpo.operations.command import APART
from visual_grpo.operations.reproduction.worktree import (
    LOCK,
    Worktree,
    bring_inputs,
    checked_out,
    python_of,
    write_configuration,
)
from visual_grpo.starter.world_defaults import with_world
from visual_grpo.tracking.trust import require_adapters

Result = Literal["equal", "differs", "noted", "within tolerance"]
FINAL = ("reward/total", "eval/total")  # Of the last step that has them, compared where bits cannot be.


@dataclass(frozen=True)
class Row:
    """One thing, as the run had it and as it is here."""

    what: str
    run: str
    here: str
    result: Result

    @classmethod
    def compare(cls, what: str, run: object, here: object) -> Row:
        return cls(what, _shown(run), _shown(here), "equal" if run == here else "differs")


def repeat(adapters: Path, settings: ReproduceConfig, project: Path, start: Path | None = None) -> dict[str, Any]:
    """Trains the adapters in a folder again, from those in ``start`` (None = fresh ones).

    Returns what matched (``rows``), whether all did (``matches``), and the first ``difference``. Raises UserError if
    something of the training cannot be had again, or it fails.
    """
    facts = read_facts(adapters)
    check_repeatable(adapters, facts)
    began, commit, patch = time.monotonic(), str(facts["git.commit"]), adapters / CHANGES
    changes = patch.read_bytes() if patch.is_file() else b""
    files = counted(changes.count(b"diff --git "), "file")
    with checked_out(project, commit, changes) as worktree:
        console.note(f"The code of commit {commit[:12]} is in {worktree.code}")
        rows = [Row.compare("commit", commit, commit), Row.compare("uncommitted changes", files, files)]
        tree = parameters_to_repeat(facts, start)
        rows += _repeat_in(worktree, project, adapters, facts, tree, settings.tolerance)
        difference = next((row for row in rows if row.result == "differs"), None)
        worktree.kept = settings.keep or difference is not None
    return {
        "adapters": str(adapters),
        "mlflow_run_id": facts.get("mlflow_run_id"),
        "matches": difference is None,
        "difference": None if difference is None else difference.what,
        "sentence": _sentence(rows, difference, settings.tolerance),
        "seconds": round(time.monotonic() - began),
        "rows": [asdict(row) for row in rows],
    }


def require_own(folder: Path, facts: Mapping[str, Any], project: Path, parameters: Parameters) -> None:
    """Raises UserError with whose code would run, unless the training is this project's own or ``trust`` names it."""
    replaced = ("output", "resume", "adapter", "tracking")  # See `parameters_to_repeat`.
    taken = {name: part for name, part in facts.get("parameters", {}).items() if name not in replaced}
    require_adapters(folder, taken, parameters, also=list(_code(folder, facts, project)))


def _code(folder: Path, facts: Mapping[str, Any], project: Path) -> Iterator[str]:
    """Describes the code of a training, of which nothing is run: its commit, and each file of its changes."""
    commit, patch = str(facts.get("git.commit")), folder / CHANGES
    try:
        author = git(project, "log", "-1", "--format=by %an <%ae> of %as: %s", "--end-of-options", commit)
    except ProgramError:
        author = "which is not in this repository"
    yield f"code: commit {commit}, {author}"
    if patch.is_file():
        try:
            counts = git(project, "apply", "--numstat", "-", stdin=patch.read_bytes()).splitlines()
        except ProgramError as error:
            counts = [str(error)]
        yield from (f"code: {CHANGES}, lines added, removed, file: {' '.join(line.split())}" for line in counts)


def check_repeatable(folder: Path, facts: Mapping[str, Any]) -> None:
    """Raises UserError if no code is known that made the adapters, or the training was resumed with something else."""
    if "git.commit" not in facts or "parameters" not in facts:
        raise UserError(f"The training of {folder} was started outside of git: its training.json names no commit.")
    if mixed := provenance.mixed_parts(facts):
        raise UserError(
            f"The training of {folder} was resumed with different {'; '.join(mixed)}, so no single training can repeat"
            " it. Train again from step 1 (resume=never)."
        )
    if facts.get("git.state") == "dirty" and not (folder / CHANGES).is_file():
        raise UserError(f"The training of {folder} had uncommitted changes, and the folder has no {CHANGES} any more.")


def parameters_to_repeat(facts: Mapping[str, Any], start: Path | None = None) -> dict[str, Any]:
    """Returns the parameter tree of a training for a worktree: from step 1 or ``start``, into ``data``."""
    parameters = facts["parameters"]
    data, model, starter = parameters["data"], parameters["model"], parameters["starter"]
    data = data | {"revision": facts.get(DATA_COMMIT, data["revision"])}
    changed = {
        "output": ROOT,
        "resume": "never",
        "adapter": "latest",
        "train": parameters["train"] | ({} if start is None else {"start": str(start)}),
        "data": data | ({"path": None} if data["path"] == starter["dataset"] else {}),
        "model": model | ({"path": None} if model["path"] == starter["model"] else {}),
        "starter": starter | {"dataset": None, "model": None},
        "tracking": parameters["tracking"] | {"tensorboard": None, "wandb": None, "checkpoints": None},
    }
    return with_world({**parameters, **changed})


def _repeat_in(
    worktree: Worktree, project: Path, run: Path, facts: Mapping[str, Any], tree: dict[str, Any], tolerance: float
) -> Iterator[Row]:
    """Yields the rows; it is trained only where the data and the base model are the run's."""
    tree["evaluation"] |= facts.get(BASELINE, {})
    python = python_of(worktree, project, facts.get("version.python"))
    yield Row(LOCK, "of the commit", f"{'this' if python == Path(sys.executable) else 'a new'} environment", "equal")
    conf, places = write_configuration(worktree, tree)
    lacking = bring_inputs(project, worktree.code, places, facts, tree)
    for pipeline, fact, dataset in lacking:
        _run(worktree, python, conf, pipeline)
        digest = json.loads(places[dataset].read_text(encoding="utf-8"))["digest"]
        row = Row.compare(provenance.MEANING[fact], facts.get(fact), digest)
        if row.result == "differs":
            yield row
            return
    _run(worktree, python, conf, "baseline,train")
    adapters = places["adapters"]
    repeated = read_facts(adapters)
    yield from (environment_row(facts, repeated), *identity_rows(facts, repeated))
    # A GPU does not give the same bits twice.
    if any(str(known.get(provenance.NUMERICS)).rpartition(", ")[2].startswith("cuda") for known in (facts, repeated)):
        yield from tolerance_rows(run, adapters, tolerance)
    else:
        yield from adapter_rows(facts.get("sums", {}), run, adapters)
        yield metric_row(run, adapters)


def _run(worktree: Worktree, python: Path, conf: Path, pipelines: str) -> None:
    """Runs pipelines of the worktree's code, which logs to no MLflow of the user's."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "KEDRO"))}
    variables["PYTHONPATH"] = os.pathsep.join([str(worktree.code / "src"), os.environ.get("PYTHONPATH", "")])
    variables["MLFLOW_TRACKING_URI"] = f"sqlite:///{worktree.code / 'mlflow.db'}"
    variables[APART] = "1"
    words = ["-m", "kedro", "run", f"--conf-source={conf}", f"--pipelines={pipelines}"]
    try:
        run(python, *words, at=worktree.code, patience=10.0, environment=variables)
    except ProgramError as error:
        worktree.kept = True
        raise UserError(f"The training is not repeated: {pipelines} failed in {worktree.code}: {error}") from error


def environment_row(run: Mapping[str, Any], here: Mapping[str, Any]) -> Row:
    """Compares libraries and processor: a different one may change bits, which the adapters then show."""
    before, now = (str(facts.get(provenance.NUMERICS)).split(", ") for facts in (run, here))
    if before == now:
        return Row("libraries and processor", before[-1], now[-1], "equal")
    lost, new = ([part for part in one if part not in other] for one, other in ((before, now), (now, before)))
    return Row("libraries and processor", ", ".join(lost), ", ".join(new), "noted")


def identity_rows(run: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Row]:
    """Compares data, base model, parameters and reward code, from the facts of the two trainings."""
    for name in filter(lambda name: run.get(name) is not None, provenance.MEANING):
        if name != provenance.NUMERICS:
            yield Row.compare(provenance.MEANING[name], run[name], here.get(name))
    yield Row.compare("seed", run.get("seed"), here.get("seed"))
    named = list(provenance.MEANING)
    same = len(provenance.values(run, DEPENDS_ON["train"]).keys() - named)
    different = provenance.differences(run, here, DEPENDS_ON["train"], but=named)
    if not different:
        yield Row.compare("parameters and code of rewards", f"{same} values", f"{same} values")
    for name, values in different.items():
        yield Row.compare(name, *values)


def adapter_rows(sums: Mapping[str, str], run: Path, here: Path) -> Iterator[Row]:
    """Compares each file of weights by its sha256; where the run's file is gone, by the one in ``sums``."""
    before, now = {**sums, **weight_sums(run)}, weight_sums(here)
    for name in sorted(before.keys() | now.keys()):
        yield Row.compare(f"adapter {name}", before.get(name), now.get(name))


def metric_row(run: Path, here: Path) -> Row:
    """Compares the metrics of every step in every digit, except time and memory; only the first that differs."""
    before, now = (pd.read_csv(folder / HISTORY, dtype=str, keep_default_na=False) for folder in (run, here))
    before, now = (table[[name for name in table if not is_timing(str(name))]] for table in (before, now))
    shown = [f"{len(table)} steps of {', '.join(map(str, table))}" for table in (before, now)]
    if shown[0] != shown[1]:
        return Row.compare("metrics", *shown)
    for step, name in product(before.index, before):
        if before[name][step] != now[name][step]:
            return Row.compare(f"metric {name} at step {step + 1}", before[name][step], now[name][step])
    size = f"{len(before.columns)} of {len(before)} steps"
    return Row.compare("metrics", size, size)


def tolerance_rows(run: Path, here: Path, tolerance: float) -> Iterator[Row]:
    """Compares the final metrics, which may differ by ``tolerance`` x the run's value (x 1, if that is smaller)."""
    before, now = (pd.read_csv(folder / HISTORY) for folder in (run, here))
    for name in FINAL:
        if name in before:
            first, second = (table.get(name, pd.Series(dtype=float)).dropna().tolist() for table in (before, now))
            a, b = (values[-1] if values else math.nan for values in (first, second))  # Of no sample with a score.
            within = abs(a - b) <= tolerance * max(abs(a), 1.0)
            equal = a == b or not first + second
            result: Result = "equal" if equal else "within tolerance" if within else "differs"
            yield Row(f"final {name}", f"{a:.4f}", f"{b:.4f}", result)


def _shown(value: object) -> str:
    """Returns the beginning of a digest, anything else in full."""
    text = "-" if value is None else str(value)
    return text[:12] if len(text) in (40, 64) and set(text) <= set("0123456789abcdef") else text


def _sentence(rows: list[Row], difference: Row | None, tolerance: float) -> str:
    noted = ", ".join(row.what for row in rows if row.result == "noted")
    suffix = f" Different in the run: {noted}." if noted else ""
    if difference is not None:
        return f"Not reproduced: {difference.what} was {difference.run} in the run, and is {difference.here}.{suffix}"
    if any(row.what.startswith("adapter ") for row in rows):
        return f"Reproduced: every file of the adapters and every metric is the run's, bit for bit.{suffix}"
    return f"Reproduced: the final metrics match the run within the tolerance of {tolerance:g}.{suffix}"
