"""Formulas without a network: LaTeX becomes MathML, which browsers draw themselves.

A formula stands in a ```math block, or between dollars in a line; GitHub draws both too.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)


def on_config(config: Any) -> Any:
    """Adds the kind of block to those of superfences."""
    fences = config["mdx_configs"].setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "formula", "format": as_mathml})
    return config


def as_mathml(source: str, *ignored: Any, **also_ignored: Any) -> str:
    """The block as HTML; each paragraph is one formula."""
    formulas = [part.strip() for part in source.split("\n\n") if part.strip()]
    return "".join(f'<div class="formula">{convert(formula, display="block")}</div>' for formula in formulas)


def on_page_content(content: str, **ignored: Any) -> str:
    """Converts what pymdownx.arithmatex has marked in the lines of a page."""
    return INLINE.sub(lambda match: convert(html.unescape(match[1])), content)
