"""A server that rewards ask: its address and key, and how patiently it is asked."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from visual_grpo.errors import UserError
from visual_grpo.rewards.remote.asking import Asking, Patience
from visual_grpo.rewards.remote.background import completed
from visual_grpo.rewards.remote.breaker import CircuitBreaker
from visual_grpo.rewards.remote.faults import Lost, RequestError
from visual_grpo.rewards.remote.transport import Server, exchange

if TYPE_CHECKING:
    from aiohttp import ClientSession

T = TypeVar("T")

AskIn = Callable[["ClientSession", Sequence[int], float], Awaitable[Sequence[T | Lost]]]
"""(session, rows, seconds) -> one answer a row. Raises RequestError."""

TRANSPORT = frozenset({"timeout", "deadline", "retries", "concurrency", "stop_after", "api_key"})
"""Options of a reward that say how patiently its server is asked, and by whom: they decide no score."""
_CHECK_SECONDS = 5.0


class Service:
    """Asks one server; what fails for good in one call is remembered for the next by the circuit breaker."""

    def __init__(
        self,
        url: str,
        patience: Patience,
        *,
        stop_after: int,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(stop_after, int) or stop_after < 0:
            raise UserError(f"stop_after must be a whole number of at least 0, got {stop_after!r}")
        self.patience = patience
        self.server = Server(url=url, headers=_headers(headers, api_key))
        self.breaker = CircuitBreaker(stop_after)
        self.jitter = random.Random()  # Neither reads nor moves the random state of anything else.

    def ask(self, count: int, batch_size: int, ask: AskIn[T]) -> list[T | Lost]:
        """One answer, or why there is none, for each of ``count`` samples.

        Raises:
            RefusedError: no further request would help.
        """
        return completed(self._ask(count, batch_size, ask))

    async def _ask(self, count: int, batch_size: int, ask: AskIn[T]) -> list[T | Lost]:
        async with self.server.session() as session:

            async def bound(rows: Sequence[int], seconds: float) -> Sequence[T | Lost]:
                return await ask(session, rows, seconds)

            return await Asking(self.patience, self.breaker, self.jitter, bound).all(count, batch_size)

    def get(self, path: str, remedy: str) -> Any:
        """The JSON at ``path``, asked once and for a few seconds.

        Raises:
            UserError: no answer, with the remedy.
        """
        try:
            return completed(self._get(path))
        except RequestError as error:
            raise UserError(f"{error.reason}. {remedy}") from error

    async def _get(self, path: str) -> Any:
        async with self.server.session() as session:
            return await exchange(session, self.server, "GET", path, seconds=min(_CHECK_SECONDS, self.patience.timeout))


def _headers(headers: Mapping[str, str] | None, api_key: str | None) -> dict[str, str]:
    own = dict(headers or {})
    if api_key is not None:
        own["Authorization"] = f"Bearer {api_key}"
    for name, value in own.items():
        # Not shown: it may be a key.
        if not isinstance(value, str) or not isinstance(name, str) or not (name + value).isprintable():
            raise UserError(f"the header {str(name)!r} must be printable text")
    return own
