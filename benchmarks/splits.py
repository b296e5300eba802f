"""Prints how small data sets are split: the table of docs/own_data.md.

.venv/bin/python -m benchmarks.splits
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import yaml

from visual_grpo.config import DataConfig, Task
from visual_grpo.data.record import Place, Record
from visual_grpo.data.splits import assign_splits, split_group

SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 30, 40)
SETS = 200
TASKS: dict[str, tuple[Task, Callable[[int], list[str]]]] = {
    "t2i": ("t2i", lambda number: []),
    "i2i": ("i2i", lambda number: [f"picture {number}"]),
    "mixed": ("mixed", lambda number: [f"picture {number}"] * (number % 2)),
    "videos": ("t2i", lambda number: []),
    "segmentation": ("segmentation", lambda number: [f"picture {number // 2}"]),
}
"""Kind -> its task, and the pictures of each record: two queries about a picture, or every record its own."""
SHOWN = {
    "prompts, edits, both, videos": ("i2i", "base"),
    "queries, two about each picture": ("segmentation", "base"),
    "`--env=wan_small`": ("videos", "wan_small"),
}
"""Column of the table -> kind and environment."""


def dataset(kind: str, count: int, number: int) -> list[tuple[str, str]]:
    """Returns group and id of each record of one data set; with another ``number`` all hashes are others."""
    task, pictures = TASKS[kind]
    found = []
    for n in range(count):
        record = Record(place=Place(""), folder=Path(), prompt=f"thing {n} of {number}")
        found.append((split_group(record, [f"{name} of {number}" for name in pictures(n)], task), f"{number}-{n}"))
    return found


def settings(kind: str, environment: str) -> DataConfig:
    """Returns the parameters ``data`` of an environment."""
    trees = [yaml.safe_load(Path(f"conf/{name}/parameters.yml").read_text()) for name in ("base", environment)]
    return DataConfig.model_validate(trees[0]["data"] | trees[1]["data"] | {"path": "x", "task": TASKS[kind][0]})


def ranges(kind: str, environment: str, count: int) -> str:
    """Returns train, eval and held-out records, each with its range over the data sets."""
    data, splits = settings(kind, environment), ("train", "eval", "held_out")
    found = [Counter(assign_splits(dataset(kind, count, number), data)) for number in range(SETS)]
    bounds = [(min(of), max(of)) for of in ([counts[name] for counts in found] for name in splits)]
    return " / ".join(str(low) if low == high else f"{low}-{high}" for low, high in bounds)


def main() -> None:
    print(f"| records | {' | '.join(SHOWN)} |\n{'|---' * (1 + len(SHOWN))}|")
    for count in SIZES:
        print(f"| {count} | {' | '.join(ranges(*shown, count) for shown in SHOWN.values())} |")


if __name__ == "__main__":
    main()
