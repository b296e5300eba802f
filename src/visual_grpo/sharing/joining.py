"""How processes of several machines find together: the first one listens, the others connect and say who they are."""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

from visual_grpo.errors import UserError, counted
from visual_grpo.sharing.crew import Member
from visual_grpo.sharing.frames import receive_json, send_json
from visual_grpo.sharing.sockets import WrongSecretError, dial, shake_hands
from visual_grpo.threads import in_thread

_AGAIN = 0.3
"""Seconds between two attempts to connect."""


@dataclass(frozen=True)
class _Refused:
    """Somebody who connected and is no member."""

    address: str
    why: str


_Guest = Member | _Refused | UserError
"""Who has connected; the error is of one that will not work with this process."""


def gather(
    server: socket.socket, secret: bytes, facts: Mapping[str, str], *, ranks: set[int], seconds: float
) -> list[Member]:
    """Waits until all of ``ranks`` have joined; ``server`` is closed then.

    Args:
        facts: what must be the same everywhere, by name.

    Raises:
        UserError: one refuses to work with this process, or some do not come within ``seconds``.
    """
    came: queue.Queue[_Guest] = queue.Queue()
    in_thread(lambda: _accept_all(server, secret, facts, came), "accepting the others")
    members: dict[int, Member] = {}
    refused: list[str] = []
    deadline = time.monotonic() + seconds
    try:
        while ranks - members.keys():
            got = came.get(timeout=max(0.0, deadline - time.monotonic()))
            if isinstance(got, UserError):
                raise got
            if isinstance(got, _Refused):
                refused.append(f"{got.address} ({got.why})")
            elif got.rank in ranks:
                members[got.rank] = got
    except queue.Empty:
        raise _missing(ranks - members.keys(), seconds, server, refused) from None
    finally:
        # Closing alone would leave the thread in accept, and the port with it.
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()
    return list(members.values())


def join(
    address: Callable[[], tuple[str, int]],
    secret: Callable[[], bytes],
    facts: Mapping[str, str],
    *,
    rank: int,
    seconds: float,
) -> Connection:
    """Connects to the first process, again and again until it is there.

    Args:
        address: where it listens, as it was last told.
        facts: as `gather`'s.

    Raises:
        UserError: it has another secret or other facts, or cannot be reached within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = dial(*address(), secret())
            theirs = receive_json(connection)["facts"]
            break
        except WrongSecretError as error:
            raise UserError(
                f"the first process has another secret than rank {rank} on {socket.gethostname()}: set"
                " VISUAL_GRPO_SECRET to the same text on all hosts, where torchrun is called."
            ) from error
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"rank {rank} on {socket.gethostname()} cannot reach the first process within {seconds:g} s:"
                    f" {error}. Is its port open between the hosts (VISUAL_GRPO_PORT names a fixed one)? What the first"
                    " one says is in the output of torchrun on its host."
                ) from error
            time.sleep(_AGAIN)
    refuses = _difference(facts, theirs)
    send_json(connection, {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "refuses": refuses})
    if refuses is not None:
        raise UserError(refuses)
    return connection


def _accept_all(server: socket.socket, secret: bytes, facts: Mapping[str, str], came: queue.Queue[_Guest]) -> None:
    """Each in a thread of its own: one that connects and is silent holds up nobody."""
    while True:
        try:
            connected, address = server.accept()
        except OSError:  # It has been closed: all are there.
            return
        in_thread(partial(_greet, connected, address[0], secret, facts, came), "greeting")


def _greet(
    connected: socket.socket, address: str, secret: bytes, facts: Mapping[str, str], came: queue.Queue[_Guest]
) -> None:
    came.put(_met(connected, address, secret, facts))


def _met(connected: socket.socket, address: str, secret: bytes, facts: Mapping[str, str]) -> _Guest:
    try:
        connection = shake_hands(connected, secret, is_server=True)
        send_json(connection, {"facts": dict(facts)})
        said = receive_json(connection)
    except WrongSecretError:
        return _Refused(address, "another VISUAL_GRPO_SECRET")
    except (OSError, EOFError, ValueError) as error:
        return _Refused(address, str(error) or "it closed the connection")
    if said["refuses"] is not None:
        return UserError(f"rank {said['rank']}: {said['refuses']}")
    return Member(rank=said["rank"], host=said["host"], pid=said["pid"], connection=connection)


def _difference(own: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """What to tell where the facts differ."""
    names = [name for name in {**theirs, **own} if own.get(name) != theirs.get(name)]
    if not names:
        return None
    shown = ", ".join(f"{name} {own.get(name, 'none')} instead of {theirs.get(name, 'none')}" for name in names)
    return (
        f"{socket.gethostname()} differs from the first process's host: {shown}. Expected the same there, so that"
        " samples and gradients do not depend on who computes them: check out the same commit, install"
        " requirements.lock (make setup), and launch all with the same command."
    )


def _missing(ranks: set[int], seconds: float, server: socket.socket, refused: list[str]) -> UserError:
    named = ", ".join(str(rank) for rank in sorted(ranks))
    also = f" Refused: {', '.join(dict.fromkeys(refused))}." if refused else ""
    return UserError(
        f"{counted(len(ranks), 'rank')} of torchrun's did not connect within {seconds:g} s: {named}. Expected on"
        f" {socket.gethostname()}, port {server.getsockname()[1]}.{also} Look at the output of torchrun on their hosts,"
        " and at firewalls between (VISUAL_GRPO_PORT names a fixed port). VISUAL_GRPO_JOIN_SECONDS waits longer."
    )
