"""Processes of several machines that have joined the first one, and train with it until its command ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from visual_grpo.sharing.frames import Channel, Loan, send_json
from visual_grpo.sharing.worker import Build
from visual_grpo.sharing.workers import WorkerDiedError
from visual_grpo.threads import in_thread

CLOSED = getattr(select, "POLLRDHUP", 0)
"""What to ask `select.poll` for, so that it tells when the other end of a connection is gone."""
_LOOK = 200
"""Milliseconds between two looks at whether the watch is to end."""

_present: list[Crew] = []


def present() -> Crew | None:
    """The processes that have joined this one; None where no others were launched."""
    return _present[-1] if _present else None


@dataclass(frozen=True, kw_only=True)
class Member:
    """Who has joined."""

    rank: int
    host: str
    pid: int
    connection: Connection

    @property
    def where(self) -> str:
        return f"rank {self.rank} on {self.host}, pid {self.pid}"

    @property
    def how_it_ended(self) -> str:
        return (
            "is gone: it was killed, its machine is off, or the network between is interrupted. What it said, and how"
            f" it ended, is in the output of torchrun on {self.host}"
        )

    def shut(self) -> None:
        """Also wakes a thread that reads."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)


class Crew:
    """The members, by rank; a context in which they are watched, and at whose end they end.

    Satisfies ``workers.Source``. In the context the loss of a member raises `WorkerDiedError` in the main thread,
    whatever that does: it might wait for another member, or compute its own share, for a long time.
    """

    def __init__(self, members: Sequence[Member], here: int, host: str = "127.0.0.1") -> None:
        """
        Args:
            here: processes on this machine, this one among them.
            host: the name or address of this machine, for the members.
        """
        self.members, self.here, self.host = sorted(members, key=lambda own: own.rank), here, host
        self._over = threading.Event()
        self._known: set[int] = set()
        """Ranks of which somebody knows that they are gone."""

    @property
    def count(self) -> int:
        """Processes, this one among them."""
        return 1 + len(self.members)

    def start(self, number: int, build: Build, arguments: Mapping[str, Any]) -> Joined:
        """The ``number``-th process, which knows ``build`` by its name; the first is number 1."""
        return Joined(self, self.members[number - 2], build.__name__, arguments)

    def __enter__(self) -> Crew:
        _present.append(self)
        self._before = signal.signal(signal.SIGUSR1, self._raise)
        main = threading.get_ident()
        self._watcher = threading.Thread(target=self._watch, args=(main,), name="watch of the others", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._over.set()
        self._watcher.join()  # A signal that comes later would end this process.
        _present.remove(self)
        signal.signal(signal.SIGUSR1, self._before)
        # Where this one fails, all do: torchrun starts all again, or none.
        failed = error is not None and not (isinstance(error, SystemExit) and error.code in (0, None))
        for member in self.members:
            with suppress(OSError):
                send_json(member.connection, {"end": int(failed)})
            member.shut()

    def knows(self, member: Member) -> None:
        """Somebody raises an error because of it, or has given it up: it is not told again."""
        self._known.add(member.rank)

    @property
    def has_lost_one(self) -> bool:
        """Then its command ends."""
        return bool(self._known)

    def _watch(self, main: int) -> None:
        poll = select.poll()
        for member in self.members:
            poll.register(member.connection.fileno(), CLOSED)
        while not self._over.is_set():
            if poll.poll(_LOOK):
                signal.pthread_kill(main, signal.SIGUSR1)
                return

    def _raise(self, *_: object) -> None:
        poll = select.poll()
        for member in self.members:
            poll.register(member.connection.fileno(), CLOSED)
        gone = {number for number, _ in poll.poll(0)}
        for member in self.members:
            if member.connection.fileno() in gone and member.rank not in self._known and not self._over.is_set():
                self.knows(member)
                raise WorkerDiedError(f"Process {member.rank + 1} ({member.where}) {member.how_it_ended}.")


class Joined:
    """Satisfies ``workers.Process``: a member, for one training."""

    def __init__(self, crew: Crew, member: Member, build: str, arguments: Mapping[str, Any]) -> None:
        self._crew, self._member, self._loan = crew, member, Loan(member.connection)
        with suppress(OSError):  # It is gone: the first answer says so.
            send_json(member.connection, {"build": build, "arguments": arguments})

    @property
    def channel(self) -> Channel:
        return self._loan

    @property
    def pid(self) -> int:
        return self._member.pid

    @property
    def where(self) -> str:
        return self._member.where

    def end(self) -> None:
        with suppress(OSError):
            self._loan.close()

    def kill_after(self, deadline: float) -> None:
        """One that is busy for longer than that, or when another is gone, is given up; it ends when it sees so."""
        ended = in_thread(self._loan.skip, f"end of {self.where}")
        deadline = 0.0 if self._crew.has_lost_one else deadline
        try:
            ended.result(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, EOFError, OSError):
            self._crew.knows(self._member)
            self._member.shut()

    def exit_code(self, seconds: float) -> int | None:
        return None  # Its torchrun knows.

    def how_it_ended(self, seconds: float) -> str:
        self._crew.knows(self._member)
        return self._member.how_it_ended
