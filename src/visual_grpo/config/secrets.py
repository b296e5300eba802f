"""Secrets of rewards: an option names a variable of the environment, as in ``api_key: $JUDGE_KEY``.

Parameters are stored with every run, so the secret itself never stands in them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from visual_grpo.common.errors import UserError

_NAMES = re.compile(
    r"(^|[_.-])(secret|token|passw(or)?d|passphrase|(api|access|private|auth)[_-]?key|credentials?|auth|authorization"
    r"|bearer|cookie)($|[_.-])",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|[?&;](access_?|auth_?|api_?)?(token|key|sig|signature|secret|password)=", re.IGNORECASE
)
"""https://user:password@host and https://host/path?token=..."""
_VARIABLE = re.compile(r"((?:Bearer |Basic )?)\$([A-Za-z_]\w*)")
_PUBLIC_HEADERS = ("accept", "content-type", "user-agent")


def secret_options(options: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Names of the options whose text looks like a secret itself and not like the name of a variable."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from secret_options(value, name)
        elif isinstance(value, str) and value and not _VARIABLE.fullmatch(value):
            header = section.lower() in ("headers", "extra_headers") and name.lower() not in _PUBLIC_HEADERS
            if header or _NAMES.search(name) or _IN_ADDRESS.search(value):
                yield f"{section}.{name}" if section else name


def with_variables(value: Any, reward: str) -> Any:
    """The options with the values of the variables that they name. Raises UserError: a variable is not set."""
    if isinstance(value, Mapping):
        return {name: with_variables(item, reward) for name, item in value.items()}
    found = _VARIABLE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return value
    if not os.environ.get(found[2]):
        raise UserError(
            f"reward {reward!r}: an option names the variable {value}, which the environment does not have:"
            f" export {found[2]}=..."
        )
    return found[1] + os.environ[found[2]]
