"""The exception for errors that a user can correct, and helpers for messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class UserError(Exception):
    """Something outside the code is wrong: a parameter, a file, a record.

    The message says what was expected, what was received, where, and what to do. ``kedro run`` shows it
    without a traceback and exits with code 1.
    """


class LostRankError(UserError):
    """Another process of this command has ended, or does not answer."""


class CombinedError(UserError):
    """All problems in one message; a single problem is told alone."""

    def __init__(self, texts: Sequence[str], remedy: str = "") -> None:
        self.texts = list(texts)
        lines = self.texts
        if len(lines) > 1:
            numbered = (f"{number}. {text}" for number, text in enumerate(lines, 1))
            lines = [f"{len(lines)} things are wrong:", *numbered]
        super().__init__("\n".join([*lines, *filter(None, [remedy])]))


class Problems:
    """Collects user errors, so that all are reported at once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collects a `UserError` of the block instead of raising it."""
        try:
            yield
        except CombinedError as error:
            self.texts += error.texts
        except UserError as error:
            self.texts.append(str(error))

    def raise_if_any(self, remedy: str = "") -> None:
        """Raises one UserError with every collected problem; ``remedy`` is its last line."""
        if self.texts:
            # Two checks may find the same.
            raise CombinedError(list(dict.fromkeys(self.texts)), remedy)


def nearest_hint(wrong: str, candidates: Iterable[str]) -> str:
    """`` Did you mean 'grpo.steps'?`` for a misspelt name, to append to an error message; "" if no name is close."""
    near = nearest(wrong, candidates)
    return f" Did you mean {near!r}?" if near is not None else ""


def nearest(wrong: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate that ``wrong`` resembles most; None if none has a `difflib` ratio of at least ``cutoff``."""
    return next(iter(difflib.get_close_matches(wrong, candidates, n=1, cutoff=cutoff)), None)


def counted(number: int, what: str) -> str:
    """``1 picture``, ``2 pictures``, ``3 entries``."""
    if number == 1:
        return f"{number} {what}"
    return f"{number} {what[:-1]}ies" if what.endswith("y") else f"{number} {what}s"


def sentence(text: str) -> str:
    """``text`` with a full stop, unless it ends with a question, as `nearest_hint` does."""
    return text if text.endswith("?") else f"{text}."


def user_error(error: BaseException) -> UserError | None:
    """The first `UserError` among ``error`` and its causes: libraries wrap the errors of what they call."""
    return next((cause for cause in chain(error) if isinstance(cause, UserError)), None)


def chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, its cause, the cause's cause and so on."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        yield cause
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__


_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal acts on, with carriage returns and direction overrides."""


def sanitize(text: str) -> str:
    r"""The text with control characters, direction overrides and lone surrogates as escapes such as ``\x1b``."""
    shown = _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))
    return shown.encode("utf-8", "backslashreplace").decode()
