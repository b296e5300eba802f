"""Edits of several images, as other trainers and datasets lay them out, from the folder to the prepared record."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.making import data_config, jsonl, picture, prepare
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.common.images import read_image, read_size
from visual_grpo.operations.preflight.findings import look_at_folder

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
    [(name, task) for name in LAYOUTS for task in ("i2i", "mixed")],
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
        said = "1 source (such as control_2/99.png) not used: no target has its name"
        assert said in prepared.report["warnings"], "the other one of the target that is rejected has one"


def test_a_gap_in_the_numbers_of_a_folder_is_rejected(tmp_path: Path) -> None:
    captioned(tmp_path / "data", "source/{}_0.png", "source/{}_1.png")
    (tmp_path / "data/source/3_0.png").unlink()
    prepared = prepare(tmp_path, task="i2i")
    assert len(list(prepared)) == COUNT - 1
    assert "not numbered from 0 without a gap: source/3_1.png" in str(prepared.report)


def test_prompts_beside_sources_are_refused_and_the_file_is_read_where_it_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for number in range(2):
        picture(data / f"target_images/{number}.png", colour=(number, 90, 0))
    (data / "prompts.txt").write_text("put a hat on it\nput it on a hat\n")
    assert len(prepare(tmp_path)) == 2
    picture(data / "source_images/0.png")
    for task in ("t2i", "i2i"):
        with pytest.raises(UserError, match=r"source_images next to it has images to edit, .* records.jsonl"):
            prepare(tmp_path, task=task)
    assert len(prepare(tmp_path, path=data / "prompts.txt")) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_edits_are_no_prompts(layout: str, tmp_path: Path) -> None:
    """Whatever they lie in, where the task is forgotten."""
    LAYOUTS[layout](tmp_path / "data")
    with pytest.raises(UserError, match=r"there is a source image, .*, but data.task is t2i. Set data.task to i2i"):
        prepare(tmp_path)
    (problem,) = look_at_folder(data_config(tmp_path / "data"), ("t2i", "i2i")).problems
    assert str(problem).endswith("have a source_image, so they are edits, and data.task is t2i.")
    assert problem.remedy == Remedy(parameters={"data.task": "i2i"})


@pytest.mark.parametrize("task", ["t2i", "mixed"])
def test_pictures_with_captions_train_whatever_their_folder_is_called(task: str, tmp_path: Path) -> None:
    for name in ("input/0", "source/0"):
        picture(tmp_path / f"data/{name}.png", colour=(len(name), 90, 0)).with_suffix(".txt").write_text(name)
    picture(tmp_path / "data/input/1.png")
    prepared = prepare(tmp_path, task=task)
    assert [len(record.source_images) for record in prepared] == [0, 0]
    assert "input/1.png" in str(prepared.report["rejected"])


def test_a_mixed_folder_has_prompts_and_edits(tmp_path: Path) -> None:
    captioned(tmp_path / "data", "source/{}_1.png", "source/{}_2.png")
    for number in (0, 1):
        (tmp_path / f"data/source/3_{number + 1}.png").unlink()
    prepared = prepare(tmp_path, task="mixed")
    assert {record.prompt.split()[2]: len(record.source_images) for record in prepared} == {
        str(n): 0 if n == 3 else 2 for n in range(COUNT)
    }
    assert prepared.report["sources"] == {"0": 1, "2": COUNT - 1}


@pytest.mark.parametrize(
    ("targets", "sources", "edits", "said"),
    [
        (("cats/a", "dogs/a"), ("cats/a.png", "dogs/a.png"), {"cats/a": 1, "dogs/a": 1}, None),
        (("t/cats/a", "t/dogs/a"), ("cats/a.png", "dogs/a.png"), {"t/cats/a": 1, "t/dogs/a": 1}, None),
        (
            ("a",),
            ("a.bmp", "a.png"),
            {"a": 1},
            "1 source (such as source/a.png) not used: a different source has the same name",
        ),
        (("a", "a_2"), ("a_2.png",), {"a_2": 1}, "no image of the same name in source (a.png, .jpg, ...)"),
        (("a", "b"), ("a_1.png", "a_2.png", "b.png"), {"a": 2, "b": 1}, None),
        (("a", "b"), ("a_1.jpeg", "a_2.png", "b_01.png", "b_2.png"), {"a": 2, "b": 2}, None),
        (
            ("a", "b"),
            ("a.png", "a_1.png", "b.png"),
            {"b": 1},
            "source/a.png has no number, and source/a_1.png next to it has one",
        ),
        (("a", "a_1"), ("a.png", "a_1.png"), {"a": 1, "a_1": 1}, None),
        (
            ("a",),
            ("a_1.png", "a_2.png", "other_0.png"),
            {"a": 2},
            "1 source (such as source/other_0.png) not used: no target has its name",
        ),
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
        (
            ("source_image", "control_path_1", "control_path_2"),
            {},
            "source=[control_path_1,control_path_2,source_image]",
        ),
        (("control_path_1", "input_image_1"), {}, "nothing reads the pictures in the column input_image_1"),
        (("source", "reference_image"), {}, "data.columns.source=[source,reference_image]"),
        (("source", "input_image"), {}, "what is not wanted with data.columns.ignored=[input_image]"),
        (("source_image", "mask_img"), {"ignored": ["mask_img"]}, None),
        (("source_image", "control_path_1"), {"ignored": ["control_path_1"]}, None),
        (("source_image", "control_path_1"), {"source": ["control_path_1"]}, None),
    ],
)
def test_pictures_of_an_edit_that_nothing_reads_are_refused(
    columns: tuple[str, ...], choice: dict[str, list[str]], said: str | None, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    row = {"caption": "a", "image_path": "a.png"} | {column: f"{column}.png" for column in columns}
    for number, name in enumerate(list(row.values())[1:]):
        picture(data / name, colour=(number, 90, 0))
    jsonl(data / "list.jsonl", [row])
    for task in ("i2i", "mixed"):
        if said is None:
            assert [len(record.source_images) for record in prepare(tmp_path, task=task, columns=choice)] == [1]
        else:
            with pytest.raises(UserError, match=re.escape(said)):
                prepare(tmp_path, task=task)


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
