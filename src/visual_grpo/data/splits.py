"""The splits that people's data come with, and those that records are trained and evaluated in.

The second follow from hashes of each record, and adding records moves hardly any other: those that show a new one's
picture, since then they are joined, and one or two where records are few, since then numbers are corrected.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

from visual_grpo.common.errors import UserError
from visual_grpo.config import DataConfig, Task
from visual_grpo.data.record import INVISIBLE, Record, Rejected

HELD_OUT = "held_out"
SEALED = "sealed"
"""The split that only promotions open: nothing else generates from, scores or shows its records."""
OPEN = ("train", "eval", HELD_OUT)
SPLITS = (*OPEN, SEALED)
ALL = "all"
"""``data.split`` of those who want the records of every split."""
FEW = 8
"""Records, or groups, from which each split with a share has some."""
LEAST_GROUPS = 2
"""Fewest groups that are held out, or sealed, if any are: a single one gives no interval."""
LUCK = 0.1
"""Largest difference between the share of records, or groups, in a split and the one asked for."""
_ROUNDING = 1e-9
_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Names of splits -> the usual one, as the library `datasets` recognises them."""
COLUMNS = frozenset({"split", "partition", "subset", "set", "fold"})
"""Names of a column with the record's split, in lower case; only values that are a split's name count."""

_WITHOUT_INVISIBLE = str.maketrans("", "", INVISIBLE)


def usual_name(name: object) -> str | None:
    """Returns ``train``, ``validation`` or ``test`` for a name of a split such as ``val`` or ``train2017``."""
    return _NAMES.get(re.sub(r"[-_]?\d*$", "", name.strip().lower())) if isinstance(name, str) else None


@lru_cache(1024)  # The same few files, for every record.
def split_in_path(path: str) -> str | None:
    """Returns the split that a folder (``images/val/1.png``) or a file (``train-00000.parquet``) is named after."""
    *folders, file = PurePosixPath(path.replace("\\", "/")).parts or ("",)
    named = [split for folder in folders if (split := usual_name(folder))]
    if named:
        return named[-1]
    words = {split for word in re.split(r"[^a-z]+", PurePosixPath(file).stem.lower()) if (split := _NAMES.get(word))}
    return words.pop() if len(words) == 1 else None


def split_of_row(row: Mapping[str, Any]) -> str | None:
    """Returns the split that a row names in one of `COLUMNS`."""
    named = (usual_name(value) for name, value in row.items() if name.lower() in COLUMNS)
    return next((split for split in named if split is not None), None)


def split_found(item: Record | Rejected, layout: str) -> str | None:
    """Returns the split that a record was found in, by a column, its file or its picture; None = none."""
    if item.split is not None:
        return item.split
    pictures: list[str] = []
    if isinstance(item, Record):
        if (named := split_of_row(item.extra)) is not None:
            return named
        names = [name for name in item.images if isinstance(name, str) and not name.startswith("/")]
        # The file's name says nothing: a picture may be called test.png.
        pictures = [f"{PurePosixPath(name).parent}/_" for name in names]
    # A folder of masks is named after a thing, and a picture is its own record's file.
    place = {"masks": "", "captions": f"{PurePosixPath(item.place.file).parent}/_"}.get(layout, item.place.file)
    return next((split for path in (place, *pictures) if (split := split_in_path(path)) is not None), None)


def chosen_splits(found: Collection[str | None], data: DataConfig) -> frozenset[str | None]:
    """Returns the splits to read among those that were found, None standing for records without one.

    By default records without a split and those of ``train``, else the only split; with ``data.held_out_split``, that
    one, too. Raises UserError if a split that was asked for is not there, or nothing says which of several to take.
    """
    if data.split == ALL or not found:
        return frozenset(found)
    held_out = frozenset[str | None]()
    if data.held_out_split is not None:
        held_out = _matching(found, data.held_out_split, "held_out_split", data)
    if data.split is not None:
        return held_out | _matching(found, data.split, "split", data)
    rest = frozenset(found) - held_out
    chosen = {split for split in rest if split is None or usual_name(split) == "train"}
    if not chosen and len(rest) != 1:
        raise UserError(f"{data.path} has {_listed(found)}: choose one with data.split, or data.split={ALL}.")
    return held_out | (chosen or rest)


def is_split(split: str | None, name: str | None) -> bool:
    """True if ``split``, as found in the data, is the one that a user calls ``name``."""
    return (
        name is not None and split is not None and (split == name or usual_name(split) == usual_name(name) is not None)
    )


def _matching(found: Collection[str | None], name: str, key: str, data: DataConfig) -> frozenset[str | None]:
    same = frozenset(split for split in found if is_split(split, name))
    if not same:
        raise UserError(f"data.{key}={name}: {data.path} has {_listed(found)}.")
    return same


def _listed(found: Iterable[str | None]) -> str:
    named = sorted(split for split in found if split is not None)
    return f"the splits {', '.join(named)}" if named else "no splits that its files, folders or a column split name"


def split_group(record: Record, source_sha256: Sequence[str], task: Task) -> str:
    """Returns the key of a checked record's group, which goes to held_out, or to sealed, together or not at all.

    The key is the record's ``group`` if it has one, else its prompt and the content of its original source images: few
    instructions serve many images, and holding out every "make it red" would hold out a skill. Queries about one image
    are held out together, whatever they ask.
    """
    if record.group is not None:
        return f"group\0{prompt_key(record.group)}"
    return "\0".join(["" if task == "segmentation" else prompt_key(record.prompt), *source_sha256])


def assign_splits(records: Sequence[tuple[str, str]], data: DataConfig) -> list[str]:
    """Returns the split of each record, in their order, given its group (`split_group`) and its id.

    The hashes alone decide as long as every share is met within `LUCK`, no split is too small (`split_size`) and no
    more records are held out than train.
    """
    # Where a split of the data is held out, no further record is.
    held_out_share = 0.0 if data.held_out_split else data.held_out_share
    rest = 1 - held_out_share - data.sealed_share
    sizes, total = Counter(group for group, _ in records), len(records)
    hashes = {group: _fraction("prompt", group) for group in sizes}
    for_eval = int(total >= fewest(data.eval_share, 1))

    # As many records train as are held out, unless the shares ask for more of these; one trains in any case.
    is_balanced = held_out_share <= rest - data.eval_share + _ROUNDING
    room = total * (1 - data.sealed_share) - for_eval
    held_out = _lowest(hashes, sizes, held_out_share, room / 2 if is_balanced else room - 1)
    number = sum(map(sizes.__getitem__, held_out))
    free = total - number - max(1, number if is_balanced else 0)
    # Held-out hashes are at one end of the range and sealed ones at the other, so that neither share takes from the
    # other when it is raised.
    others = {group: 1 - hashes[group] for group in sizes if group not in held_out}
    sealed = _lowest(others, sizes, data.sealed_share, free - for_eval)
    free -= sum(map(sizes.__getitem__, sealed))

    # eval_share is a share of all records, but only those neither held out nor sealed can get into eval.
    ids = {name: _fraction("id", name) for group, name in records if group not in held_out and group not in sealed}
    by_hash = sum(fraction < data.eval_share / rest for fraction in ids.values())
    number = min(split_size(by_hash, total, data.eval_share, 1), max(0, free))
    evaluation = set(sorted(ids, key=lambda name: (ids[name], name))[:number])
    return [
        HELD_OUT if group in held_out else SEALED if group in sealed else "eval" if name in evaluation else "train"
        for group, name in records
    ]


def _lowest(hashes: Mapping[str, float], sizes: Mapping[str, int], share: float, room: float) -> set[str]:
    """Chooses the groups with the lowest of ``hashes``, a share of all ``sizes``, with ``room`` for their records."""
    number = split_size(sum(fraction < share for fraction in hashes.values()), len(sizes), share, LEAST_GROUPS)
    ranked = sorted(hashes, key=lambda group: (hashes[group], group))
    chosen = _fitting(ranked, sizes, number, room)
    if len(chosen) < min(number, LEAST_GROUPS):  # The first has most of the room.
        chosen = _fitting(sorted(ranked, key=sizes.__getitem__), sizes, LEAST_GROUPS, room)
    return chosen


def _fitting(ranked: Sequence[str], sizes: Mapping[str, int], number: int, room: float) -> set[str]:
    """Takes groups in their order, up to ``number``, and passes over those that have more records than ``room``."""
    chosen = set[str]()
    for group in ranked:
        if len(chosen) < number and sizes[group] <= room:
            chosen.add(group)
            room -= sizes[group]
    return chosen


def split_size(by_hash: int, of: int, share: float, least: int) -> int:
    """Returns how many ``of`` records or groups are in a split with this share, where hashes give ``by_hash``.

    It is 0 if there are not the `fewest`, else at least ``least``, and within `LUCK` of the share.
    """
    if of < fewest(share, least):
        return 0
    low, high = (of * (share + luck) for luck in (-LUCK, LUCK))
    return min(max(by_hash, math.ceil(low - _ROUNDING), least), max(math.floor(high + _ROUNDING), least))


def fewest(share: float, least: int = LEAST_GROUPS) -> float:
    """Returns the fewest records or groups of which a split takes ``least``: `FEW`, or what the share asks for."""
    return min(FEW, math.ceil(least / share - _ROUNDING)) if share > 0 else math.inf


class Groups:
    """Joins the groups that show the same picture, so that none is on both sides; a picture is known by its content.

    A group that is given is joined with no other. It is held out if one of its records shares its prompt or a picture
    with one that is.
    """

    def __init__(self, *, holds_out: bool = False) -> None:
        """``holds_out``: whether records will be held out."""
        self._holds_out = holds_out
        self._parents: dict[str, str] = {}
        self._first: dict[str, str] = {}
        """Content -> the first group without a given name that shows it."""
        self._all: dict[str, set[str]] = {}
        """Content -> all groups that show it, if some is held out."""
        self._held_out: set[str] = set()
        """Content that is held out."""

    def add(self, key: str, contents: Sequence[str], *, held_out: bool = False) -> None:
        """``contents``: the group that the record has if none is given, and digests of its pictures."""
        self._parents.setdefault(key, key)
        for content in contents:
            if key in contents:
                first, other = sorted((self.of(key), self.of(self._first.setdefault(content, key))))
                self._parents[other] = first
            if self._holds_out:
                self._all.setdefault(content, set()).add(key)
        if held_out:
            self._held_out.update(contents)

    def of(self, key: str) -> str:
        """Returns the first key, in the order of text, of the joined groups."""
        while (parent := self._parents[key]) != key:
            self._parents[key] = key = self._parents[parent]
        return key

    @property
    def joined(self) -> int:
        """Number of groups that have joined a different one."""
        return sum(key != parent for key, parent in self._parents.items())

    def held_out(self) -> set[str]:
        """Returns `of` the groups with a record that shares a prompt or a picture with ``data.held_out_split``."""
        return {self.of(key) for content in self._held_out for key in self._all[content]}


def prompt_key(prompt: str) -> str:
    """Normalises a prompt: case, white space, what is invisible and Unicode's compatibility forms do not matter."""
    return " ".join(unicodedata.normalize("NFKC", prompt).translate(_WITHOUT_INVISIBLE).casefold().split())


def _fraction(kind: str, text: str) -> float:
    """Returns a number in [0, 1), uniform over texts: the first 53 bits of a sha256 hash."""
    digest = hashlib.sha256(f"{kind}\0{text}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53
