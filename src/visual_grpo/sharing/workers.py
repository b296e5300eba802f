"""The first process's view of the others: it asks, they answer, and their errors are raised here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from visual_grpo.errors import UserError
from visual_grpo.hardware import shards
from visual_grpo.hardware.parallel import share_cores
from visual_grpo.sharing.frames import Channel
from visual_grpo.sharing.messages import Messages
from visual_grpo.sharing.spawned import Spawned
from visual_grpo.sharing.worker import MEETING, Build
from visual_grpo.types import Policy

_END = 10.0
"""Seconds that a process may take to end after it was asked to."""
_MOMENT = 1.0
"""Seconds between the end of a process's connections and its own."""


class WorkerDiedError(UserError):
    """A process is gone; what was whole before is not touched."""


class Process(Protocol):
    """Another process that has been given what to build, however it came to be: `Spawned` or `crew.Joined`."""

    @property
    def channel(self) -> Channel:
        """Its first message says whether it has built what it was given."""
        ...

    @property
    def pid(self) -> int: ...

    @property
    def where(self) -> str:
        """What tells it from the others, for messages."""
        ...

    def end(self) -> None:
        """Asks it to end what it does for this training; raises nothing where it is gone."""
        ...

    def kill_after(self, deadline: float) -> None:
        """Waits until it has, and kills it if it has not by ``deadline`` (of `time.monotonic`)."""
        ...

    def exit_code(self, seconds: float) -> int | None:
        """Of one that has ended, or does within so many; negative = by that signal. None where that is not known."""
        ...

    def how_it_ended(self, seconds: float) -> str:
        """ "was ended by SIGKILL" and the like; waits for its end so long."""
        ...


class Source(Protocol):
    """Where the other processes come from."""

    here: int
    """Processes on this machine, the first one among them."""
    host: str
    """The name or address of this machine, for the others."""

    def start(self, number: int, build: Build, arguments: Mapping[str, Any]) -> Process:
        """Gives the ``number``-th process what it builds; the first is number 1."""
        ...


class Spawning:
    """They are started on this machine."""

    def __init__(self, count: int) -> None:
        self.here, self.host = count, "127.0.0.1"

    def start(self, number: int, build: Build, arguments: Mapping[str, Any]) -> Process:
        return Spawned(number, self.here, build, arguments)


class Remote:
    """One other process, to which requests are sent."""

    def __init__(self, number: int, process: Process) -> None:
        """The ``number``-th."""
        self.number, self.process = number, process
        self._messages = Messages(process.channel)
        self._asked, self._read = 1, 0  # The start is the first.
        self._told: set[int] = {0}
        self._answers: dict[int, Any] = {}

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, do: str, **arguments: Any) -> int:
        """Begins something; `answer` gives what came of it for the number that this returns."""
        try:
            self._messages.send({"do": do, **arguments})
        except OSError as error:
            raise self._died() from error
        self._asked += 1
        return self._asked - 1

    def tell(self, do: str, **arguments: Any) -> None:
        """Begins something of which only an error is of interest; one of the next answers raises it."""
        self._told.add(self.ask(do, **arguments))

    def answer(self, number: int) -> Any:
        """Waits for the answer to a request.

        Raises:
            UserError: of the other process, at this request or one before.
            WorkerDiedError: it has ended.
            RuntimeError: anything else that went wrong in it, with its traceback.
        """
        while number not in self._answers:
            self._take()
        return self._answers.pop(number)

    def settle(self) -> None:
        """Waits until everything is done that was begun; raises as `answer` does."""
        while self._read < self._asked:
            self._take()

    def _take(self) -> None:
        try:
            got = self._messages.receive()
        except (EOFError, OSError) as error:
            raise self._died() from error
        number, self._read = self._read, self._read + 1
        if "answer" not in got:
            if got["expected"]:
                raise UserError(f"process {self.number}: {got['error']}")
            raise RuntimeError(f"process {self.number} failed:\n{got['error']}")
        if number in self._told:
            self._told.remove(number)
        else:
            self._answers[number] = got["answer"]

    def exit_code(self) -> int | None:
        """Of a process that has ended, or does within a moment; negative = by that signal."""
        return self.process.exit_code(_MOMENT)

    def why_gone(self) -> Exception:
        """Of a process that has ended: what it said of it, or that it did."""
        try:
            self.settle()
        except (UserError, RuntimeError) as error:
            return error
        return self._died()

    def _died(self) -> WorkerDiedError:
        return WorkerDiedError(
            f"Process {self.number} of this command ({self.process.where}) {self.process.how_it_ended(_END)}. The"
            " usual cause is too little memory: each process has the model (distributed.processes)."
        )


class Workers:
    """Processes 2 to ``count`` of a training; a context that ends them."""

    def __init__(
        self,
        count: int,
        build: Build,
        arguments: Sequence[Mapping[str, Any]],
        source: Source | None = None,
        *,
        sharded_on: str | None = None,
    ) -> None:
        """
        Args:
            arguments: of ``build``, for each of the ``count - 1`` other processes.
            source: where they come from; None = they are started on this machine.
            sharded_on: this process's device, where each has a part of the model only.
        """
        self.count, self.source = count, source or Spawning(count)
        self._meeting, self._device = None, torch.device(sharded_on or "cpu")
        if sharded_on is not None:
            self._meeting = shards.open_meeting(count, self.source.host)
            arguments = [{**own, MEETING: self._meeting.of(number)} for number, own in enumerate(arguments, 1)]
        self.others = [Remote(number, self.source.start(number, build, own)) for number, own in enumerate(arguments, 2)]
        self._policies: dict[str, Policy[Any]] = {}
        self._sent: dict[str, list[int]] = {}

    def __enter__(self) -> Workers:
        share_cores(self.source.here)
        if self._meeting is not None:
            try:
                shards.join(self._meeting, self._device, self._look)
            except BaseException:
                self._end()
                raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        codes = {other.number: other.exit_code() for other in self.others if isinstance(error, shards.LostPeerError)}
        gone = sorted((code, number) for number, code in codes.items() if code is not None)
        self._end()
        if gone:  # The one that was killed, or failed, before those that ended as it was gone.
            raise self.others[gone[0][1] - 2].why_gone() from error

    def _end(self) -> None:
        share_cores(1)
        for other in self.others:
            other.process.end()
        deadline = time.monotonic() + _END
        for other in self.others:
            other.process.kill_after(deadline)
        shards.leave()

    def _look(self) -> None:
        """Raises the error of a process that has ended before it could begin."""
        for other in self.others:
            if other.process.exit_code(0.0) is not None:
                raise other.why_gone()

    def wait_until_ready(self) -> None:
        """Raises UserError, RuntimeError or WorkerDiedError where a process could not build its model."""
        for other in self.others:
            other.settle()

    @contextmanager
    def together(self, busy: Iterable[Remote | None]) -> Iterator[None]:
        """For what this process computes while the ``busy`` ones do what they were asked for.

        Where each has a part of the model only, all hold out theirs until the last one is done.
        """
        self.have_lent(set(self.others).difference(busy))
        with shards.lending():
            yield

    def have_lent(self, idle: Iterable[Remote]) -> None:
        """Has those lend that were asked for nothing."""
        if shards.active():
            for other in idle:
                other.tell("lend")

    def follow(self, module: str, policy: Policy[Any]) -> None:
        """From now on `send_adapters` sends the adapter of ``policy``."""
        self._policies[module] = policy
        self._sent.pop(module, None)

    def send_adapters(self) -> None:
        """Whatever has changed since it was last sent."""
        changed = {}
        for module, policy in self._policies.items():
            versions = [parameter._version for parameter in policy.trainable_parameters()]
            if self._sent.get(module) != versions:
                changed[module] = policy.adapter_state_dict()
                self._sent[module] = versions
        if changed:
            for other in self.others:
                other.tell("load", adapters=changed)


def blocks(count: int, parts: int) -> list[tuple[int, int]]:
    """(start, number) of ``parts`` neighbouring blocks of ``count`` things, as even as they can be."""
    own, rest = divmod(count, parts)
    numbers = [own + (part < rest) for part in range(parts)]
    return [(sum(numbers[:part]), number) for part, number in enumerate(numbers)]
