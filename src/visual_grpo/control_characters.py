"""Control characters in text that others wrote: found in prompts, and made visible where text is shown.

A terminal obeys escape sequences (move the cursor, change its title, erase lines), and the overrides of writing
direction make a text read differently from what it is. Line breaks and tabs are text.
"""

from __future__ import annotations

import re
import unicodedata

_OVERRIDES = "\u202d\u202e"
"""LRO and RLO. The other direction marks occur in ordinary Arabic and Hebrew, joiners in ordinary emoji."""

_REFUSED = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f{_OVERRIDES}]")
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal may obey: also a carriage return, which writes over the line, and all embeddings of direction."""


def first_control_character(text: str) -> tuple[int, str] | None:
    """Index and name of the first control character that no text has; None if there is none.

    Refused are C0 and C1 control characters other than tab, line feed and carriage return, DEL, and the two overrides
    of writing direction.
    """
    found = _REFUSED.search(text)
    if found is None:
        return None
    name = unicodedata.name(found[0], "control character").lower()
    return found.start(), f"U+{ord(found[0]):04X} ({name})"


def visible(text: str) -> str:
    r"""The text with control characters, direction overrides and lone surrogates as escapes such as ``\x1b``."""
    shown = _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))
    return shown.encode("utf-8", "backslashreplace").decode()
