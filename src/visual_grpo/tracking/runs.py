"""Requests about one run; what is there already is not added again. They raise what MLflow raises."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from visual_grpo.tracking.client import (
    ARTIFACTS,
    INVALID,
    MISSING,
    artifact_location,
    experiment_name,
    local_folder,
    tracking_uri,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run
    from PIL.Image import Image

KEY = "run.key"
"""Tag of a run that was named before MLflow could give it an id, or whose first id is gone."""
EVALUATION = "evaluate.status"
"""Tag of the evaluation of a run that had ended: running, finished, failed or killed."""
OUTPUT = "output"
"""Tag of a run: the machine and the folder of outputs that its process writes to (`output_tag`)."""
_PICTURE = re.compile(r"(.+)\+step\+(\d+)\+timestamp\+.+")
"""How MLflow names the files of a series of images."""
_TAGS, _METRICS = 100, 1000
"""Most tags or parameters, and most metrics, that MLflow accepts in one request."""
_LONGEST_TAG, _LONGEST_PARAM, _LONGEST_DIGEST = 5000, 6000, 36


def find_run(client: MlflowClient, named: str) -> Run | None:
    """The run with this id or key; one that was deleted only where no other has the key."""
    from mlflow.entities import ViewType
    from mlflow.exceptions import MlflowException

    found: list[Run] = []
    try:
        found.append(client.get_run(named))
    except MlflowException as error:
        if error.error_code not in (MISSING, INVALID):
            raise
    known = client.get_experiment_by_name(experiment_name())
    if not (found and is_active(found[0])) and known is not None:
        found += client.search_runs([known.experiment_id], f"tags.`{KEY}` = '{named}'", ViewType.ALL)
    return next(filter(is_active, found), found[0] if found else None)


def is_active(run: Run) -> bool:
    """Returns whether the run was not deleted."""
    return bool(run.info.lifecycle_stage == "active")


def make_run(client: MlflowClient, key: str, name: str, began: int) -> Run:
    """A new run, which `find_run` finds by its key."""
    return client.create_run(experiment_id(client), start_time=began, tags={KEY: key}, run_name=name)


def experiment_id(client: MlflowClient) -> str:
    """The id of the experiment of all runs, which is made where there is none.

    Raises:
        OSError: it keeps its artifacts where the project was before it was moved.
    """
    place, known = artifact_location(), client.get_experiment_by_name(experiment_name())
    if known is None:
        return str(client.create_experiment(experiment_name(), place))
    if known.lifecycle_stage == "deleted":
        client.restore_experiment(known.experiment_id)
    there = local_folder(known.artifact_location)
    if tracking_uri().startswith("sqlite:") and there and there.name == ARTIFACTS and there.as_uri() != place:
        raise OSError(
            f"its artifacts are in {there}, where this project was before it was moved or copied. Move mlflow.db aside"
        )
    return str(known.experiment_id)


def output_tag(output: Path) -> str:
    return f"{socket.gethostname()}:{output.resolve()}"


def close_killed(client: MlflowClient, output: Path, open_run: str | None = None) -> None:
    """Closes the runs of processes that could not do it: this process alone writes to ``output`` now."""
    known = client.get_experiment_by_name(experiment_name())
    if known is None:
        return
    for run in client.search_runs([known.experiment_id], "attributes.status = 'RUNNING'"):
        if run.info.run_id == open_run or run.data.tags.get(OUTPUT) != output_tag(output):
            continue
        evaluated = run.data.tags.get(EVALUATION) == "running"  # The training had ended well.
        if evaluated:
            client.set_tag(run.info.run_id, EVALUATION, "killed")
        client.set_terminated(run.info.run_id, "FINISHED" if evaluated else "KILLED")


def log_metrics(
    client: MlflowClient, run_id: str, metrics: Sequence[Metric], known: dict[str, set[int]] | None = None
) -> int:
    """Logs the steps that the run's curves lack; returns how many values.

    Args:
        known: the steps of each curve, looked up where a curve is missing here; None = all are new.
    """
    if known is not None:
        for name in {metric.key for metric in metrics} - known.keys():
            known[name] = {point.step for point in client.get_metric_history(run_id, name)}
        metrics = [metric for metric in metrics if metric.step not in known[metric.key]]
    for start in range(0, len(metrics), _METRICS):
        client.log_batch(run_id, metrics=metrics[start : start + _METRICS])
    return len(metrics)


def log_pictures(client: MlflowClient, run_id: str, pictures: Mapping[tuple[str, int], Callable[[], Image]]) -> int:
    """Logs the steps that the series of images lack (series and step -> image); returns how many."""
    if not pictures:
        return 0
    found = (_PICTURE.fullmatch(Path(file.path).name) for file in client.list_artifacts(run_id, "images"))
    there = {(match[1], int(match[2])) for match in found if match}
    new = [place for place in pictures if place not in there]
    for series, step in new:
        client.log_image(run_id, pictures[series, step](), key=series, step=step, synchronous=True)
    return len(new)


def log_dataset(client: MlflowClient, run_id: str, name: str, digest: str, source: str) -> None:
    """Records that the run read the dataset ``name`` from ``source`` (a path or URL)."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    entity = Dataset(name, digest[:_LONGEST_DIGEST], "local", json.dumps({"uri": source}))
    client.log_inputs(run_id, datasets=[DatasetInput(entity, [InputTag("mlflow.data.context", "training")])])


def set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, object]) -> None:
    """Sets tags; existing tags are replaced."""
    from mlflow.entities import RunTag

    entities = [RunTag(name, str(value)[:_LONGEST_TAG]) for name, value in tags.items()]
    for start in range(0, len(entities), _TAGS):
        client.log_batch(run_id, tags=entities[start : start + _TAGS])


def remove_tags(client: MlflowClient, run_id: str, names: Iterable[str]) -> None:
    """Removes those of the tags that the run has."""
    for name in sorted(client.get_run(run_id).data.tags.keys() & set(names)):
        client.delete_tag(run_id, name)


def set_params(client: MlflowClient, run_id: str, params: Mapping[str, object]) -> None:
    """Logs parameters. MLflow cannot overwrite one: another value of a resumed run is the tag ``resumed.NAME``."""
    from mlflow.entities import Param

    before = client.get_run(run_id).data.params
    given = {name: str(value)[:_LONGEST_PARAM] for name, value in params.items()}
    entities = [Param(name, value) for name, value in given.items() if name not in before]
    for start in range(0, len(entities), _TAGS):
        client.log_batch(run_id, params=entities[start : start + _TAGS])
    set_tags(client, run_id, {f"resumed.{n}": v for n, v in given.items() if before.get(n, v) != v})
