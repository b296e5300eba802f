"""What a name means: the latest adapters, a folder, those of an MLflow run or of a registered model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.command import Command, again
from visual_grpo.config import Parameters
from visual_grpo.errors import UserError, nearest_hint
from visual_grpo.tracking.registry_client import Server, local_folder, tracking_uri
from visual_grpo.tracking.runs import KEY
from visual_grpo.tracking.sync import TRAINING_DIGEST
from visual_grpo.tracking.versions import SCHEME, Registered, downloaded, named_version
from visual_grpo.trained_adapters import FACTS, LATEST, NONE, read_facts

if TYPE_CHECKING:
    from mlflow.entities import Run

ARTIFACTS = "adapters"
_VERSION = re.compile(r"[^/@]+(@[^/@]+|/\d+)")
"""As `lineage` is given one, without its scheme."""
_SHORTEST_ID = 6
_SHOWN = 5


def find_adapters(named: str, latest: Path) -> Path:
    """The folder of the adapters.

    Args:
        named: ``latest``, a folder, the id (at least its first 6 characters) or name of an MLflow run, or a version of
            a registered model: ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``.
        latest: the folder that the train pipeline writes.

    Raises:
        UserError: there is no such run or version, several runs have the name, or its adapters are gone.
    """
    if named == LATEST:
        return latest
    if not named.strip():
        raise UserError(
            f"adapter is empty. Expected {LATEST} (what the train pipeline left), a folder that a training left, the id"
            f" or name of an MLflow run, {SCHEME}NAME@ALIAS or, for generate and compare, {NONE} (the base model)."
        )
    if named.startswith(SCHEME):
        return _version(named, tracking_uri()).adapters()
    if (Path(named) / FACTS).is_file():
        return Path(named)
    if Path(named).is_dir():
        raise UserError(
            f"adapter: {named} has no {FACTS}; expected the folder that a training leaves:"
            f" {Command.now().without('adapter').of_pipeline('train')}"
        )
    return _of_run(named, tracking_uri())


def adapters_of(config: Parameters) -> Path | None:
    """The folder that the parameter ``adapter`` names; None for the base model.

    Raises:
        UserError: see `find_adapters`; or nothing was trained yet.
    """
    if config.adapter == NONE:
        return None
    latest = Path(config.adapters_folder)
    if config.adapter == LATEST and not latest.is_dir():
        raise UserError(
            f"adapter: nothing was trained yet ({latest} does not exist). Train one: {again('train')}\nOr draw"
            f" with the base model: {Command.now().adding({'adapter': NONE})}"
        )
    return find_adapters(config.adapter, latest)


def model_of(config: Parameters, adapters: Path | None) -> str:
    """The base model that ``adapters`` were trained on; without adapters that of the parameters.

    Raises:
        UserError: the starter has not pretrained it yet.
    """
    model = (None if adapters is None else read_facts(adapters)["model"]) or config.model.path or config.starter.model
    if config.model.path is None and not Path(model).is_dir():
        raise UserError(f"The base model {model} does not exist yet. Make it with: {again('starter')}")
    return str(model)


@cache
def _version(named: str, uri: str) -> Registered:
    """Looked up once in a command: an alias that is moved meanwhile would mix two adapters."""
    return named_version(named, uri)


@cache
def _of_run(named: str, uri: str) -> Path:
    """Looked up, and downloaded where the artifacts are remote, once in a command, though several places ask for it."""
    import mlflow
    from sqlalchemy.exc import SQLAlchemyError

    try:
        runs: list[Run] = mlflow.search_runs(search_all_experiments=True, output_format="list")
    except (mlflow.exceptions.MlflowException, SQLAlchemyError, OSError) as error:
        raise UserError(
            f"adapter: there is no folder {named!r}, and MLflow ({Server(uri).shown}), which may have a run of"
            f" this name, does not answer: {error}"
        ) from error
    found = [run for run in runs if _is_named(run, named)]
    if not found:
        registered = f" A registered adapter is named models:/{named}." if _VERSION.fullmatch(named) else ""
        raise UserError(
            f"adapter: there is no folder and no MLflow run {named!r}.{registered}{_those_there_are(named, runs)}"
            f" All runs are in {Server(uri).shown}; `make ui` lists them."
        )
    if len(found) > 1:
        ids = "\n".join(f"  {run.info.run_id}  {run.info.run_name}" for run in found[:10])
        raise UserError(f"adapter: {len(found)} MLflow runs are named {named!r}; name one by its id:\n{ids}")
    [run] = found
    here = local_folder(run.info.artifact_uri)
    if here is not None and (here / ARTIFACTS / FACTS).is_file():
        return here / ARTIFACTS
    try:
        return downloaded(f"runs:/{run.info.run_id}/{ARTIFACTS}", uri)
    except (OSError, mlflow.exceptions.MlflowException) as error:
        raise UserError(
            f"adapter: the MLflow run {run.info.run_id} ({run.info.run_name}) has no adapters: it did not finish"
            " training, or its artifacts were deleted."
        ) from error


def _those_there_are(named: str, runs: list[Run]) -> str:
    """The nearest name, or else the newest runs, of those with an adapter; MLflow's search gives the newest first."""
    runs = [run for run in runs if TRAINING_DIGEST in run.data.tags]
    if not runs:
        return " No run has an adapter yet."
    newest = "".join(f"\n  {run.info.run_id[:8]}  {run.info.run_name}" for run in runs[:_SHOWN])
    names = [run.info.run_name for run in runs if run.info.run_name]
    return nearest_hint(named, names) or f" The newest runs with an adapter are:{newest}\n"


def _is_named(run: Run, named: str) -> bool:
    ids = (run.info.run_id, run.data.tags.get(KEY, ""))
    by_id = len(named) >= _SHORTEST_ID and any(known.startswith(named) for known in ids)
    return by_id or run.info.run_name == named


def run_of(facts: Mapping[str, Any]) -> Run | None:
    """The MLflow run of a training; None if it had none, it was deleted, or MLflow is away."""
    named = facts.get("mlflow_run_id")
    if not named:
        return None
    import mlflow
    from sqlalchemy.exc import SQLAlchemyError

    try:
        runs: list[Run] = mlflow.search_runs(search_all_experiments=True, output_format="list")
    except (mlflow.exceptions.MlflowException, SQLAlchemyError, OSError):
        return None
    return next((run for run in runs if named in (run.info.run_id, run.data.tags.get(KEY))), None)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Adapters, and who says what of them."""

    title: str
    adapters: Path
    facts: Mapping[str, Any]
    """Their ``training.json``."""
    version_tags: Mapping[str, str] = field(default_factory=dict)
    """Of the registered version; empty where none was named."""
    run_id: str | None = None
    """The MLflow run of the training, where MLflow has it."""
    run_tags: Mapping[str, str] = field(default_factory=dict)


def find_subject(named: str, latest: Path) -> Subject:
    """The adapters that ``named`` means: ``NAME@ALIAS``, ``NAME/VERSION``, a run's id or name, a folder, ``latest``.

    Raises:
        UserError: there is no such thing, or it has no facts.
    """
    title, tags = named, {}
    if named.startswith(SCHEME) or (_VERSION.fullmatch(named) and not Path(named).is_dir()):
        version = named_version(SCHEME + named.removeprefix(SCHEME), tracking_uri())
        folder = version.adapters(whatever_they_are=True)  # Which is what is to be found out.
        adapters, tags, title = folder, dict(version.tags), f"{version.name}/{version.version}"
    else:
        adapters = find_adapters(named, latest)
    facts = read_facts(adapters)
    run = run_of(facts)
    return Subject(
        title=title,
        adapters=adapters,
        facts=facts,
        version_tags=tags,
        run_id=None if run is None else run.info.run_id,
        run_tags={} if run is None else run.data.tags,
    )
