"""Asks a server about samples over HTTP: in batches, several at a time, with retries, within a deadline.

A judge is asked in the same way, not by the package openai: that ends no request whose bytes keep coming, reads answers
of any length, takes any JSON for an answer, and follows redirects.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

import torch
from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientResponseError,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
)
from PIL import Image

from visual_grpo.common.device import in_thread
from visual_grpo.common.errors import UserError, sanitize
from visual_grpo.common.images import to_base64
from visual_grpo.common.types import RewardOutput
from visual_grpo.rewards.catalogue import TRANSPORT

log = logging.getLogger(__name__)

Body = Callable[[Sequence[int]], bytes]
"""JSON that asks about the samples of these indices."""
Read = Callable[[Any, Sequence[int]], Sequence[Any]]
"""Turns the JSON of an answer into one entry per index; raises `RequestError`."""

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before the first retry, which double with each retry, and the most seconds."""
_CHECK_SECONDS = 5.0
SILENCE = 15.0
"""Seconds without an answer after which the user is told; the user is told again after twice as many, and so on."""
_SHOWN = 200
"""Characters of an answer that are shown in an error."""
_CHUNK, _MOST_BYTES = 65_536, 8_000_000

_REFUSALS = {
    **dict.fromkeys((401, 403), "set the option api_key, or headers"),
    **dict.fromkeys((404, 405), "the option url must be the server's base address, without the path of a request"),
}


class ServerRefusedError(UserError):
    """The server would refuse every further request; the run stops."""


@dataclass(eq=False)
class RequestError(Exception):
    """A request without a usable answer, or a sample for which asking failed for good."""

    reason: str
    _: KW_ONLY
    again: bool = False
    """The same request may succeed later."""
    by_sample: bool = False
    """One of the samples may be the cause: the batch is asked in halves."""
    after: float | None = None
    """Seconds that the server asks to wait."""


class ScoredSample(NamedTuple):
    """The judgement of one sample."""

    value: float
    """NaN = the server cannot judge it."""
    parts: Mapping[str, float] = MappingProxyType({})


@dataclass(eq=False)
class ServerReward:
    """A reward that a server computes: the options by which it is asked, and asking.

    Args:
        url: the server's base address, such as http://127.0.0.1:8765.
        timeout: seconds for one request, from connecting to the last byte.
        deadline: seconds for all requests about one batch of samples, with their retries.
        retries: further attempts after a failure that may pass.
        concurrency: requests at a time.
        stop_after: requests in a row that may fail for good before the run stops; 0 = any number.
        headers: of every request.
        api_key: sent as ``Authorization: Bearer``.
        image_format: ``png`` (exact) or ``jpeg`` (quality 95, no colour subsampling): smaller and sooner encoded.
        image_size: pixels of the longer side, to which larger images are scaled down (Lanczos); null = as they are.
    """

    waits: ClassVar[bool] = True
    transport: ClassVar[frozenset[str]] = TRANSPORT

    url: str = "http://127.0.0.1:8765"
    _: KW_ONLY
    timeout: float = 60.0
    deadline: float = 600.0
    retries: int = 5
    concurrency: int = 4
    stop_after: int = 5
    headers: Mapping[str, str] | None = None
    api_key: str | None = None
    image_format: str = "png"
    image_size: int | None = None
    failed: int = field(init=False, default=0)
    """Requests that failed for good since the last answer, over all calls."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UserError(f"url must be an address such as http://127.0.0.1:8765, got {shown(self.url)!r}")
        for name in ("timeout", "deadline"):
            if not 0 < (seconds := getattr(self, name)) < float("inf"):
                raise UserError(f"{name} must be a number of seconds above 0, got {seconds!r}")
        for name, least in (("retries", 0), ("concurrency", 1), ("stop_after", 0)):
            check_whole_number(name, getattr(self, name), least)
        if self.image_format not in ("png", "jpeg"):
            raise UserError(f"image_format must be png or jpeg, got {self.image_format!r}")
        if self.image_size is not None:
            check_whole_number("image_size", self.image_size, 1)
        self.url = self.url.rstrip("/")
        self._is_local = parts.hostname in ("localhost", "::1") or parts.hostname.startswith("127.")
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        self._headers = {**(self.headers or {}), **key}
        for name, value in self._headers.items():
            # The value may be a key: it is not shown.
            if not isinstance(value, str) or not isinstance(name, str) or not (name + value).isprintable():
                raise UserError(f"the header {str(name)!r} must be printable text")
        logins = {"url": "@" in parts.netloc, "api_key": self.api_key is not None}
        logins["headers"] = "authorization" in map(str.lower, self.headers or {})
        if sum(logins.values()) > 1:
            given = " and ".join(option for option, given in logins.items() if given)
            raise UserError(f"{given} each authenticate the requests to {shown(self.url)}; keep one of them")

    def ask(self, path: str, count: int, batch_size: int, body: Body, read: Read) -> list[Any]:
        """Returns an answer or a `RequestError` for each of ``count`` samples. Raises ServerRefusedError."""
        return _run(self._ask(path, count, batch_size, body, read))

    async def _ask(self, path: str, count: int, batch_size: int, body: Body, read: Read) -> list[Any]:
        pending = deque(range(start, min(start + batch_size, count)) for start in range(0, count, batch_size))
        answers: dict[int, Any] = {}

        async def work(session: ClientSession) -> None:
            while pending:
                rows = pending.popleft()
                try:
                    replies = await self._retried(session, path, rows, body, read)
                except RequestError as error:
                    if error.by_sample and len(rows) > 1:  # One bad sample must not fail the rest.
                        middle = len(rows) // 2
                        pending.extendleft((rows[middle:], rows[:middle]))
                        continue
                    self._count_failure(error.reason)
                    replies = [error] * len(rows)
                else:
                    self.failed = 0
                answers.update(zip(rows, replies, strict=True))

        async with self._session() as session:
            telling = asyncio.create_task(self._tell_of_silence(path, answers, count))
            try:
                async with asyncio.timeout(self.deadline), asyncio.TaskGroup() as workers:
                    for _ in range(self.concurrency):
                        workers.create_task(work(session))
            except TimeoutError:  # Says nothing about the server: it does not count towards `stop_after`.
                pass
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            finally:
                telling.cancel()
        late = RequestError(f"the {self.deadline:g} s allowed for all requests of one call have passed")
        return [answers.get(row, late) for row in range(count)]

    async def _tell_of_silence(self, path: str, answers: Mapping[int, Any], count: int) -> None:
        wait, silent = SILENCE, 0.0
        while True:
            known = len(answers)
            await asyncio.sleep(wait)
            silent = silent + wait if len(answers) == known else 0.0
            if silent:
                log.warning(
                    "%s has not answered for %g s, with %s of %s samples judged; a request is waited for %g s, all of"
                    " them %g s (the reward's options timeout and deadline)",
                    *(shown(self.url + path), silent, known, count, self.timeout, self.deadline),
                )
                wait *= 2

    async def _retried(
        self, session: ClientSession, path: str, rows: Sequence[int], body: Body, read: Read
    ) -> Sequence[Any]:
        content = body(rows)
        attempt = 0
        while True:
            try:
                return read(await self._exchange(session, path, content, self.timeout), rows)
            except RequestError as error:
                wait = min(FIRST_WAIT * 2.0**attempt, LONGEST_WAIT) if error.after is None else error.after
                # For a batch that one sample may spoil, its halves are the retry.
                spoilt = error.by_sample and len(rows) > 1
                if not error.again or attempt == self.retries or spoilt or wait > self.deadline:
                    raise
                await asyncio.sleep(wait)
                attempt += 1

    def _count_failure(self, reason: str) -> None:
        self.failed += 1
        if self.stop_after and self.failed >= self.stop_after:
            raise ServerRefusedError(
                f"{self.failed} requests in a row failed for good (stop_after: {self.stop_after}), so that no more are"
                f" sent. The last error: {reason}"
            )

    def encoded(self, image: Image.Image) -> str:
        return to_base64(image, self.image_format, self.image_size)

    def get(self, path: str, remedy: str) -> Any:
        """Returns the JSON at ``path``, asked once and for a few seconds. Raises UserError with the remedy."""

        async def ask() -> Any:
            async with self._session() as session:
                return await self._exchange(session, path, None, min(_CHECK_SECONDS, self.timeout))

        try:
            return _run(ask())
        except RequestError as error:
            raise UserError(f"{error.reason}. {remedy}") from error

    def _session(self) -> ClientSession:
        return ClientSession(
            connector=TCPConnector(limit=0),
            cookie_jar=DummyCookieJar(),
            headers={"Accept-Encoding": "identity", **self._headers},
            trust_env=not self._is_local,  # No proxy for this machine.
        )

    async def _exchange(self, session: ClientSession, path: str, body: bytes | None, seconds: float) -> Any:
        """Returns the JSON answer to a POST, or without a body to a GET. Raises RequestError, ServerRefusedError."""
        url = shown(self.url + path)
        method, headers = ("GET", {}) if body is None else ("POST", {"Content-Type": "application/json"})
        options: dict[str, Any] = {"allow_redirects": False, "timeout": ClientTimeout(total=seconds)}
        try:
            async with session.request(method, self.url + path, data=body, headers=headers, **options) as response:
                content = await _content(response, url)
        except TimeoutError as error:
            raise RequestError(f"{url} did not answer within {seconds:.3g} s", again=True, by_sample=True) from error
        except ClientConnectorError as error:
            raise RequestError(f"no connection to {url}: {_line(str(error.os_error))}", again=True) from error
        except (ClientError, OSError, EOFError) as error:
            # The whole text of a ClientResponseError has the address with its password.
            what = error.message if isinstance(error, ClientResponseError) else str(error)
            reason = f"{url} broke off its answer: {_line(what) or type(error).__name__}"
            raise RequestError(reason, again=True, by_sample=True) from error
        excerpt = _line(content.decode("utf-8", "replace"))
        _check_status(response, url, excerpt)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{url} did not answer with JSON: {excerpt or 'nothing'}", by_sample=True) from error


def check_whole_number(name: str, number: object, least: int) -> None:
    if not isinstance(number, int) or number < least:
        raise UserError(f"{name} must be a whole number of at least {least}, got {number!r}")


def _run(work: Any) -> Any:
    """Runs a coroutine in a thread with its own event loop: the caller's may have one that runs, as in a notebook."""
    return in_thread(lambda: asyncio.run(work), "remote-reward").result()


def shown(url: str) -> str:
    """The address without user and password."""
    parts = urlsplit(url)
    return sanitize(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())


def _line(answer: str) -> str:
    """The start of an answer as one line."""
    text = " ".join(sanitize(answer[: 4 * _SHOWN]).split())
    return text[:_SHOWN] + "..." * (len(text) > _SHOWN)


async def _content(response: ClientResponse, url: str) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK):
        content += chunk
        if len(content) > _MOST_BYTES:
            raise RequestError(f"{url} answered with more than {_MOST_BYTES / 1e6:g} MB", by_sample=True)
    return bytes(content)


def _check_status(response: ClientResponse, url: str, excerpt: str) -> None:
    """Raises the error for an HTTP status other than 2xx."""
    status = response.status
    reason = f"{url} answered {status}{f': {excerpt}' if excerpt else ''}"
    if 300 <= status < 400:
        to = sanitize(response.headers.get("Location", "?")[:_SHOWN])
        raise ServerRefusedError(
            f"{url} redirects to {to} ({status}). Redirects are not followed: set the option url to the right address"
        )
    if status in _REFUSALS:
        raise ServerRefusedError(f"{reason}. Every request would be refused: {_REFUSALS[status]}")
    if status >= 400:
        after = response.headers.get("Retry-After", "").strip()
        raise RequestError(
            reason,
            again=status in (408, 429) or status >= 500,
            # 500: the server's code failed, maybe on a sample; from 502 on the server itself cannot answer.
            by_sample=status <= 500 and status not in (408, 429),
            after=float(after) if after.isdecimal() else None,
        )


def reward_output(answers: Sequence[ScoredSample | RequestError]) -> RewardOutput:
    """Collects B answers into [B] tensors; a part that an answer lacks is NaN."""
    judged = [answer if isinstance(answer, ScoredSample) else ScoredSample(math.nan) for answer in answers]
    names = dict.fromkeys(name for answer in judged for name in answer.parts)
    return RewardOutput(
        values=torch.tensor([answer.value for answer in judged], dtype=torch.float32),
        parts={
            name: torch.tensor([answer.parts.get(name, math.nan) for answer in judged], dtype=torch.float32)
            for name in names
        },
        failed={row: answer.reason for row, answer in enumerate(answers) if isinstance(answer, RequestError)},
    )
