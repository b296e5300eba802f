"""One HTTP request: within its time, with an answer of limited size, never following a redirect."""

from __future__ import annotations

import asyncio
import email.utils
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from visual_grpo.errors import UserError
from visual_grpo.rewards.remote.faults import RequestError, of_status
from visual_grpo.visible_text import visible

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_SHOWN = 200
"""Characters of an answer that are shown in an error."""
_CHUNK = 65536


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where and how to ask."""

    url: str
    """The base address, such as http://127.0.0.1:8765."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    max_answer_bytes: int = 8_000_000

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UserError(f"url must be an address such as http://127.0.0.1:8765, got {shown(self.url)!r}")

    def at(self, path: str) -> str:
        """The address of ``path``, which begins with a slash."""
        return self.url.rstrip("/") + path

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine, where no proxy is to be asked."""
        host = urlsplit(self.url).hostname or ""
        return host == "localhost" or host == "::1" or host.startswith("127.")

    def session(self) -> ClientSession:
        """A session for one event loop; to be closed."""
        from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

        return ClientSession(
            connector=TCPConnector(limit=0),  # `asking` limits the requests.
            cookie_jar=DummyCookieJar(),
            headers={"Accept-Encoding": "identity", **self.headers},
            timeout=ClientTimeout(total=None),  # `exchange` has the time of each request.
            trust_env=not self.is_here,
        )


async def exchange(
    session: ClientSession, server: Server, method: str, path: str, *, body: bytes | None = None, seconds: float
) -> Any:
    """Sends one request and returns the JSON of its answer.

    Args:
        body: JSON.
        seconds: for everything, from connecting to the last byte.

    Raises:
        RequestError: no connection, no answer in time, an error status, an answer that is too large or is no JSON.
        RefusedError: a status that every request would get.
    """
    from aiohttp import ClientError

    url = shown(server.at(path))
    headers = {"Content-Type": "application/json"} if body is not None else {}
    try:
        async with (
            asyncio.timeout(seconds),
            session.request(method, server.at(path), data=body, headers=headers, allow_redirects=False) as response,
        ):
            content = await _content(response, server.max_answer_bytes, url)
            status, answered = response.status, response.headers
    except TimeoutError as error:
        raise RequestError(f"{url} did not answer within {seconds:.3g} s", again=True, by_sample=True) from error
    except (ClientError, OSError, EOFError) as error:
        raise _broken(url, error) from error
    failure = of_status(
        status,
        url,
        said(content),
        location=visible(answered.get("Location", "")[:_SHOWN]),
        after=seconds_to_wait(answered.get("Retry-After")),
    )
    if failure is not None:
        raise failure
    return _json(content, url)


def shown(url: str) -> str:
    """The address without user and password."""
    parts = urlsplit(url)
    return visible(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())


def said(content: bytes) -> str:
    """The start of an answer as one line."""
    text = " ".join(visible(content[: 4 * _SHOWN].decode("utf-8", "replace")).split())
    return text[:_SHOWN] + "..." * (len(text) > _SHOWN)


def seconds_to_wait(header: str | None) -> float | None:
    """What Retry-After says (RFC 9110, 10.2.3): seconds, or a date; None if it says nothing that can be used."""
    if not header:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        date = email.utils.parsedate_to_datetime(header)
    except (TypeError, ValueError, IndexError):
        return None
    return max(0.0, date.timestamp() - time.time())


async def _content(response: ClientResponse, most: int, url: str) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK):
        content += chunk
        if len(content) > most:
            raise RequestError(f"{url} answered with more than {most / 1e6:g} MB", by_sample=True)
    return bytes(content)


def _broken(url: str, error: Exception) -> RequestError:
    from aiohttp import ClientConnectorError, ClientResponseError

    if isinstance(error, ClientConnectorError):
        return RequestError(f"no connection to {url}: {said(str(error.os_error).encode())}", again=True)
    # The whole text of a ClientResponseError has the address with its password.
    what = error.message if isinstance(error, ClientResponseError) else str(error)
    reason = said(what.encode()) or type(error).__name__
    return RequestError(f"{url} broke off its answer: {reason}", again=True, by_sample=True)


def _json(content: bytes, url: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{url} did not answer with JSON: {said(content) or 'nothing'}", by_sample=True) from error
