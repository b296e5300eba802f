"""MLflow's address, and its client with errors that say what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from visual_grpo.errors import UserError

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")

SQLITE = "sqlite:///"
_URI = "MLFLOW_TRACKING_URI"
MISSING, INVALID = "RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"
_default = ""


def use_project(project: Path) -> None:
    """Makes the project's mlflow.db the address, unless the user's MLFLOW_TRACKING_URI names another.

    The address is absolute: a relative SQLite path would depend on the working directory, for example notebooks/.
    """
    global _default
    if os.environ.get(_URI, "") in ("", _default):
        os.environ[_URI] = _default = f"{SQLITE}{project.resolve() / 'mlflow.db'}"


def tracking_uri() -> str:
    """The address in use: that of `mlflow.set_tracking_uri`, else MLFLOW_TRACKING_URI."""
    import mlflow

    return mlflow.get_tracking_uri()


@contextmanager
def mlflow_client() -> Iterator[MlflowClient]:
    """A client for the address in use.

    Raises:
        UserError: MLflow does not answer, or refuses a request of the block.
    """
    from alembic.util.exc import CommandError  # Where a newer MLflow has made the tables.
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield connect()
    except (MlflowException, SQLAlchemyError, CommandError, OSError) as error:
        said = in_a_line(error).rstrip(".")
        if getattr(error, "error_code", None) in (MISSING, INVALID):
            raise UserError(f"MLflow ({shown()}) refuses this: {said}") from error
        raise UserError(
            f"MLflow ({shown()}) does not answer: {said}. See that it runs and is not locked by another program;"
            " then run the command again."
        ) from error


def connect() -> MlflowClient:
    """Opens a database, but does not ask a server."""
    from mlflow import MlflowClient
    from sqlalchemy import NullPool, create_engine

    uri = tracking_uri()
    if uri.startswith(SQLITE):
        # Raises at once what MLflow would try for minutes.
        with create_engine(uri, poolclass=NullPool).connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            connection.rollback()
    return MlflowClient(uri)


def get(request: Callable[..., T], *arguments: str) -> T | None:
    """The answer to a request; None where MLflow does not have what is asked for."""
    from mlflow.exceptions import MlflowException

    try:
        return request(*arguments)
    except MlflowException as error:
        if error.error_code not in (MISSING, INVALID):
            raise
        return None


def shown() -> str:
    """The address for messages: without user and password; a database below the working folder by its path there."""
    uri = tracking_uri()
    if uri.startswith(SQLITE):
        path = Path(uri.removeprefix(SQLITE))
        return SQLITE + str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def in_a_line(error: BaseException) -> str:
    """The cause that a user knows, without the query or the objects around it."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."


def local_folder(location: str) -> Path | None:
    """The folder on this machine that MLflow's location of artifacts names; None if they are on a server."""
    parsed = urlsplit(location)
    return Path(unquote(parsed.path)) if parsed.scheme in ("", "file") else None
