"""Control characters that no prompt has: with them, a prompt shows another text than the model reads.

Line breaks and tabs are text.
"""

from __future__ import annotations

import re
import unicodedata

_OVERRIDES = "\u202d\u202e"
"""LRO and RLO. The other direction marks occur in ordinary Arabic and Hebrew, joiners in ordinary emoji."""

_REFUSED = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f{_OVERRIDES}]")


def first_control_character(text: str) -> tuple[int, str] | None:
    """Index and name of the first control character in a text; None if there is none.

    Meant are C0 and C1 control characters other than tab, line feed and carriage return, DEL, and the two overrides of
    writing direction.
    """
    found = _REFUSED.search(text)
    if found is None:
        return None
    name = unicodedata.name(found[0], "control character").lower()
    return found.start(), f"U+{ord(found[0]):04X} ({name})"
