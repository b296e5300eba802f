"""What can go wrong with a request, and what is to be done about it."""

from __future__ import annotations

from dataclasses import dataclass

from visual_grpo.errors import UserError


class RefusedError(UserError):
    """The server will refuse every request: another address, key or model is needed. The run stops."""


class RequestError(Exception):
    """A request that got no usable answer."""

    def __init__(
        self,
        reason: str,
        *,
        again: bool = False,
        by_sample: bool = False,
        after: float | None = None,
        late: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.again = again
        """The same request may have an answer later."""
        self.by_sample = by_sample
        """One of its samples may be the cause, so that the others are asked without it."""
        self.after = after
        """Seconds that the server asks to wait."""
        self.late = late
        """No time is left: this says nothing about the server."""


@dataclass(frozen=True)
class Lost:
    """What stands for the answer about a sample for which asking failed for good."""

    reason: str


_REFUSALS = {
    401: "set the option api_key, or headers",
    403: "set the option api_key, or headers",
    404: "the option url must be the server's base address, without the path of a request",
    405: "the option url must be the server's base address, without the path of a request",
    407: "the proxy asks for a password",
    410: "the server no longer has this address",
}
_ABOUT_A_SAMPLE = 500
"""A server's code failed; other statuses from 502 on say that the server itself cannot answer."""


def of_status(status: int, url: str, said: str, *, location: str = "", after: float | None = None) -> Exception | None:
    """The error for an HTTP status; None for success.

    Args:
        url: of the request, without a password.
        said: the start of the answer.
        location: where a redirect points.
        after: seconds that the answer asks to wait.
    """
    reason = f"{url} answered {status}{f': {said}' if said else ''}"
    if 200 <= status < 300:
        return None
    if 300 <= status < 400:
        to = f" to {location}" if location else ""
        return RefusedError(
            f"{url} redirects{to} ({status}). Redirects are not followed: set the option url to the right address"
        )
    if status in _REFUSALS:
        return RefusedError(f"{reason}. Every request would be refused: {_REFUSALS[status]}")
    if status in (408, 429):
        return RequestError(reason, again=True, after=after)
    if status < 500:
        return RequestError(reason, by_sample=True)
    return RequestError(reason, again=True, by_sample=status == _ABOUT_A_SAMPLE, after=after)
