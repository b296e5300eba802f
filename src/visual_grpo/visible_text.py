"""Text that others wrote, as a terminal or a log may show it.

A terminal obeys escape sequences: they move the cursor, erase lines, change its title.
"""

from __future__ import annotations

import re

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal may obey: also a carriage return, which writes over the line, and all embeddings of direction."""


def visible(text: str) -> str:
    r"""The text with control characters, direction overrides and lone surrogates as escapes such as ``\x1b``."""
    shown = _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))
    return shown.encode("utf-8", "backslashreplace").decode()
