"""The first process's view of the others: it asks, they answer, and their errors are raised here."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from visual_grpo.errors import UserError
from visual_grpo.hardware import shards
from visual_grpo.hardware.parallel import share_cores
from visual_grpo.hardware.shards import Meeting
from visual_grpo.sharing.messages import Messages
from visual_grpo.sharing.worker import Build, work
from visual_grpo.types import Policy

_SPAWN = multiprocessing.get_context("spawn")
_END = 10.0
"""Seconds that a process may take to end after it was asked to."""
_MOMENT = 1.0
"""Seconds between the end of a process's connections and its own."""


class WorkerDiedError(RuntimeError):
    """A process is gone; what was whole before is not touched."""


class Remote:
    """One other process."""

    def __init__(
        self, number: int, count: int, build: Build, arguments: Mapping[str, Any], meeting: Meeting | None
    ) -> None:
        """The ``number``-th of ``count``."""
        self.number = number
        ours, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=work,
            args=(theirs, number, count, build, dict(arguments), meeting),
            name=f"training {number}",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self._messages = Messages(ours)
        self._asked, self._read = 1, 0  # The start is the first.
        self._told: set[int] = {0}
        self._answers: dict[int, Any] = {}

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, do: str, **arguments: Any) -> int:
        """Begins something; `answer` gives what came of it for the number that this returns."""
        try:
            self._messages.send({"do": do, **arguments})
        except OSError as error:
            raise self.died() from error
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
            raise self.died() from error
        number, self._read = self._read, self._read + 1
        if "answer" not in got:
            if got["expected"]:
                raise UserError(f"process {self.number}: {got['error']}")
            raise RuntimeError(f"process {self.number} of this training failed:\n{got['error']}")
        if number in self._told:
            self._told.remove(number)
        else:
            self._answers[number] = got["answer"]

    def is_gone(self) -> bool:
        """Whether it has ended, or does so within a moment."""
        self._process.join(_MOMENT)
        return not self._process.is_alive()

    def exit_code(self) -> int:
        """Of a process that has ended; negative = by that signal."""
        code = self._process.exitcode
        assert code is not None
        return code

    def why_gone(self) -> Exception:
        """Of a process that has ended: what it said of it, or that it did."""
        try:
            self.settle()
        except (UserError, RuntimeError) as error:
            return error
        return self.died()

    def end(self) -> None:
        """Asks it to end, and kills it if it does not."""
        self._messages.close()

    def kill_after(self, deadline: float) -> None:
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def died(self) -> WorkerDiedError:
        """The error of a process that has ended, or hangs."""
        self._process.join(_END)
        code = self._process.exitcode
        how = "hangs" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        return WorkerDiedError(
            f"Process {self.number} of this training (pid {self.pid}) {how}. The usual cause is too little memory: each"
            " process has the model (distributed.processes)."
        )


class Workers:
    """Processes 2 to ``count`` of a training; a context that ends them."""

    def __init__(
        self, count: int, build: Build, arguments: Sequence[Mapping[str, Any]], *, sharded_on: str | None = None
    ) -> None:
        """
        Args:
            arguments: of ``build``, for each of the ``count - 1`` other processes.
            sharded_on: this process's device, where each has a part of the model only.
        """
        self.count, self._sharded_on = count, sharded_on
        self._meeting = None if sharded_on is None else shards.open_meeting(count)
        self.others = [Remote(number, count, build, own, self._meeting) for number, own in enumerate(arguments, 2)]
        self._policies: dict[str, Policy[Any]] = {}
        self._sent: dict[str, list[int]] = {}

    def __enter__(self) -> Workers:
        share_cores(self.count)
        if self._meeting is not None:
            shards.join(self._meeting, 0, torch.device(self._sharded_on or "cpu"))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        share_cores(1)
        lost = isinstance(error, shards.LostPeerError)
        gone = sorted((other.exit_code(), other.number) for other in self.others if lost and other.is_gone())
        for other in self.others:
            other.end()
        deadline = time.monotonic() + _END
        for other in self.others:
            other.kill_after(deadline)
        shards.leave()
        if gone:  # The one that was killed, or failed, before those that ended as it was gone.
            raise self.others[gone[0][1] - 2].why_gone() from error

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
