"""Edits of several images, as other trainers and datasets lay them out, from the folder to the prepared record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.making import jsonl, picture, prepare
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import read_image, read_size

COUNT = 12
"""Enough records that both splits have some."""
RED, BLUE = (200, 30, 30), (30, 30, 200)


def captioned(data: Path, *sources: str) -> None:
    """Targets with captions, and sources under the same names; {} is the record's number."""
    for n in range(COUNT):
        picture(data / f"target/{n}.png", colour=(n, 90, 0)).with_suffix(".txt").write_text(f"put thing {n} on it")
        drawn(data, n, *sources)


def drawn(data: Path, n: int, first: str, second: str) -> list[str]:
    """A red source of the prepared size, and a blue one that is twice as wide as high."""
    for name, size, (red, green, blue) in ((first, (64, 32), RED), (second, (160, 80), BLUE)):
        picture(data / name.format(n), size, (red, green + n, blue))
    return [first.format(n), second.format(n)]


def rows(data: Path, *names: str, **known: str) -> list[dict[str, Any]]:
    """``names``: of the two columns of sources, or of one of lists; ``known``: those of prompt and target."""
    found = []
    for n in range(COUNT):
        sources = drawn(data, n, "in/{}.png", "in/{}-b.png")
        picture(data / f"out/{n}.png", colour=(n, 90, 0))
        columns: dict[str, Any] = dict(zip(names, sources if len(names) > 1 else [sources], strict=True))
        found.append({known["prompt"]: f"put thing {n} on it", known["target"]: f"out/{n}.png", **columns})
    return found


def control_path(data: Path) -> None:
    jsonl(data / "list.jsonl", rows(data, "control_path_0", "control_path_1", prompt="caption", target="image_path"))


def records(data: Path) -> None:
    jsonl(data / "records.jsonl", rows(data, "sources", prompt="prompt", target="target_image"))


LAYOUTS: dict[str, Callable[[Path], object]] = {
    "records.jsonl": records,
    "numbered columns": control_path,
    "a column of lists": lambda data: jsonl(
        data / "metadata.jsonl", rows(data, "edit_image", prompt="prompt", target="image")
    ),
    "a column of lists, instructed": lambda data: jsonl(
        data / "train.jsonl", rows(data, "input_images", prompt="instruction", target="output_image")
    ),
    "two folders of sources": lambda data: captioned(data, "control_1/{}.png", "control_2/{}.png"),
    "a folder of sources, one of references": lambda data: captioned(data, "source_images/{}.png", "reference/{}.png"),
    "two sources in a folder": lambda data: captioned(data, "source/{}_0.png", "source/{}_1.png"),
}


@pytest.mark.parametrize(
    ("layout", "task"),
    [(name, task) for name in LAYOUTS for task in ("i2i", "mixed") if task == "i2i" or "fold" not in name],
)
def test_both_sources_reach_the_record_in_their_order(layout: str, task: str, tmp_path: Path) -> None:
    LAYOUTS[layout](tmp_path / "data")
    prepared = list(prepare(tmp_path, task=task))
    assert len(prepared) == COUNT
    for record in prepared:
        first, second = record.source_images
        number = int(record.prompt.split()[2])
        assert read_image(first).getpixel((9, 9)) == (RED[0], RED[1] + number, RED[2])
        assert read_image(second).getpixel((9, 9)) == (BLUE[0], BLUE[1] + number, BLUE[2])
        assert record.metadata == {}


def test_the_first_source_is_cropped_and_the_others_keep_their_shape(tmp_path: Path) -> None:
    row = {"prompt": "a", "source_image": ["wide.png", "tall.png", "wide.png"]}
    picture(tmp_path / "data/wide.png", (400, 100), "blue")
    picture(tmp_path / "data/tall.png", (100, 400))
    jsonl(tmp_path / "data/records.jsonl", [row])
    (record,) = prepare(tmp_path, task="i2i", width=128, height=128)
    assert [read_size(path) for path in record.source_images] == [(128, 128), (64, 256), (256, 64)]


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("control_2/3.png", "there is no image of the same name in control_2"),
        ("control_1", "nothing says which one that is"),
    ],
)
def test_what_is_missing_is_said(missing: str, said: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    captioned(data, "control_1/{}.png", "control_2/{}.png")
    if missing == "control_1":
        (data / "control_1").rename(data / "first")
        (data / "control_2").rename(data / "second")
        with pytest.raises(UserError, match=said):
            prepare(tmp_path, task="i2i")
    else:
        (data / missing).unlink()
        picture(data / "control_2/99.png")
        prepared = prepare(tmp_path, task="i2i")
        assert len(list(prepared)) == COUNT - 1
        assert said in str(prepared.report)
        assert "2 sources without a target of the same name" in str(prepared.report["warnings"])


def test_a_gap_in_the_numbers_of_a_folder_is_rejected(tmp_path: Path) -> None:
    captioned(tmp_path / "data", "source/{}_0.png", "source/{}_1.png")
    (tmp_path / "data/source/3_0.png").unlink()
    prepared = prepare(tmp_path, task="i2i")
    assert len(list(prepared)) == COUNT - 1
    assert "not numbered from 0 without a gap: source/3_1.png" in str(prepared.report)


@pytest.mark.parametrize(
    ("targets", "sources", "edits", "said"),
    [
        (("cats/a", "dogs/a"), ("cats/a.png", "dogs/a.png"), {"cats/a": 1, "dogs/a": 1}, None),
        (("t/cats/a", "t/dogs/a"), ("cats/a.png", "dogs/a.png"), {"t/cats/a": 1, "t/dogs/a": 1}, None),
        (("a",), ("a.bmp", "a.png"), {"a": 1}, "1 source of the same name as another not used"),
        (("a", "a_2"), ("a_2.png",), {"a_2": 1}, "no image of the same name in source (a.png, .jpg, ...)"),
        (("a", "b"), ("a_1.png", "a_2.png", "b.png"), {"a": 2, "b": 1}, None),
    ],
)
def test_a_target_gets_the_sources_of_its_own_name(
    targets: tuple[str, ...], sources: tuple[str, ...], edits: dict[str, int], said: str | None, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    for number, target in enumerate(targets):
        picture(data / f"{target}.png", colour=(number, 90, 0)).with_suffix(".txt").write_text(target)
    for number, source in enumerate(sources):
        picture(data / "source" / source, colour=(50 * number, 0, 90))
    prepared = prepare(tmp_path, task="i2i")
    assert {record.prompt: len(record.source_images) for record in prepared} == edits
    assert said is None or said in str(prepared.report)


@pytest.mark.parametrize(
    ("columns", "choice", "said"),
    [
        (("source_image", "control_path_1", "control_path_2"), {}, r"data.columns.source=\[control_path_1,control_pa"),
        (("control_path_1", "input_image_1"), {}, r"also in input_image_1"),
        (("source_image", "control_path_1"), {"ignored": ["control_path_1"]}, None),
        (("source_image", "control_path_1"), {"source": ["control_path_1"]}, None),
    ],
)
def test_sources_in_two_kinds_of_columns_are_refused(
    columns: tuple[str, ...], choice: dict[str, list[str]], said: str | None, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    picture(data / "a.png")
    jsonl(data / "list.jsonl", [{"caption": "a", "image_path": "a.png", **dict.fromkeys(columns, "a.png")}])
    if said is None:
        assert [len(record.source_images) for record in prepare(tmp_path, task="i2i", columns=choice)] == [1]
    else:
        with pytest.raises(UserError, match=said):
            prepare(tmp_path, task="i2i")


@pytest.mark.parametrize("choice", [{}, {"source": ["control_path_1", "control_path_2"]}])
def test_a_gap_before_a_source_is_rejected(choice: dict[str, list[str]], tmp_path: Path) -> None:
    data = tmp_path / "data"
    picture(data / "a.png")
    row = {"caption": "a", "image_path": "a.png"}
    first, second = "control_path_1", "control_path_2"
    gaps = [(None, "a.png"), ("a.png", None), (None, None)]
    jsonl(data / "list.jsonl", [row | {first: one, second: other} for one, other in gaps])
    prepared = prepare(tmp_path, task="i2i", columns=choice)
    assert [len(record.source_images) for record in prepared] == [1]
    assert "control_path_1 is empty before a later source" in str(prepared.report)
    assert "there is no source_image" in str(prepared.report)
