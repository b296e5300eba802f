"""Prints how far datasets are apart that should pass the data checks, or should not.

    .venv/bin/python -m benchmarks.data_drift

Draws the shapes and the words into a temporary folder and prepares them; about two minutes on two cores.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from examples.words.signs import draw_words
from visual_grpo.config import DataChecks, DataConfig
from visual_grpo.data.drift import Profile, check, drift, lost_share, profile_of
from visual_grpo.data.manifest import RecordTable, write_manifest
from visual_grpo.data.preparation import Preparation
from visual_grpo.starter.shapes.dataset import draw_dataset

Row = dict[str, Any]
SIDE = 128
HALVINGS = 20
GERMAN = {
    "a small": "ein kleiner",
    "a large": "ein großer",
    "red": "roter",
    "green": "grüner",
    "blue": "blauer",
    "yellow": "gelber",
    "purple": "violetter",
    "circle": "Kreis",
    "square": "Würfel",
    "triangle": "Dreieck",
    "on the left": "auf der linken Seite",
    "on the right": "auf der rechten Seite",
    "at the top": "oben im Bild",
    "at the bottom": "unten im Bild",
    "in the center": "in der Mitte",
}
CHINESE = {
    "a small": "小",
    "a large": "大",
    "red": "红色",
    "green": "绿色",
    "blue": "蓝色",
    "yellow": "黄色",
    "purple": "紫色",
    "circle": "圆形",
    "square": "正方形",
    "triangle": "三角形",
    "on the left": "在左边",
    "on the right": "在右边",
    "at the top": "在上面",
    "at the bottom": "在下面",
    "in the center": "在中间",
    " ": "",
}


def main() -> None:
    with TemporaryDirectory() as folder:
        columns = ["the data now", "kinds", "prompts", "images", "lost prompts", "the checks"]
        print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
        for name, pairs in cases(Path(folder)).items():
            print(line(name, [(before, now) for before, now in pairs]))


def cases(folder: Path) -> dict[str, Iterable[tuple[Profile, Profile]]]:
    shapes, again = (prepared(folder / f"shapes{seed}", shapes_into(seed)) for seed in (0, 1))
    words = prepared(folder / "words", lambda path: draw_words(path, 8, SIDE, SIDE))
    edits = prepared(folder / "edits", lambda path: draw_dataset(path, 8, SIDE, SIDE, 0, task="mixed"), "mixed")
    prompts = sorted({row["prompt"] for row in shapes.rows()})
    before = profile_of(shapes)

    def changed(name: str, change: Callable[[Row], Row | None], table: RecordTable = shapes) -> Profile:
        return profile_of(copied(table, name, change))

    def only(name: str, of: str, kept: set[str]) -> Profile:
        return changed(name, lambda row: row if row[of] in kept else None)

    def halves(name: str, of: str, keys: list[str]) -> Iterable[tuple[Profile, Profile]]:
        for number in range(HALVINGS):
            half = set(random.Random(number).sample(keys, len(keys) // 2))
            yield only(name, of, half), only(name, of, set(keys) - half)

    half = set(random.Random(0).sample(prompts, len(prompts) // 2))
    return {
        f"half of the records against the other half ({HALVINGS} halvings)": halves(
            "half", "id", [row["id"] for row in shapes.rows()]
        ),
        f"half of the prompts against the other half ({HALVINGS} halvings)": halves("half", "prompt", prompts),
        "drawn again with another seed": [(before, profile_of(again))],
        "words as a fifth of the records": [(before, profile_of(joined(folder, shapes, words, 300)))],
        "words as half of the records": [(before, profile_of(joined(folder, shapes, words, 1200)))],
        "words": [(before, profile_of(words))],
        "prompts in German": [(before, changed("german", translated(GERMAN)))],
        "prompts in Chinese": [(before, changed("chinese", translated(CHINESE)))],
        "pictures at 90% of their brightness": [(before, changed("dark90", darkened(0.9)))],
        "pictures at 60% of their brightness": [(before, changed("dark60", darkened(0.6)))],
        "half of the prompts gone": [(before, only("gone", "prompt", half))],
        "edits beside the prompts": [(before, profile_of(edits))],
    }


def line(name: str, pairs: Iterable[tuple[Profile, Profile]]) -> str:
    """The largest distances of several pairs."""
    largest: dict[str, float] = {}
    failed: set[str] = set()
    for before, now in pairs:
        for feature in drift(before, now):
            largest[feature.limit] = max(largest.get(feature.limit, 0.0), feature.distance)
        largest["lost"] = max(largest.get("lost", 0.0), lost_share(before, now))
        failed |= {fault.rpartition("retrain.data.")[2].rstrip(").") for fault in check(before, now, DataChecks())}
    drifts = [f"max_{what}_drift" for what in ("kind", "prompt", "image")]
    cells = [f"{largest[limit]:.2f}" for limit in drifts] + [f"{largest['lost']:.0%}"]
    verdict = "passes" if not failed else ", ".join(f"`{limit}`" for limit in sorted(failed))
    return f"| {' | '.join([name, *cells, verdict])} |"


def shapes_into(seed: int) -> Callable[[Path], object]:
    return lambda path: draw_dataset(path, 8, SIDE, SIDE, seed)


def prepared(folder: Path, draw: Callable[[Path], object], task: str = "t2i") -> RecordTable:
    draw(folder / "raw")
    config = {"path": str(folder / "raw"), "height": SIDE, "width": SIDE, "task": task}
    Preparation(DataConfig.model_validate(config)).write(folder / "records.parquet")
    return RecordTable(folder / "records.parquet")


def copied(table: RecordTable, name: str, change: Callable[[Row], Row | None]) -> RecordTable:
    """The records that ``change`` leaves, as it leaves them."""
    path = table.path.parent / f"{name}.parquet"
    write_manifest(path, (row for row in map(change, map(absolute(table), table.rows())) if row is not None))
    return RecordTable(path)


def joined(folder: Path, first: RecordTable, second: RecordTable, count: int) -> RecordTable:
    """All records of the first and ``count`` of the second."""
    rows = [*map(absolute(first), first.rows())]
    others = [*map(absolute(second), second.rows())]
    path = folder / f"joined{count}.parquet"
    write_manifest(path, rows + random.Random(0).sample(others, count))
    return RecordTable(path)


def absolute(table: RecordTable) -> Callable[[Row], Row]:
    def row_of(row: Row) -> Row:
        return row | {"target_image": str(table.path.parent / row["target_image"])}

    return row_of


def translated(words: Mapping[str, str]) -> Callable[[Row], Row]:
    def change(row: Row) -> Row:
        prompt = row["prompt"]
        for english, other in words.items():
            prompt = prompt.replace(english, other)
        return row | {"prompt": prompt}

    return change


def darkened(factor: float) -> Callable[[Row], Row]:
    def change(row: Row) -> Row:
        path = Path(row["target_image"])
        dark = path.with_name(f"dark{factor}-{path.name}")
        with Image.open(path) as image:
            image.point(lambda value: factor * value).save(dark)
        return row | {"target_image": str(dark), "target_sha256": dark.name}

    return change


if __name__ == "__main__":
    main()
