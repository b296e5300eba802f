"""MLflow's address, its client with errors that say what to do, and requests about one run.

Requests about a run raise MLflow's own errors, and can be repeated: they add nothing twice.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from visual_grpo.common.errors import UserError, chain
from visual_grpo.common.quiet_libraries import silence_libraries

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric, Run
    from PIL.Image import Image

T = TypeVar("T")
Point = tuple[str, float, int, int]
"""A point of a curve: name, value, milliseconds since 1970, step."""

SQLITE = "sqlite:///"
MISSING, INVALID = "RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"
EXPERIMENT, ARTIFACTS = "visual_grpo", "mlartifacts"
GAIN, CHANGED = "gain", "changed"
"""Tags of a run: its gain with the interval; what was changed for it, as ``--params`` takes it."""
NOTE = "mlflow.note.content"
"""MLflow's own tag of a run's description."""
RESULT = "result/"
"""Prefix of the metrics of an evaluation."""
FIRST = f"{RESULT}gain"
"""The metric that MLflow's pages of a run and of compared runs begin with, because it is logged first."""
COLUMNS = {
    "tags.`gain`": 165,
    "tags.`verdict`": 105,
    "tags.`changed`": 140,
    "metrics.`result/by_judge`": 115,
    "metrics.`result/gain_over_control`": 110,
    "metrics.`result/task`": 90,
}
"""Columns from left to right, with widths in pixels: together they fit into a window of 1400 pixels, of which
MLflow's menu takes 200 and the name of the run 400."""
_SHOWN = {"deleted": False, "isGenerated": False}
_SECTION = {"uuid": "first", "name": "Gain and samples", "display": True, "isReordered": True, **_SHOWN}
_CHART = {"metricSectionId": "first", "runsCountToCompare": 10, **_SHOWN}
VIEW = {
    "orderByKey": f"metrics.`{FIRST}`",
    "orderByAsc": False,
    "selectedColumns": list(COLUMNS),
    "columnOrder": list(COLUMNS),
    "columnWidths": COLUMNS,
    "compareRunSections": [_SECTION],
    "compareRunCharts": [
        _CHART | {"uuid": "gain", "type": "BAR", "metricKey": FIRST},
        _CHART | {"uuid": "samples", "type": "IMAGE", "imageKeys": ["samples"], "step": 1, "showRunParams": False},
    ],
    "isAccordionReordered": True,
}
"""The table of runs that `make ui` opens, and the charts that come first. MLflow's page reads it from a tag of the
experiment; it adds the other charts below."""
KEY = "run.key"
"""Tag of a run: the id that stands for it if MLflow was away at its start, or if an earlier run was deleted."""
NAMED = "run.named"
"""Tag of a run: the name that it was given at first, from which a name that the user chose differs."""
EVALUATION, OUTPUT = "evaluate.status", "output"
"""Tags of a run: how its evaluation after its end goes; machine and folder of outputs (`output_tag`)."""
VERDICT, NOT_EVALUATED, NOTHING_TRAINED = "verdict", "not evaluated", "trains nothing"
"""Tag of a run: the word of its evaluation's headline, or why there is none."""


def use_project(project: Path) -> None:
    """Sets the address, unless there is one, to the project's mlflow.db; relative, since none may contain a ?."""
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        os.environ["MLFLOW_TRACKING_URI"] = f"{SQLITE}{os.path.relpath(project / 'mlflow.db')}"


def tracking_uri() -> str:
    """Returns the address that `mlflow.set_tracking_uri` set, else MLFLOW_TRACKING_URI."""
    import mlflow

    return mlflow.get_tracking_uri()


@contextmanager
def mlflow_client() -> Iterator[MlflowClient]:
    """Opens a client; raises UserError if MLflow does not answer, or refuses a request of the block."""
    from alembic.util.exc import CommandError  # Raised if a newer MLflow made the tables.
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield connect()
    except (MlflowException, SQLAlchemyError, CommandError, ImportError, OSError) as error:
        how = "refuses this" if getattr(error, "error_code", None) in (MISSING, INVALID) else "does not answer"
        raise UserError(f"MLflow ({shown()}) {how}: {in_a_line(error)}") from error


def connect() -> MlflowClient:
    """Returns a client. Raises SQLAlchemyError at once if a database is locked, and OSError if its artifacts are where
    the project was; does not ask a server."""
    import mlflow
    from sqlalchemy import NullPool, create_engine

    uri = tracking_uri()
    if uri.startswith(SQLITE):
        # MLflow itself would try for minutes.
        with create_engine(uri, poolclass=NullPool).connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            connection.rollback()
    client = mlflow.MlflowClient(uri)
    if (place := _artifacts(uri)) is not None and (known := client.get_experiment_by_name(_experiment())) is not None:
        before = known.artifact_location
        if before.endswith(f"/{ARTIFACTS}") and before != place:
            raise OSError(f"its artifacts are in {before}, where this project was before. Move mlflow.db aside")
    return client


def _experiment() -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT


def _artifacts(uri: str) -> str | None:
    """Returns where artifacts are stored next to a database in a file; None = the server decides."""
    file = Path(uri.removeprefix(SQLITE))
    return (file.resolve().parent / ARTIFACTS).as_uri() if uri.startswith(SQLITE) else None


def get(request: Callable[..., T], *arguments: str) -> T | None:
    """Returns the answer to a request; None if MLflow has no such object."""
    from mlflow.exceptions import MlflowException

    try:
        return request(*arguments)
    except MlflowException as error:
        if error.error_code not in (MISSING, INVALID):
            raise
        return None


def shown() -> str:
    """Returns the address for messages: without user and password, relative to the working folder."""
    return re.sub(r"(?<=//)[^/]+@|\?.*", "", tracking_uri().replace(f"{Path.cwd()}/", ""))


def in_a_line(error: BaseException) -> str:
    """Returns the message of the first cause that has words, in one line of at most 600 characters."""
    *_, cause = (error, *(one for one in chain(error) if not isinstance(one, KeyError)))
    if isinstance(cause, ImportError):
        return f"{cause}. Add the package to requirements-local.txt, from which `make setup` installs it"
    return shorten(str(cause), 600, placeholder="...") or type(cause).__name__


def local_folder(location: str) -> Path | None:
    """Returns the folder of an artifact location on this machine; None for a server's."""
    parsed = urlsplit(location)
    return Path(unquote(parsed.path)) if parsed.scheme in ("", "file") else None


def remove_others(client: MlflowClient, run: Run, path: str, folder: Path) -> None:
    """Removes the artifacts below ``path`` that ``folder`` does not have, as of an earlier part of a training.

    Some artifact stores remove nothing; they keep them.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    for found in client.list_artifacts(run.info.run_id, path):
        own = folder / Path(found.path).name
        if own.is_dir():
            remove_others(client, run, found.path, own)
        elif not own.exists():
            with suppress(MlflowException, NotImplementedError):
                get_artifact_repository(run.info.artifact_uri).delete_artifacts(found.path)


def search(client: MlflowClient, condition: str = "", *, deleted: bool = False) -> list[Run]:
    """Returns the runs of all experiments, the newest first; with ``deleted`` also deleted ones."""
    from mlflow.entities import ViewType

    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    view = ViewType.ALL if deleted else ViewType.ACTIVE_ONLY
    return list(client.search_runs(experiments, condition, view, max_results=50_000))


def find_run(client: MlflowClient, named: str) -> Run | None:
    """Returns the run with this id or key; a deleted one only if no other has the key."""
    run = get(client.get_run, named)
    runs = [*filter(None, [run]), *search(client, f"tags.`{KEY}` = '{named}'", deleted=True)]
    return next(filter(is_active, runs), runs[0] if runs else None)


def is_active(run: Run) -> bool:
    return bool(run.info.lifecycle_stage == "active")


def experiment_id(client: MlflowClient) -> str:
    """Returns the experiment's id; creates it if needed. Raises OSError if it was deleted."""
    known = client.get_experiment_by_name(name := _experiment())
    if known is None:
        view = {"mlflow.sharedViewState.gain": json.dumps(VIEW)}
        return str(client.create_experiment(name, _artifacts(tracking_uri()), view))
    if known.lifecycle_stage != "active":
        restored = f"mlflow experiments restore --experiment-id {known.experiment_id}"
        raise OSError(
            f"the experiment {name!r} was deleted. Choose a different name in MLFLOW_EXPERIMENT_NAME, or: {restored}"
        )
    return str(known.experiment_id)


def output_tag(output: Path) -> str:
    return f"{socket.gethostname()}:{output.resolve()}"


def close_killed(client: MlflowClient, output: Path, open_run: str | None = None) -> None:
    """Closes runs that killed processes left open; the caller holds the lock of ``output``."""
    for run in search(client, "attributes.status = 'RUNNING'"):
        if run.info.run_id == open_run or run.data.tags.get(OUTPUT) != output_tag(output):
            continue
        evaluated = run.data.tags.get(EVALUATION) == "running"  # The training had ended well.
        if evaluated:
            client.set_tag(run.info.run_id, EVALUATION, "killed")
        client.set_terminated(run.info.run_id, "FINISHED" if evaluated else "KILLED")


def to_metrics(points: Iterable[Point]) -> list[Metric]:
    from mlflow.entities import Metric

    return [Metric(*point) for point in points]


def log_metrics(client: MlflowClient, run_id: str, points: Iterable[Point], known: dict[str, set[int]]) -> None:
    """Logs the steps that the run's curves lack; ``known`` maps each curve to its steps, and is updated.

    `FIRST` is NaN until an evaluation logs it.
    """
    metrics = to_metrics(points)
    if FIRST not in known and metrics:
        metrics = [*to_metrics([(FIRST, math.nan, metrics[0].timestamp, 0)]), *metrics]
    for name in {metric.key for metric in metrics} - known.keys():
        known[name] = {point.step for point in client.get_metric_history(run_id, name)}
    client.log_batch(run_id, metrics=[metric for metric in metrics if metric.step not in known[metric.key]])


def set_results(client: MlflowClient, run_id: str, results: Mapping[str, float], step: int) -> None:
    """Makes ``results``, metrics ``result/NAME``, those that MLflow shows; those that they lack become NaN.

    MLflow shows the value of the highest step, so a training that went back to fewer steps keeps that.
    """
    shown = client.get_run(run_id).data.metrics
    results = dict.fromkeys((name for name in shown if name.startswith(RESULT)), math.nan) | dict(results)
    points = []
    for name, value in results.items():
        if name not in shown or str(shown[name]) != str(value):  # NaN differs from itself.
            steps = (point.step for point in client.get_metric_history(run_id, name))
            points.append((name, value, int(time.time() * 1000), max([step, *steps])))
    client.log_batch(run_id, metrics=to_metrics(points))


def log_picture(client: MlflowClient, run_id: str, picture: Image, series: str, step: int) -> None:
    """Logs a step of a series of images, unless the run has it."""
    logged = (Path(file.path).name for file in client.list_artifacts(run_id, "images"))
    if not any(name.startswith(f"{series}+step+{step}+") for name in logged):
        client.log_image(run_id, picture, key=series, step=step, synchronous=True)


def set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, object]) -> None:
    """Sets tags; existing tags are replaced."""
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(name, str(value)) for name, value in tags.items()])


def to_input(context: str, place: str, digest: str, profile: Mapping[str, object], *, on_hub: bool) -> DatasetInput:
    """Returns what a run read, data or the base model, as a dataset of MLflow."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    name, source = Path(place).name, json.dumps({"uri": place})
    dataset = Dataset(name, digest[:12], "hf" if on_hub else "local", source, None, json.dumps(profile))
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def set_params(client: MlflowClient, run_id: str, params: Mapping[str, object]) -> None:
    """Logs parameters. MLflow cannot overwrite one: a different value of a resumed run is the tag ``resumed.NAME``."""
    from mlflow.entities import Param

    before = client.get_run(run_id).data.params
    texts = {name: str(value) for name, value in params.items()}
    client.log_batch(run_id, params=[Param(name, text) for name, text in texts.items() if name not in before])
    set_tags(client, run_id, {f"resumed.{n}": text for n, text in texts.items() if before.get(n, text) != text})


if __name__ == "__main__":  # For `make ui`: prints the id of the experiment, which need not be there yet.
    silence_libraries()
    use_project(Path.cwd())
    try:
        with mlflow_client() as opened:
            print(experiment_id(opened))  # noqa: T201
    except UserError as refused:
        sys.exit(f"Error: {refused}")
