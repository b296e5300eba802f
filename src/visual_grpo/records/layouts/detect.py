"""Detects the layout of a folder or file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from visual_grpo.errors import UserError
from visual_grpo.records.layouts import captions, image_folder, prompts_txt, records_jsonl, seg_zero
from visual_grpo.records.raw import Item


@dataclass(frozen=True)
class Layout:
    """A reader: finds its file or folder in a path, counts its records and reads them."""

    name: str
    looks_for: str
    find: Callable[[Path], Path | None]
    count: Callable[[Path], int]
    read: Callable[[Path], Iterator[Item]]


LAYOUTS = {
    name: Layout(name, reader.LOOKS_FOR, reader.find, reader.count, reader.read)
    for name, reader in (
        ("records", records_jsonl),
        ("prompts", prompts_txt),
        ("image_folder", image_folder),
        ("captions", captions),
        ("seg_zero", seg_zero),
    )
}
"""By name, in the order in which ``auto`` tries them."""


@dataclass(frozen=True)
class Found:
    """Records in a known layout."""

    layout: Layout
    path: Path
    """The file or folder that the layout reads."""

    def count(self) -> int:
        """The approximate number of records: includes blank lines and comments."""
        return self.layout.count(self.path)

    def items(self) -> Iterator[Item]:
        return self.layout.read(self.path)


def find_records(path: Path, layout: str = "auto") -> Found:
    """Finds the records at a path.

    Args:
        layout: a key of `LAYOUTS`, or ``auto`` for the first that fits.

    Raises:
        UserError: the path does not exist, or no layout fits; lists what was looked for.
    """
    if not path.exists():
        raise UserError(
            f"data.path: there is no {path}. Give a folder or file with records."
            " To draw the default dataset: kedro run --pipeline=starter"
        )
    candidates = list(LAYOUTS.values()) if layout == "auto" else [LAYOUTS[layout]]
    for candidate in candidates:
        if found := candidate.find(path):
            return Found(candidate, found)
    looked_for = "".join(f"\n  {candidate.name}: {candidate.looks_for}" for candidate in candidates)
    raise UserError(f"data.path: no records found in {path}. Looked for:{looked_for}")
