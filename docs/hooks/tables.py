"""Tables on a phone, and plots of measured differences.

On a narrow screen each row stands alone (style.css), so every cell carries the heading of its column. On a page of
experiments, a dot plot stands above each table with a column ``difference [95%]``; all of the page share an axis.
"""

from __future__ import annotations

import html
import re
from typing import Any

TABLE = re.compile(r"<table>.*?</table>", re.S)
DIFFERENCE = "difference [95%]"
INTERVAL = re.compile(r"([+-][\d.]+) \[([+-][\d.]+), ([+-][\d.]+)\]")
NAMES = ("data", "seed", "loop")
"""Columns that tell the rows of a plot apart."""

Point = tuple[str, float, float, float]
"""Name, difference, and both ends of its interval."""


def on_page_content(content: str, page: Any, **ignored: Any) -> str:
    """Labels the cells; on a page of experiments, puts a plot before each table of differences."""
    plots = page.file.src_uri.startswith("experiments/")
    points = [point for table in TABLE.findall(content) for point in _points(table)] if plots else []
    ends = [0.0, *(value for _, *values in points for value in values)]
    axis = (min(ends), max(ends))
    return TABLE.sub(lambda match: (_plot(_points(match[0]), axis) if plots else "") + _labelled(match[0]), content)


def _labelled(table: str) -> str:
    """Gives each cell its column's heading as ``data-label``."""
    labels = [html.escape(label, quote=True) for label in _cells(table, "th")]

    def row(match: re.Match[str]) -> str:
        names = iter(labels)
        return re.sub(r"<td", lambda cell: f'<td data-label="{next(names, "")}"', match[0])

    return re.sub(r"<tr>.*?</tr>", row, table, flags=re.S)


def _points(table: str) -> list[Point]:
    """Returns a point for each row with a difference; none for other tables."""
    labels = _cells(table, "th")
    if DIFFERENCE not in labels:
        return []
    rows = [dict(zip(labels[::-1], _cells(row, "td")[::-1], strict=True)) for row in table.split("<tr>")[2:]]
    found: list[Point] = []
    for row in rows:  # Of several columns of one name the first counts.
        name = ", ".join(f"seed {row[key]}" if key == "seed" else row[key] for key in NAMES if key in row)
        match = INTERVAL.fullmatch(row[DIFFERENCE])
        if match is None:
            raise ValueError(f"{row[DIFFERENCE]!r} is no difference with its interval")
        found.append((name, float(match[1]), float(match[2]), float(match[3])))
    return found


def _cells(row: str, kind: str) -> list[str]:
    cells = re.findall(rf"<{kind}[^>]*>(.*?)</{kind}>", row, re.S)
    return [html.unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in cells]


def _plot(points: list[Point], axis: tuple[float, float]) -> str:
    if not points:
        return ""

    def place(value: float) -> str:
        return f"{100 * (value - axis[0]) / (axis[1] - axis[0]):.1f}%"

    rows = "".join(
        f"<div><span>{html.escape(name)}</span><span class=track><i style='left:{place(0)}'></i>"
        f"<b style='left:{place(low)};right:calc(100% - {place(high)})'></b>"
        f"<em style='left:{place(at)}'></em></span></div>"
        for name, at, low, high in points
    )
    scale = f"<div class=scale><span></span><span>{axis[0]:.2g}</span><span>{axis[1]:+.2g}</span></div>"
    return f"<div class=dots role=img aria-label='{DIFFERENCE}, as in the table below'>{rows}{scale}</div>"
