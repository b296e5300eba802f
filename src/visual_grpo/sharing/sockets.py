"""Connections between machines: authenticated by a common secret, and closed by the system when a machine vanishes.

The secret is never sent: each end shows by the HMAC of the other's random challenge that it has it
(`multiprocessing.connection`). What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from visual_grpo.errors import UserError

HANDSHAKE_SECONDS = 10
"""For which one end waits for the other one's next bytes until both have shown the secret."""
_IDLE, _INTERVAL, _PROBES = 5, 3, 4
"""Seconds without traffic until the system asks whether the other machine is there, between two questions, and how many
stay without an answer until the connection counts as lost: 17 s."""
_BACKLOG = 128


class WrongSecretError(Exception):
    """The other end has another secret."""


def listen(address: str, port: int) -> socket.socket:
    """Waits for connections.

    Args:
        address: "" = all of this machine's interfaces, of IPv4 and IPv6.
        port: 0 = any that is free.

    Raises:
        UserError: the port is in use, or the address is no one of this machine.
    """
    everywhere = address == "" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if everywhere or ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=everywhere)
    except OSError as error:
        taken = " Another program has it." if error.errno == errno.EADDRINUSE else ""
        raise UserError(
            f"cannot listen on {address or 'this machine'}, port {port}: {error.strerror}.{taken}"
        ) from error


def shake_hands(connected: socket.socket, secret: bytes, *, is_server: bool) -> Connection:
    """The connection, on which both ends have shown that they have ``secret``; else it is closed.

    Raises:
        WrongSecretError: the other end has another one.
        OSError, EOFError: the other end is gone, silent, or something else than a process of this project.
    """
    connected.settimeout(None)
    _keep_alive(connected)
    connection = Connection(connected.detach())
    try:
        with _impatient(connection):
            steps = (deliver_challenge, answer_challenge) if is_server else (answer_challenge, deliver_challenge)
            for step in steps:
                step(connection, secret)
    except AuthenticationError as error:
        connection.close()
        raise WrongSecretError from error
    except AssertionError as error:  # No challenge came: it is none of ours.
        connection.close()
        raise OSError("the other end speaks another protocol") from error
    except BaseException:
        connection.close()
        raise
    return connection


def dial(address: str, port: int, secret: bytes) -> Connection:
    """Connects to who listens there; raises as `shake_hands`."""
    return shake_hands(socket.create_connection((address, port), HANDSHAKE_SECONDS), secret, is_server=False)


def _keep_alive(connected: socket.socket) -> None:
    """A machine that is gone without a word is noticed: while nothing is sent, and while something is."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
    unanswered = 1000 * (_IDLE + _INTERVAL * _PROBES)  # In milliseconds.
    for option, value in (
        (idle, _IDLE),
        ("TCP_KEEPINTVL", _INTERVAL),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", unanswered),
    ):
        if hasattr(socket, option):  # Not every system has all of them.
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


@contextmanager
def _impatient(connection: Connection) -> Iterator[None]:
    """Reading raises OSError (EAGAIN) after `HANDSHAKE_SECONDS` without a byte: nobody is known yet."""
    _limit(connection, HANDSHAKE_SECONDS)
    yield
    _limit(connection, 0)


def _limit(connection: Connection, seconds: int) -> None:
    """0 = none."""
    same = socket.socket(fileno=os.dup(connection.fileno()))
    with same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
