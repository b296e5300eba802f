"""The one exception for errors that a user can correct."""

from __future__ import annotations


class UserError(Exception):
    """Something outside the code is wrong: a parameter, a file, a record.

    The message says what was expected, what came, where, and what to do. ``kedro run`` shows it
    without a traceback and ends with exit code 1.
    """


def user_error(error: BaseException) -> UserError | None:
    """The first `UserError` among ``error`` and its causes: libraries wrap what they call in errors of their own."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if isinstance(cause, UserError):
            return cause
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return None
