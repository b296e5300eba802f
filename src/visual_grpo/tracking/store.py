"""Runs in MLflow's store: found, made, reopened and closed. Every call may raise what MLflow raises."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from visual_grpo.tracking.spool import Head

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

KEY = "run.key"
"""Tag of a run that was named before MLflow could give it an id, or whose first id is gone from the store."""
EVALUATION = "evaluate.status"
"""Tag of the evaluation of a run that had ended: running, finished, failed or killed."""
VERDICT = ("result", EVALUATION)
"""Tags that an evaluation leaves."""
_MISSING = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
_SQLITE = "sqlite:///"
_IMAGE = re.compile(r"(.+)\+step\+(\d+)\+timestamp\+\d+\+(.+?)(?:\+compressed)?\.\w+")
"""How MLflow names the files of a series of images."""


class Store:
    """An MLflow server or database, asked when it is first needed."""

    def __init__(self, tracking_uri: str) -> None:
        self.tracking_uri = tracking_uri

    @cached_property
    def client(self) -> MlflowClient:
        """Opens a database, but does not ask a server."""
        from mlflow import MlflowClient

        if self.tracking_uri.startswith(_SQLITE):
            _check_writable(self.tracking_uri)
        return MlflowClient(self.tracking_uri)

    def find(self, named: str, experiment: str) -> Run | None:
        """The run with this id or key that is not deleted."""
        from mlflow.exceptions import MlflowException

        try:
            run = self.client.get_run(named)
        except MlflowException as error:
            if error.error_code not in _MISSING:
                raise
        else:
            if run.info.lifecycle_stage == "active":
                return run
        known = self.client.get_experiment_by_name(experiment)
        if known is None:
            return None
        return next(iter(self.client.search_runs([known.experiment_id], f"tags.`{KEY}` = '{named}'")), None)

    def make(self, head: Head) -> Run:
        """A new run of a spool, which the next `find` finds by its key."""
        known = self.client.get_experiment_by_name(head.experiment)
        if known is None:
            experiment = self.client.create_experiment(head.experiment, artifact_location=head.artifacts)
        else:
            experiment = known.experiment_id
            if known.lifecycle_stage == "deleted":
                self.client.restore_experiment(experiment)
        return self.client.create_run(experiment, start_time=head.began, tags={KEY: head.run}, run_name=head.name)

    def reopen(self, run_id: str) -> None:
        """A run that goes on is not over, whatever ended it."""
        self.client.update_run(run_id, status="RUNNING")

    def close_killed(self, run_id: str, at: int) -> None:
        """Closes the run of a process that could not do it; of an evaluation only that, since the training had ended.

        Args:
            at: when the process wrote last, in milliseconds since 1970.
        """
        run = self.client.get_run(run_id)
        if run.info.status != "RUNNING":
            return
        if run.data.tags.get(EVALUATION) == "running":
            self.client.set_tag(run_id, EVALUATION, "killed")
            self.client.set_terminated(run_id, "FINISHED", at)
        else:
            self.client.set_terminated(run_id, "KILLED", at)

    def logged_steps(self, run_id: str, metric: str) -> set[int]:
        """The steps that a curve has."""
        return {point.step for point in self.client.get_metric_history(run_id, metric)}

    def logged_images(self, run_id: str) -> dict[tuple[str, int], str]:
        """The images that a run has: series and step -> a name that tells two images of the same step apart."""
        found = (_IMAGE.fullmatch(Path(file.path).name) for file in self.client.list_artifacts(run_id, "images"))
        return {(match[1], int(match[2])): match[3] for match in found if match}


def image_name(series: str, step: int, at: int, distinct: str) -> str:
    """The file of an image, as MLflow's interface expects it.

    Args:
        at: milliseconds since 1970.
        distinct: tells two images of the same step apart.
    """
    return f"images/{series.replace('/', '~')}+step+{step}+timestamp+{at}+{distinct}.png"


def image_of(name: str) -> tuple[str, int, str]:
    """Series, step and what tells it apart, of an `image_name`."""
    match = _IMAGE.fullmatch(Path(name).name)
    assert match is not None, name
    return match[1], int(match[2]), match[3]


def shown_server(tracking_uri: str) -> str:
    """For messages and for files: without user and password; a database below the working folder by its path there."""
    if tracking_uri.startswith(_SQLITE):
        path = Path(tracking_uri.removeprefix(_SQLITE))
        return _SQLITE + str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    parts = urlsplit(tracking_uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def is_new(tracking_uri: str) -> bool:
    """Whether it is a database that does not exist yet."""
    return tracking_uri.startswith(_SQLITE) and not Path(tracking_uri.removeprefix(_SQLITE)).is_file()


def _check_writable(tracking_uri: str) -> None:
    """Raises at once what MLflow would try for minutes, with a line for each attempt."""
    from sqlalchemy import NullPool, create_engine

    with create_engine(tracking_uri, poolclass=NullPool).connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        connection.rollback()


def is_missing(error: Exception) -> bool:
    """Whether MLflow says that it does not have the run (any more)."""
    return getattr(error, "error_code", None) == _MISSING[0]


def unavailable() -> tuple[type[Exception], ...]:
    """Errors of MLflow, its database or the network, and none of ours."""
    from alembic.util.exc import CommandError  # Where a newer MLflow has made the tables.
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, CommandError, OSError


def is_refusal(error: Exception) -> bool:
    """Whether MLflow will never accept this, however often it is asked."""
    return getattr(error, "error_code", None) == _MISSING[1]


def in_a_line(error: BaseException) -> str:
    """The cause that a user knows, without the query or the objects around it."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."
