"""The exception for errors that a user can correct, and helpers for messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Remedy:
    """A command that corrects an error; the command line prints it with the user's environment and parameters."""

    pipeline: str | None = None
    """Its name, or several with commas; None = the pipelines of the running command."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Dotted names and values to add; None leaves out what the user gave."""
    environment: str | None = None
    """An environment other than the user's."""
    make: str | None = None
    """A target of the Makefile instead of a pipeline."""


class UserError(Exception):
    """Something outside the code is wrong: a parameter, a file, a record.

    The message says what was expected, what was received, where, and what to do. ``kedro run`` shows it
    without a traceback, followed by the command of ``remedy`` (a text is a pipeline), and exits with ``exit_code``.
    """

    exit_code = 1

    def __init__(self, message: str, remedy: str | Remedy | None = None) -> None:
        super().__init__(message)
        self.remedy = Remedy(remedy) if isinstance(remedy, str) else remedy


class LostRankError(UserError):
    """Another process of this command has ended, or does not answer."""


class CombinedError(UserError):
    """All problems in one message; each keeps its remedy."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        super().__init__(numbered([str(error) for error in errors]))
        self.errors = list(errors)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors,), self.__dict__


def numbered(problems: Sequence[str]) -> str:
    """Lists problems in one text; a single problem stands alone."""
    if len(problems) == 1:
        return problems[0]
    lines = (f"{number}. {problem}" for number, problem in enumerate(problems, 1))
    return "\n".join([f"{len(problems)} things are wrong:", *lines])


class Problems:
    """Collects user errors, so that all are reported at once."""

    def __init__(self) -> None:
        self.errors: list[UserError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collects a `UserError` of the block instead of raising it."""
        try:
            yield
        except CombinedError as error:
            self.errors += error.errors
        except UserError as error:
            self.errors.append(error)

    def raise_if_any(self) -> None:
        if self.errors:
            # Two checks may find the same.
            raise CombinedError(list({str(error): error for error in self.errors}.values()))


def nearest_hint(wrong: str, candidates: Iterable[str]) -> str:
    """`` Did you mean 'grpo.steps'?`` for a misspelt name, to append to an error message; "" if no other is close."""
    near = nearest(wrong, candidates)
    return f" Did you mean {near!r}?" if near not in (None, wrong) else ""


def nearest(wrong: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate that ``wrong`` resembles most; None if none has a `difflib` ratio of at least ``cutoff``."""
    return next(iter(difflib.get_close_matches(wrong, candidates, n=1, cutoff=cutoff)), None)


def counted(number: int, what: str) -> str:
    """``1 picture``, ``2 pictures``, ``3 entries``."""
    if number == 1:
        return f"{number} {what}"
    return f"{number} {what[:-1]}ies" if what.endswith("y") else f"{number} {what}s"


def sentence(text: str) -> str:
    """``text`` with a full stop, unless it ends with one or with a question, as `nearest_hint` does."""
    return text if text.endswith((".", "?")) else f"{text}."


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
