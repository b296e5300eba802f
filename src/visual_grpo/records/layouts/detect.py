"""Detects the layout of a folder or file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath

from visual_grpo.command import Command
from visual_grpo.errors import UserError, nearest_hint
from visual_grpo.records.files import is_left_out, walk
from visual_grpo.records.guard import ANYWHERE, Guard, special_kind
from visual_grpo.records.layouts import captions, image_folder, prompts_txt, records_jsonl, seg_zero
from visual_grpo.records.raw import Item

_MOST_NAMES = 100_000
"""Files of a folder without records that are looked at for the message."""


@dataclass(frozen=True)
class Layout:
    """A reader: finds its file or folder in a path, counts its records and reads them."""

    name: str
    looks_for: str
    find: Callable[[Path, Guard], Path | None]
    missing: Callable[[Path, Sequence[str]], str]
    count: Callable[[Path, Guard], int]
    read: Callable[[Path, Guard], Iterator[Item]]


LAYOUTS = {
    name: Layout(name, reader.LOOKS_FOR, reader.find, reader.missing, reader.count, reader.read)
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
    guard: Guard

    def count(self) -> int:
        """The approximate number of records: includes blank lines and comments."""
        return self.layout.count(self.path, self.guard)

    def items(self) -> Iterator[Item]:
        return self.layout.read(self.path, self.guard)


def find_records(path: Path, layout: str = "auto", guard: Guard = ANYWHERE, parameter: str = "data.path") -> Found:
    """Finds the records at a path.

    Args:
        layout: a key of `LAYOUTS`, or ``auto`` for the first that fits.
        guard: what of the dataset may be opened.
        parameter: what names the path, for messages.

    Raises:
        UserError: the path does not exist, or no layout fits; lists what was looked for. Or the file with the records
            leads outside the data's folder.
    """
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        drawing = Command.now().without("data.path").of_pipeline("starter")
        raise UserError(
            f"{parameter}: there is no {path}.{nearest_hint(path.name, siblings)} Give a folder or file with records:"
            f" --params={parameter}=FOLDER."
            + (f" To draw the default dataset:\n{drawing}" if parameter == "data.path" else "")
        )
    candidates = list(LAYOUTS.values()) if layout == "auto" else [LAYOUTS[layout]]
    for candidate in candidates:
        if found := candidate.find(path, guard):
            if found != path:  # What the user has named may be a link.
                guard.require(found)
            return Found(candidate, found, guard)
    found_names = (name for name in walk(path, guard) if not is_left_out(name))
    names = sorted(islice(found_names, _MOST_NAMES)) if path.is_dir() else [path.name]
    tried = "".join(
        f"\n  {candidate.name}: {candidate.looks_for}; {candidate.missing(path, names)}" for candidate in candidates
    )
    raise UserError(
        f"{parameter}: no records found in {path}, which {_contents(path, names)}. Looked for, and missing:{tried}"
    )


def _contents(path: Path, names: Sequence[str]) -> str:
    if not path.is_dir():
        return f"is {special_kind(path) or 'a file'}"
    kinds = Counter(PurePath(name).suffix.lower() or "without suffix" for name in names)
    return "has " + (", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5)) or "no files")
