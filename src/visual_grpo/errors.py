"""The one exception for mistakes that a user can mend."""

from __future__ import annotations


class UserError(Exception):
    """Something outside the code is wrong: a parameter, a file, a record.

    The message says what was expected, what came, where, and what to do. ``kedro run`` shows it
    without a traceback and ends with exit code 1.
    """
