"""MLflow's address, its client with errors that say what to do, and requests about one run.

Requests about a run raise MLflow's own errors, and can be repeated: they add nothing twice.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from visual_grpo.common.errors import UserError
from visual_grpo.evaluation.verdict import TASK_MEASURES

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run
    from PIL.Image import Image

T = TypeVar("T")

SQLITE = "sqlite:///"
_URI = "MLFLOW_TRACKING_URI"
MISSING, INVALID = "RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"
_default = ""
EXPERIMENT, ARTIFACTS = "visual_grpo", "mlartifacts"
_RESULTS = ("gain", "low", "high", *TASK_MEASURES.values())
COLUMNS = (
    *(f"metrics.`result/{name}`" for name in _RESULTS),
    *("metrics.`reward/total`", "params.`policy.train`", "params.`grpo.steps`", "params.`seed`"),
)
_FIRST = "first"
_IMAGES: dict[str, Any] = {"type": "IMAGE", "imageKeys": ["samples"], "step": 1, "showRunParams": False}
_CURVE: dict[str, Any] = {
    "type": "LINE",
    "xAxisKey": "step",
    "xAxisScaleType": "linear",
    "scaleType": "linear",
    "range": {},
}
_CURVE |= {"yAxisKey": "metric", "yAxisExpressions": [], "lineSmoothness": 0, "selectedXAxisMetricKey": ""}
_CHARTS: dict[str, dict[str, Any]] = {
    "samples": _IMAGES,
    **{name: _CURVE | {"metricKey": name, "selectedMetricKeys": [name]} for name in ("eval/total", "reward/total")},
    "gain": {"type": "BAR", "metricKey": "result/gain"},
}
_SHOWN = {"deleted": False, "isGenerated": False}
VIEW = {
    "orderByKey": COLUMNS[0],
    "orderByAsc": False,
    "selectedColumns": COLUMNS,
    "compareRunSections": [
        {"uuid": _FIRST, "name": "Samples, reward, gain", "display": True, "isReordered": True, **_SHOWN}
    ],
    "compareRunCharts": [
        {"uuid": name, "metricSectionId": _FIRST, "runsCountToCompare": 10, **_SHOWN, **chart}
        for name, chart in _CHARTS.items()
    ],
    "isAccordionReordered": True,
}
"""What `make ui` opens: the table of runs, and the charts that come first. MLflow's page reads it from a tag of the
experiment; it adds the other charts below."""
KEY = "run.key"
"""Tag of a run: the id that stands for it if MLflow was away at its start, or if an earlier run was deleted."""
EVALUATION = "evaluate.status"
"""Tag of a run that is evaluated after its end: running, finished, failed or killed."""
OUTPUT = "output"
"""Tag of a run: machine and folder of outputs (`output_tag`)."""
_PICTURE = re.compile(r"(.+)\+step\+(\d+)\+timestamp\+.+")
"""MLflow's file names of a series of images."""
_TAGS, _METRICS = 100, 1000
"""MLflow's limits for one request."""
_LONGEST_TAG, _LONGEST_PARAM = 5000, 6000


def use_project(project: Path) -> None:
    """Makes the project's mlflow.db the address, unless the user's MLFLOW_TRACKING_URI names another.

    The address is absolute: a relative SQLite path would depend on the working directory, for example notebooks/.
    """
    global _default
    if os.environ.get(_URI, "") in ("", _default):
        os.environ[_URI] = _default = f"{SQLITE}{project.resolve() / 'mlflow.db'}"


def tracking_uri() -> str:
    """Returns the address that `mlflow.set_tracking_uri` set, else MLFLOW_TRACKING_URI."""
    import mlflow

    return mlflow.get_tracking_uri()


@contextmanager
def mlflow_client() -> Iterator[MlflowClient]:
    """Opens a client for the address in use.

    Raises:
        UserError: MLflow does not answer, or refuses a request of the block.
    """
    from alembic.util.exc import CommandError  # Raised if a newer MLflow made the tables.
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield connect()
    except (MlflowException, SQLAlchemyError, CommandError, OSError) as error:
        message = in_a_line(error).rstrip(".")
        if getattr(error, "error_code", None) in (MISSING, INVALID):
            raise UserError(f"MLflow ({shown()}) refuses this: {message}") from error
        raise UserError(
            f"MLflow ({shown()}) does not answer: {message}. See that it runs and is not locked by another program;"
            " then run the command again."
        ) from error


def connect() -> MlflowClient:
    """Returns a client. Raises SQLAlchemyError at once if a database is locked; does not ask a server."""
    from mlflow import MlflowClient
    from sqlalchemy import NullPool, create_engine

    uri = tracking_uri()
    if uri.startswith(SQLITE):
        # MLflow itself would try for minutes.
        with create_engine(uri, poolclass=NullPool).connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            connection.rollback()
    return MlflowClient(uri)


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
    """Returns the address for messages: without user and password; a database below the working folder is relative."""
    uri = tracking_uri()
    if uri.startswith(SQLITE):
        path = Path(uri.removeprefix(SQLITE))
        return SQLITE + str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def in_a_line(error: BaseException) -> str:
    """Returns the message of the first cause, in one line of at most 160 characters."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."


def local_folder(location: str) -> Path | None:
    """Returns the folder of an artifact location on this machine; None for a server's."""
    parsed = urlsplit(location)
    return Path(unquote(parsed.path)) if parsed.scheme in ("", "file") else None


def search(client: MlflowClient, condition: str = "", *, deleted: bool = False) -> list[Run]:
    """Returns the runs of all experiments, the newest first; with ``deleted`` also deleted ones."""
    from mlflow.entities import ViewType

    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    view = ViewType.ALL if deleted else ViewType.ACTIVE_ONLY
    return list(client.search_runs(experiments, condition, view, max_results=50_000))


def find_run(client: MlflowClient, named: str) -> Run | None:
    """Returns the run with this id or key; a deleted one only if no other has the key."""
    run = get(client.get_run, named)
    if run is not None and is_active(run):
        return run
    runs = [*([] if run is None else [run]), *search(client, f"tags.`{KEY}` = '{named}'", deleted=True)]
    return next(filter(is_active, runs), runs[0] if runs else None)


def is_active(run: Run) -> bool:
    """Returns True if the run was not deleted."""
    return bool(run.info.lifecycle_stage == "active")


def make_run(client: MlflowClient, key: str, name: str, began: int) -> Run:
    """Creates a run, which `find_run` finds by its key."""
    return client.create_run(experiment_id(client), start_time=began, tags={KEY: key}, run_name=name)


def experiment_id(client: MlflowClient) -> str:
    """Returns the experiment's id; creates the experiment if needed, with its artifacts beside a database.

    Raises:
        OSError: its artifacts are where the project was before it was moved.
    """
    name, uri = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT, tracking_uri()
    known, place = client.get_experiment_by_name(name), None
    if uri.startswith(SQLITE):
        place = (Path(uri.removeprefix(SQLITE)).resolve().parent / ARTIFACTS).as_uri()
    if known is None:
        return str(client.create_experiment(name, place, {"mlflow.sharedViewState.gain": json.dumps(VIEW)}))
    if place is not None and known.artifact_location.endswith(f"/{ARTIFACTS}") and known.artifact_location != place:
        raise OSError(
            f"its artifacts are in {known.artifact_location}, where this project was before it was moved or copied."
            " Move mlflow.db aside"
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


def log_metrics(
    client: MlflowClient, run_id: str, metrics: Sequence[Metric], known: dict[str, set[int]] | None = None
) -> int:
    """Logs the steps that the run's curves lack; returns the number of values.

    Args:
        known: the logged steps of each curve, to which missing curves are added; None = no step was logged yet.
    """
    if known is not None:
        for name in {metric.key for metric in metrics} - known.keys():
            known[name] = {point.step for point in client.get_metric_history(run_id, name)}
        metrics = [metric for metric in metrics if metric.step not in known[metric.key]]
    for start in range(0, len(metrics), _METRICS):
        client.log_batch(run_id, metrics=metrics[start : start + _METRICS])
    return len(metrics)


def log_pictures(client: MlflowClient, run_id: str, pictures: Mapping[tuple[str, int], Callable[[], Image]]) -> int:
    """Logs the steps that the series of images lack (series and step -> image); returns their number."""
    if not pictures:
        return 0
    matches = (_PICTURE.fullmatch(Path(file.path).name) for file in client.list_artifacts(run_id, "images"))
    logged = {(match[1], int(match[2])) for match in matches if match}
    new = [key for key in pictures if key not in logged]
    for series, step in new:
        client.log_image(run_id, pictures[series, step](), key=series, step=step, synchronous=True)
    return len(new)


def set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, object]) -> None:
    """Sets tags; existing tags are replaced."""
    from mlflow.entities import RunTag

    entities = [RunTag(name, str(value)[:_LONGEST_TAG]) for name, value in tags.items()]
    for start in range(0, len(entities), _TAGS):
        client.log_batch(run_id, tags=entities[start : start + _TAGS])


def remove_tags(client: MlflowClient, run_id: str, names: Iterable[str]) -> None:
    """Removes tags, if the run has them."""
    for name in sorted(client.get_run(run_id).data.tags.keys() & set(names)):
        client.delete_tag(run_id, name)


def set_params(client: MlflowClient, run_id: str, params: Mapping[str, object]) -> None:
    """Logs parameters. MLflow cannot overwrite one: another value of a resumed run is the tag ``resumed.NAME``."""
    from mlflow.entities import Param

    before = client.get_run(run_id).data.params
    texts = {name: str(value)[:_LONGEST_PARAM] for name, value in params.items()}
    entities = [Param(name, text) for name, text in texts.items() if name not in before]
    for start in range(0, len(entities), _TAGS):
        client.log_batch(run_id, params=entities[start : start + _TAGS])
    set_tags(client, run_id, {f"resumed.{n}": text for n, text in texts.items() if before.get(n, text) != text})
