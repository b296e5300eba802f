"""Requests that a command waits for: answered within seconds, or refused with what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import TYPE_CHECKING, TypeVar

from visual_grpo.errors import UserError
from visual_grpo.threads import in_thread
from visual_grpo.tracking.store import Store, in_a_line, is_missing, is_new, shown_server, unavailable

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")

WAIT = 10.0
"""Most seconds that one request may take."""
WAIT_FOR_TABLES = 60.0
"""Of the request that makes a new database."""
_FILES = ("", "file")


class Server:
    """MLflow's registry at a tracking URI. What a request raises is a `UserError` that names the server.

    Raises:
        UserError: the address is none of a database or a server; only these have a registry.
    """

    def __init__(self, tracking_uri: str) -> None:
        if tracking_uri.partition(":")[0] in _FILES or ":" not in tracking_uri:
            raise UserError(
                f"MLflow's address is {tracking_uri!r}, which has no registry of models. Expected a database, such as"
                " sqlite:///mlflow.db, or a server, such as http://host:5000: set MLFLOW_TRACKING_URI, or leave it out."
            )
        self.tracking_uri = tracking_uri
        self.store = Store(tracking_uri)

    @property
    def shown(self) -> str:
        """Without user and password."""
        return shown_server(self.tracking_uri)

    @property
    def is_empty(self) -> bool:
        """Whether the database does not exist yet; asking it anything would make it."""
        return is_new(self.tracking_uri)

    def ask(self, request: Callable[[MlflowClient], T]) -> T:
        """What a short request answers.

        Raises:
            UserError: no answer in `WAIT` seconds, or an error; what MLflow does not have raises as in `get`.
        """
        limit = WAIT_FOR_TABLES if self.is_empty else WAIT
        # A request that hangs cannot be stopped; its thread does not outlive the command.
        asked = in_thread(lambda: request(self.store.client), "mlflow registry")
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
            return request(self.store.client)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raises what a user can do about MLflow's errors."""
        try:
            yield
        except unavailable() as error:
            raise self._in_words(error) from error

    def _in_words(self, error: Exception) -> UserError:
        said = in_a_line(error).rstrip(".")
        if is_missing(error):
            return MissingError(f"MLflow ({self.shown}) does not have it: {said}")
        if getattr(error, "error_code", None) == "INVALID_PARAMETER_VALUE":
            return UserError(f"MLflow ({self.shown}) refuses this: {said}")
        return UserError(f"MLflow ({self.shown}) does not answer: {said}. {_AGAIN}")


class MissingError(UserError):
    """MLflow has no model, version or run of this name."""


_AGAIN = "See that it runs and is not locked by another program; then run the command again."
