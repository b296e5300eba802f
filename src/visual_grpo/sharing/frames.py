"""What travels over a connection that outlives the training which uses it: requests of one training after another.

Between two trainings a frame is a JSON object. Within one it is whatever the training sends, none of it empty: an empty
frame ends it, and is answered by one.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any, Protocol

_END = b""


class Channel(Protocol):
    """One end of a connection, as `messages.Messages` uses it; a `multiprocessing.connection.Connection` is one."""

    def send_bytes(self, buf: bytes, /) -> None: ...

    def recv_bytes(self) -> bytes: ...

    def close(self) -> None: ...


class TrainingEnded(Exception):  # noqa: N818
    """The other end has nothing more to ask for this training; the connection stays."""


class Loan:
    """The connection while one training has it; a `Channel`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send_bytes(self, buf: bytes, /) -> None:
        self._connection.send_bytes(buf)

    def recv_bytes(self) -> bytes:
        """Raises TrainingEnded at its end; EOFError or OSError where the connection is lost."""
        frame = self._connection.recv_bytes()
        if frame == _END:
            raise TrainingEnded
        return frame

    def close(self) -> None:
        """Ends the training, not the connection."""
        self._connection.send_bytes(_END)

    def skip(self) -> None:
        """Reads to its end; raises EOFError or OSError as `recv_bytes`."""
        while self._connection.recv_bytes() != _END:
            pass


def send_json(connection: Connection, value: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(value, ensure_ascii=False).encode())


def receive_json(connection: Connection) -> dict[str, Any]:
    """Raises EOFError or OSError where the connection is lost."""
    value: dict[str, Any] = json.loads(connection.recv_bytes())
    return value
