"""Asks a server about samples: in batches, several at a time, again where that can help, all within a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from visual_grpo.errors import UserError
from visual_grpo.rewards.remote.breaker import CircuitBreaker
from visual_grpo.rewards.remote.faults import Lost, RequestError

T = TypeVar("T")

Ask = Callable[[Sequence[int], float], Awaitable[Sequence[T | Lost]]]
"""(rows, seconds) -> one answer a row. Raises RequestError."""

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before the first retry, which double with every other one, up to the second."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long and how often a server is asked."""

    timeout: float = 60.0
    """Seconds for one request."""
    deadline: float = 600.0
    """Seconds for all requests of one call."""
    retries: int = 5
    concurrency: int = 4
    """Requests at a time."""

    def __post_init__(self) -> None:
        for name, least in (("timeout", 0), ("deadline", 0)):
            value = getattr(self, name)
            if not least < value < float("inf"):
                raise UserError(f"{name} must be a number of seconds above 0, got {value!r}")
        for name, lowest in (("retries", 0), ("concurrency", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < lowest:
                raise UserError(f"{name} must be a whole number of at least {lowest}, got {value!r}")


def wait_before(retry: int, jitter: random.Random) -> float:
    """Seconds before a retry (0 = the first): exponential, half of it random, so that clients do not come at once."""
    most = min(FIRST_WAIT * 2.0**retry, LONGEST_WAIT)
    return most * (0.5 + 0.5 * jitter.random())


@dataclass
class Asking(Generic[T]):
    """The requests of one call about samples 0 to ``count`` - 1; lives in one event loop."""

    patience: Patience
    breaker: CircuitBreaker
    jitter: random.Random
    ask: Ask[T]
    answers: dict[int, T | Lost] = field(default_factory=dict)
    over: bool = False
    """No more requests are to be sent."""

    async def all(self, count: int, batch_size: int) -> list[T | Lost]:
        """One answer, or the reason why there is none, for each sample in order.

        Raises:
            UserError: what the breaker or a refusal says.
        """
        self.free = asyncio.Semaphore(self.patience.concurrency)
        self.end = asyncio.get_running_loop().time() + self.patience.deadline
        batches = [range(start, min(start + batch_size, count)) for start in range(0, count, batch_size)]
        tasks = [asyncio.ensure_future(self._batch(rows)) for rows in batches]
        try:
            await asyncio.gather(*tasks)
        finally:
            self.over = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [self.answers[row] for row in range(count)]

    async def _batch(self, rows: Sequence[int]) -> None:
        try:
            await self._asked(rows)
        except UserError:
            self.over = True  # At once: another batch may be next in the queue.
            raise

    async def _asked(self, rows: Sequence[int]) -> None:
        try:
            answers = await self._answers(rows)
        except RequestError as error:
            if error.by_sample and len(rows) > 1:
                # Halves, so that one bad sample does not take the others along.
                middle = len(rows) // 2
                await self._asked(rows[:middle])
                await self._asked(rows[middle:])
                return
            if not error.late:
                self.breaker.failure(error.reason)
            answers = [Lost(error.reason)] * len(rows)
        else:
            self.breaker.success()
        self.answers.update(zip(rows, answers, strict=True))

    async def _answers(self, rows: Sequence[int]) -> Sequence[T | Lost]:
        for retry in range(self.patience.retries + 1):
            try:
                async with self.free:
                    if self.over:
                        raise asyncio.CancelledError
                    return await self.ask(rows, self._seconds())
            except RequestError as error:
                # Of a batch that one sample may spoil, the halves are the retry.
                if not error.again or retry == self.patience.retries or (error.by_sample and len(rows) > 1):
                    raise
                await self._wait(retry, error)
        raise AssertionError("the last retry returns or raises")

    def _seconds(self) -> float:
        left = self.end - asyncio.get_running_loop().time()
        if left <= 0:
            raise RequestError(f"the {self.patience.deadline:g} s for all requests of one call were over", late=True)
        return min(self.patience.timeout, left)

    async def _wait(self, retry: int, error: RequestError) -> None:
        seconds = wait_before(retry, self.jitter) if error.after is None else error.after
        left = self.end - asyncio.get_running_loop().time()
        if seconds > left:
            asked = f", and asks to wait {error.after:g} s" if error.after is not None else ""
            raise RequestError(f"{error.reason}{asked}; no time is left for another request ({left:.3g} s)", late=True)
        await asyncio.sleep(seconds)
