"""MLflow's address, and requests to it that end within seconds with an answer or with what to do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from visual_grpo.errors import UserError
from visual_grpo.threads import in_thread

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")

EXPERIMENT = "visual_grpo"
WAIT, WAIT_FOR_TABLES = 10.0, 60.0
"""Most seconds that one request may take, and the one that makes a new database."""
ARTIFACTS = "mlartifacts"
_URI = "MLFLOW_TRACKING_URI"
SQLITE = "sqlite:///"
_SERVERS = ("http", "https", "databricks")
_SCHEMES = ("", "file", *_SERVERS, "sqlite", "postgresql", "mysql", "mssql")
MISSING, INVALID = "RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"
_AGAIN = "See that it runs and is not locked by another program; then run the command again."
_default = ""


def tracking_uri() -> str:
    """MLflow's address in this process: MLFLOW_TRACKING_URI, else mlflow.db in the working folder."""
    return os.environ.get(_URI) or f"{SQLITE}{Path.cwd() / 'mlflow.db'}"


def use_project(project: Path) -> None:
    """Makes the project's mlflow.db the address, unless the user's MLFLOW_TRACKING_URI names another.

    The address is absolute: a relative SQLite path would depend on the working directory, for example notebooks/.

    Raises:
        UserError: MLflow knows no address of that kind.
    """
    global _default
    if os.environ.get(_URI, "") in ("", _default):
        os.environ[_URI] = _default = f"{SQLITE}{project.resolve() / 'mlflow.db'}"
    scheme = urlsplit(tracking_uri()).scheme.partition("+")[0]
    if scheme not in (*_SCHEMES, *(plugin.name for plugin in entry_points(group="mlflow.tracking_store"))):
        raise UserError(
            f"MLflow's address begins with {scheme}://, which MLflow does not know. Expected a database, such as"
            " sqlite:///mlflow.db, or a server, such as http://host:5000: set MLFLOW_TRACKING_URI, or leave it out."
        )


def artifact_location(uri: str) -> str | None:
    """Where a new experiment keeps its artifacts: beside a database; None = the server's own place."""
    if urlsplit(uri).scheme in _SERVERS:
        return None
    folder = Path(uri.removeprefix(SQLITE)).resolve().parent if uri.startswith(SQLITE) else Path.cwd()
    return (folder / ARTIFACTS).as_uri()


def local_folder(location: str) -> Path | None:
    """The folder on this machine that MLflow's location of artifacts names; None if they are on a server."""
    parsed = urlsplit(location)
    return Path(unquote(parsed.path)) if parsed.scheme in ("", "file") else None


class MissingError(UserError):
    """MLflow has no model, version or run of this name."""


class Server:
    """An MLflow server or database."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    @classmethod
    def registry(cls, uri: str) -> Server:
        """Raises UserError for an address that is neither a database nor a server: only these have a registry."""
        if ":" not in uri or urlsplit(uri).scheme == "file":
            raise UserError(
                f"MLflow's address is {uri!r}, which has no registry of models. Expected a database, such as"
                " sqlite:///mlflow.db, or a server, such as http://host:5000: set MLFLOW_TRACKING_URI, or leave it out."
            )
        return cls(uri)

    @cached_property
    def client(self) -> MlflowClient:
        """Opens a database, but does not ask a server."""
        from mlflow import MlflowClient

        if self.uri.startswith(SQLITE):
            _check_writable(self.uri)
        return MlflowClient(self.uri)

    @property
    def shown(self) -> str:
        """For messages: without user and password; a database below the working folder by its path there."""
        if self.uri.startswith(SQLITE):
            path = Path(self.uri.removeprefix(SQLITE))
            return SQLITE + str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
        parts = urlsplit(self.uri)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()

    @property
    def is_empty(self) -> bool:
        """Whether the database does not exist yet; asking it anything would make it."""
        return self.uri.startswith(SQLITE) and not Path(self.uri.removeprefix(SQLITE)).is_file()

    @property
    def patience(self) -> float:
        """Seconds within which it should answer one request."""
        return WAIT_FOR_TABLES if self.is_empty else WAIT

    def ask(self, request: Callable[[MlflowClient], T]) -> T:
        """What a short request answers.

        Raises:
            MissingError: MLflow does not have what is asked for.
            UserError: no answer in `patience` seconds, or another error.
        """
        limit = self.patience
        # A request that hangs cannot be stopped; its thread does not outlive the command.
        asked = in_thread(lambda: request(self.client), "mlflow request")
        if wait([asked], limit).not_done:
            raise UserError(f"MLflow ({self.shown}) has not answered in {limit:g} s. {_AGAIN}")
        with self._explained():
            return asked.result()

    def get(self, request: Callable[[MlflowClient], T]) -> T | None:
        """As `ask`; None where MLflow does not have what is asked for."""
        with contextlib.suppress(MissingError):
            return self.ask(request)
        return None

    def transfer(self, request: Callable[[MlflowClient], T]) -> T:
        """A request that moves files, which may take minutes; errors as in `ask`."""
        with self._explained():
            return request(self.client)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except unavailable() as error:
            said, code = in_a_line(error).rstrip("."), getattr(error, "error_code", None)
            if code == MISSING:
                raise MissingError(f"MLflow ({self.shown}) does not have it: {said}") from error
            if code == INVALID:
                raise UserError(f"MLflow ({self.shown}) refuses this: {said}") from error
            raise UserError(f"MLflow ({self.shown}) does not answer: {said}. {_AGAIN}") from error


def unavailable() -> tuple[type[Exception], ...]:
    """Errors of MLflow, its database or the network, and none of ours."""
    from alembic.util.exc import CommandError  # Where a newer MLflow has made the tables.
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, CommandError, OSError


def in_a_line(error: BaseException) -> str:
    """The cause that a user knows, without the query or the objects around it."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."


def _check_writable(uri: str) -> None:
    """Raises at once what MLflow would try for minutes, with a line for each attempt."""
    from sqlalchemy import NullPool, create_engine

    with create_engine(uri, poolclass=NullPool).connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        connection.rollback()
