"""Datasets of other trainers and annotators: what cannot be used is refused for its own reason, the rest is used."""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from tests.data.clips import clip
from tests.data.making import data_config, jsonl, parquet, picture, prepare
from visual_grpo.common.errors import UserError
from visual_grpo.data.found import columns_line, files_line
from visual_grpo.data.manifest import RecordTable
from visual_grpo.operations.preflight.findings import OF_A_RECORD, look_at_folder

COUNT = 8
EDITS, QUERIES, CLIPS = {"task": "i2i"}, {"task": "segmentation"}, {"frames": 5, "fps": 8}


class Outcome(NamedTuple):
    said: str
    """Problems and notes, with what became of files and columns."""
    table: RecordTable | None
    remedies: list[Any]


def outcome(folder: Path, **changes: Any) -> Outcome:
    """Does what ``kedro run --pipeline=data_preparation`` does: looks at the records, and prepares them."""
    try:
        problems = look_at_folder(data_config(folder / "data", **changes), OF_A_RECORD[:2]).problems
    except UserError as error:
        problems = [error]
    if not problems:
        try:
            table = prepare(folder, **changes)
        except UserError as error:
            problems = [error]
        else:
            report = table.report
            rejected = (f"{one['message']}. {one['remedy']}" for one in report["rejected"]["listed"])
            lines = [files_line(report["files"]), columns_line(report["columns"]), *report["warnings"], *rejected]
            return Outcome("\n".join(lines), table, [])
    return Outcome("\n".join(map(str, problems)), None, [problem.remedy for problem in problems if problem.remedy])


def pictures(data: Path, pattern: str, blue: int = 60) -> list[str]:
    """Plain pictures of different colours; returns their names."""
    names = [pattern.format(n) for n in range(COUNT)]
    for n, name in enumerate(names):
        picture(data / name, colour=(20 * n, 90, blue))
    return names


def below(data: Path) -> list[str]:
    """Pictures in the folder ``images``, to which their names are relative."""
    return [name.removeprefix("images/") for name in pictures(data, "images/{}.png")]


def clips(data: Path, pattern: str) -> list[str]:
    names = [pattern.format(n) for n in range(COUNT)]
    for n, name in enumerate(names):
        clip(data / name, [15 * n + 9 * frame for frame in range(10)])
    return names


def captions(data: Path, names: list[str], text: str | bytes = "thing") -> None:
    for n, name in enumerate(names):
        content = text if isinstance(text, bytes) else f"{text} {n}".encode()
        (data / name).with_suffix(".txt").write_bytes(content)


def rows(data: Path, name: str, columns: dict[str, Any], prompt: str = "prompt") -> None:
    """``columns``: name -> a value for each row."""
    found = [
        {prompt: f"thing {n}", **dict(zip(columns, values, strict=True))}
        for n, values in enumerate(zip(*columns.values(), strict=True))
    ]
    data.mkdir(parents=True, exist_ok=True)
    if name.endswith(".parquet"):
        parquet(data / name, found)
    elif name.endswith(".json"):
        (data / name).write_text(json.dumps(found))
    else:
        jsonl(data / name, found)


def png(n: int, size: tuple[int, int] = (40, 40)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (20 * n, 90, 60)).save(file, "PNG")
    return file.getvalue()


def gbk(data: Path) -> None:
    captions(data, pictures(data, "{}.png"), "一张图片".encode("gbk"))


def too_long(data: Path) -> None:
    captions(data, pictures(data, "{}.png"), b"a cat " * 5000)


def with_control_character(data: Path) -> None:
    captions(data, pictures(data, "{}.png"), b"a \x1b[31mcat")


def empty_captions(data: Path) -> None:
    captions(data, pictures(data, "{}.png"), b" \n")


def input_prompt(data: Path) -> None:
    sources = [[name] for name in pictures(data, "in/{}.png")]
    columns = {"input_image": sources, "output_image": pictures(data, "out/{}.png")}
    rows(data, "editing.json", columns, prompt="input_prompt")


def missing_targets(data: Path) -> None:
    columns = {"original_image": pictures(data, "src/{}.png"), "edited_image": [f"out/{n}.png" for n in range(COUNT)]}
    rows(data, "metadata.jsonl", columns, prompt="edit_prompt")


def suffixed_controls(data: Path) -> None:
    captions(data, pictures(data, "target/{}.png"))
    pictures(data, "control/{}_control.png")


def links_outside(data: Path) -> None:
    names = pictures(data.parent / "private", "{}.png")
    data.mkdir()
    for name in names:
        (data / name).symlink_to(data.parent / "private" / name)
    captions(data, names)


def control_videos(data: Path) -> None:
    columns = {"file_path": clips(data, "train/{}.mp4"), "control_file_path": clips(data, "control/{}.mp4")}
    rows(data, "metadata.json", columns, prompt="text")


def lists_of_finetrainers(data: Path) -> None:
    names = clips(data, "videos/{}.mp4")
    (data / "prompts.txt").write_text("".join(f"thing {n}\n" for n in range(COUNT)))
    (data / "videos.txt").write_text("\n".join(names))


def clips_beside_prompts(data: Path) -> None:
    clips(data, "videos/{}.mp4")
    (data / "prompts.txt").write_text("".join(f"thing {n}\n" for n in range(COUNT)))


def pictures_beside_prompts(data: Path) -> None:
    pictures(data, "train/{}.png")
    (data / "prompts.txt").write_text("".join(f"thing {n}\n" for n in range(COUNT)))


def image_before_video(data: Path) -> None:
    rows(data, "train.json", {"image": pictures(data, "{}.png"), "video": clips(data, "{}.mp4")})


def clip_and_its_frames(data: Path) -> None:
    captions(data, clips(data, "{}.mp4"))
    clip(data / "0")


def embedded_clips(data: Path, suffix: str = ".mp4") -> None:
    files = [data / name for name in clips(data, "{}" + suffix)]
    rows(data, "train.parquet", {"video": [{"bytes": file.read_bytes(), "path": None} for file in files]})
    for file in files:
        file.unlink()


def frames_without_text(data: Path) -> None:
    captions(data, clips(data, "{}.mp4"))
    clip(data / "more")


def edited_videos(data: Path) -> None:
    rows(data, "a.jsonl", {f"{kind}_video": clips(data, kind + "/{}.mp4") for kind in ("source", "target")})


def text64(data: Path) -> None:
    rows(data, "train.jsonl", {"image": [base64.b64encode(png(n)).decode() for n in range(COUNT)]})


def large_cells(data: Path) -> None:
    data.mkdir()
    lines = [f"thing {n},{base64.b64encode(png(n) + bytes(150_000)).decode()}" for n in range(COUNT)]
    (data / "train.csv").write_text("\n".join(["prompt,image", *lines]))


def captions_beside_a_table(data: Path) -> None:
    names = pictures(data, "{}.png")
    captions(data, names, "short")
    rows(data, "list.jsonl", {"image": names}, prompt="long_caption")


def data_urls(data: Path) -> None:
    found = [{"url": f"data:image/png;base64,{base64.b64encode(png(n)).decode()}"} for n in range(COUNT)]
    rows(data, "train.jsonl", {"image_url": found})


def arrays(data: Path) -> None:
    rows(data, "train.parquet", {"image": [np.full((32, 32, 3), 20 * n, np.uint8).tolist() for n in range(COUNT)]})


def unknown_arrays(data: Path) -> None:
    rows(data, "train.parquet", {"photo": [np.full((32, 32, 3), 20 * n, np.uint8).tolist() for n in range(COUNT)]})


def fractions(data: Path) -> None:
    rows(data, "train.parquet", {"image": [np.full((32, 32, 3), n / 10).tolist() for n in range(COUNT)]})


def urls(column: str, end: str = "get?id={}") -> Callable[[Path], None]:
    return lambda data: rows(data, "a.json", {column: [f"https://example.org/{end.format(n)}" for n in range(COUNT)]})


def cells_of_csv(data: Path) -> None:
    first, second = pictures(data, "in/{}.png"), pictures(data, "ref/{}.png", 200)
    columns = {"source_image": [json.dumps(pair) for pair in zip(first, second, strict=True)]}
    columns["target_image"] = pictures(data, "out/{}.png", 120)
    lines = ["prompt;source_image;target_image"]
    lines += [f"thing {n};{source};{target}" for n, (source, target) in enumerate(zip(*columns.values(), strict=True))]
    (data / "list.csv").write_text("\n".join(lines))


def noun_phrases(data: Path, where: str = "annotations") -> None:
    size = {"width": 40, "height": 40}
    images = [{"id": n, "file_name": name, **size} for n, name in enumerate(pictures(data, "{}.png"))]
    square = {"category_id": 1, "segmentation": [[5, 5, 30, 5, 30, 30, 5, 30]]}
    annotations = [{"id": n, "image_id": n, **square} for n in range(COUNT)]
    key, entries = ("noun_phrase", annotations) if where == "annotations" else ("text_input", images)
    for n, entry in enumerate(entries):
        entry[key] = f"the red cup {n}"
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "object"}]}
    (data / "_annotations.coco.json").write_text(json.dumps(content))


def masks(data: Path, change: Callable[[Image.Image], Image.Image] = lambda mask: mask) -> None:
    pictures(data, "images/{}.png")
    (data / "masks/box").mkdir(parents=True)
    for n in range(COUNT):
        image = Image.new("L", (40, 40))
        image.paste(255, (5, 5, 30, 30))
        change(image).save(data / f"masks/box/{n}.png")


def two_masks(data: Path) -> None:
    masks(data)
    Image.new("L", (40, 40), 255).save(data / "masks/box/0.jpg")


def two_rows_of_a_query(data: Path) -> None:
    masks(data)
    names = [f"{n}.png" for n in (*range(COUNT), 0)]
    found = [{"query": "box", "image": f"images/{name}", "mask": f"masks/box/{name}"} for name in names]
    jsonl(data / "list.jsonl", found)


def referring(data: Path) -> None:
    masks(data)
    columns = {"image_path": "images/{}.png", "mask_path": "masks/box/{}.png"}
    found = {name: [pattern.format(n) for n in range(COUNT)] for name, pattern in columns.items()}
    rows(data, "list.jsonl", found, prompt="expression")


def faint(mask: Image.Image) -> Image.Image:
    overlay = Image.new("RGBA", mask.size, "red")
    overlay.putalpha(mask.point(lambda value: 100 * (value > 0)))
    return overlay


def of_a_different_machine(data: Path) -> None:
    names = pictures(data, "{}.png")
    rows(data, "metadata.jsonl", {"file_name": [f"/home/me/project/data/{name}" for name in names]}, prompt="text")


def lines_in_json(data: Path) -> None:
    names = pictures(data, "{}.png")
    jsonl(data / "train.json", [{"image": name, "prompt": f"thing {n}"} for n, name in enumerate(names)])


def tar(data: Path, names: list[str]) -> None:
    data.mkdir()
    with tarfile.open(data / "0.tar", "w") as archive:
        for name in names:
            stem, suffix = name.split(".")
            file = io.BytesIO()
            Image.new("RGB", (40, 40), (20 * int(stem), 90, 60)).save(file, {"jpg": "JPEG"}.get(suffix, "PNG"))
            texts = {"txt": f"thing {stem}", "json": json.dumps({"caption": f"thing {stem}"})}
            texts["caption"] = texts["txt"]
            content = texts[suffix].encode() if suffix in texts else file.getvalue()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def mixed_tar(data: Path) -> None:
    tar(data, [f"{n}.{suffix}" for n in range(COUNT) for suffix in (("png", "jpg")[n % 2], "txt")])


def plain_tar(data: Path) -> None:
    tar(data, [f"{n}.{suffix}" for suffix in ("png", "txt") for n in range(COUNT)])


def tar_of_json(data: Path) -> None:
    tar(data, [f"{n}.{suffix}" for n in range(COUNT) for suffix in ("jpg", "json")])


def tar_of_captions(data: Path) -> None:
    tar(data, [f"{n}.{suffix}" for n in range(COUNT) for suffix in ("jpg", "caption")])


def paths_of_pictures(data: Path) -> None:
    (data / "prompts.txt").write_text("\n".join(pictures(data, "train/{}.png")))


def captions_apart(data: Path) -> None:
    names = pictures(data, "images/{}.png")
    (data / "texts").mkdir()
    captions(data / "texts", [Path(name).name for name in names])


def repeats(data: Path) -> None:
    captions(data, pictures(data, "10_dog/{}.png"))


def marks(data: Path) -> None:
    names = pictures(data, "{}.png")
    texts = ["[trigger] cat", "a (red:1.3) cat", "<lora:ink:0.8> cat", "a __colour__ cat", "a cat --ar 3:2"]
    texts += ["a cat ||| red", "<image> a red cat", "cat &amp; dog, well--made (at 3:2), {red}, a_cat, [red] -- <b>"]
    for name, text in zip(names, texts, strict=True):
        (data / name).with_suffix(".txt").write_text(text)


def keyed_by_file(data: Path) -> None:
    names = pictures(data, "{}.png")
    (data / "meta_cap.json").write_text(json.dumps({name: {"caption": f"thing {n}"} for n, name in enumerate(names)}))


def broken_links(data: Path) -> None:
    names = pictures(data, "{}.png")
    captions(data, names)
    (data / names[0]).unlink()
    (data / names[0]).symlink_to("/tmp/nowhere/x.png")


def composed_captions(data: Path) -> None:
    for n in range(COUNT):
        picture(data / unicodedata.normalize("NFD", f"é{n}.png"), colour=(20 * n, 90, 60))
        (data / unicodedata.normalize("NFC", f"é{n}.txt")).write_text(f"thing {n}")


def wide_sources(data: Path) -> None:
    for n in range(COUNT):
        picture(data / f"source/{n}.png", (160, 90), (20 * n, 90, 60))
    captions(data, pictures(data, "target/{}.png"))


def has(text: str, wanted: str) -> bool:
    """``wanted``: parts in their order, with ``...`` between them."""
    at = 0
    return all((at := text.find(part, at)) >= 0 for part in wanted.split(" ... "))


USED = "used"
"""Every record has its target, and every file is used."""
CASES: list[tuple[Callable[[Path], None], dict[str, Any], str]] = [
    (gbk, {}, "the caption 0.txt cannot be read ('utf-8' codec"),
    (too_long, {}, "the prompt has 29,999 characters, more than 20,000"),
    (with_control_character, {}, "the prompt has the control character U+001B"),
    (empty_captions, {}, "0.png (id ... ): the prompt is empty"),
    (input_prompt, EDITS, "there is no prompt; the record has 'input_prompt'. ... data.columns.prompt"),
    (missing_targets, EDITS, "target_image 'out/0.png' does not exist"),
    (suffixed_controls, EDITS, "there is no image of the same name in control"),
    (links_outside, {}, "target_image '0.png' leads outside the data's folde"),
    *(
        (lambda data, column=column: rows(data, "a.jsonl", {column: clips(data, "c/{}.mp4")}), CLIPS, USED)
        for column in ("video_path", "media_path", "file_path", "video")
    ),
    (lambda data: rows(data, "a.jsonl", {"videos": [[name] for name in clips(data, "{}.mp4")]}), CLIPS, USED),
    (
        lambda data: rows(data, "a.jsonl", {"footage": clips(data, "{}.mp4")}),
        CLIPS,
        "nothing reads the videos in the column footage, and there is no target picture",
    ),
    (
        lambda data: rows(data, "a.jsonl", {"footage": clips(data, "{}.mp4")}),
        {},
        "nothing reads the videos in the column footage, ... Videos are read where data.frames says",
    ),
    (control_videos, CLIPS | EDITS, "source_image 'control/0.mp4' is a video, and a source is a picture"),
    (lists_of_finetrainers, CLIPS, USED),
    (clips_beside_prompts, CLIPS, "no record has a picture, and the data have 8 videos (such as videos/0.mp4)"),
    (image_before_video, CLIPS, "prompt -> prompt, video -> target, image -> metadata"),
    (image_before_video, CLIPS | EDITS, USED),
    (clip_and_its_frames, CLIPS, "ignored: 11 pictures in a folder with the name of a video that is used"),
    (embedded_clips, CLIPS, USED),
    (lambda data: embedded_clips(data, ".gif"), CLIPS, USED),
    (frames_without_text, CLIPS, "Write its prompt to more/0.txt or, if it is a frame of a video, ... to more.txt"),
    (edited_videos, CLIPS | EDITS, "the columns source_video, target_video, ... to edit cannot be a video"),
    (text64, {}, USED),
    (large_cells, {}, USED),
    (large_cells, {"max_file_mb": 0.14}, "a cell of line 2 has more than 196,000 characters. Close its quote, give"),
    (data_urls, {}, USED),
    (arrays, {}, USED),
    (fractions, {}, "target_image must be the path of an image, got [[[0.0"),
    (unknown_arrays, {}, "nothing reads the pictures in the column photo"),
    (urls("image_url"), {}, "target_image 'https:// ... ' is a URL, and URLs are not fetched"),
    (urls("image"), {}, "target_image 'https:// ... ' is a URL, and URLs are not fetched"),
    *(
        (
            urls("href", end),
            {},
            "href -> metadata (URLs, which are not fetched) ... no record has a picture: href names",
        )
        for end in ("{}.png", "{}.MP4?width=80")
    ),
    (urls("photo_url"), {}, "photo_url -> metadata (URLs, which are not fetched) ... no record has a picture"),
    (cells_of_csv, EDITS, USED),
    (pictures_beside_prompts, {}, "the data have 8 pictures (such as train/0.png)"),
    (noun_phrases, QUERIES, "noun_phrase -> prompt, category -> ignored"),
    (lambda data: noun_phrases(data, "images"), QUERIES, "text_input -> prompt, category -> ignored"),
    (noun_phrases, QUERIES, "image_id -> metadata, category_id -> metadata, segmentation -> target"),
    (noun_phrases, QUERIES, "file_name -> source, width -> target, height -> target"),
    (two_masks, QUERIES, "an earlier record, masks/box/0.jpg, asks the same about the same image"),
    (two_rows_of_a_query, QUERIES | {"layout": "table"}, "an earlier record, list.jsonl, line 1, asks the same"),
    (referring, QUERIES | {"layout": "table"}, "expression -> prompt, mask_path -> target, image_path -> source"),
    (of_a_different_machine, {}, "'/home/me/project/data/0.png' does not exist ... There is '0.png' in the folder"),
    (lambda data: masks(data, faint), QUERIES, "its alpha is 100 at most, and an object's is 128 or more"),
    (lines_in_json, {}, USED),
    (mixed_tar, {}, USED),
    (plain_tar, {}, "the files 0.* are not next to each other, ... unpack it and give the folder"),
    (tar_of_json, {}, USED),
    (tar_of_captions, {}, USED),
    (paths_of_pictures, {}, "prompts.txt, line 1, begins with the name of an image"),
    (captions_apart, {}, "for images/0.png there is no images/0.txt. texts/0.txt, "),
    (repeats, {}, "8 pictures (such as 10_dog/0.png) in a folder whose name has kohya's repeats"),
    (
        marks,
        {},
        " ... ".join(
            f"1 prompt (such as {n}.png) with {mark}"
            for n, mark in enumerate(
                ("[trigger]", "a weight", "<lora:", "a wildcard", "an option", "the separator", "a place", "an HTML")
            )
        ),
    ),
    (keyed_by_file, {}, "meta_cap.json: none of these fits. A table in JSON is a list of objects"),
    (
        lambda data: rows(data / "data/train", "0.parquet", {}),
        {},
        "A table is read from its own folder: ... /data/train.",
    ),
    (lambda data: rows(data, "train.jsonl", {"image": below(data)}), {}, USED),
    (
        lambda data: rows(data, "train.jsonl", {"images": [[name] for name in below(data)]}),
        EDITS | {"columns": {"source": ["images"]}},
        "9 found, 9 used",
    ),
    (captions_beside_a_table, {"columns": {"prompt": "long_caption"}}, "long_caption -> prompt, image -> target"),
    (repeats, {"columns": {"prompt": "text"}}, "data.columns is for tables, and ... /data is read as captions. Leave"),
    (broken_links, {}, "target_image '0.png' is a link to /tmp/nowhere/x.png, which does not exist"),
    (composed_captions, {}, USED),
    (wide_sources, EDITS | {"width": 32}, "8 images ... of a different shape: more than a third is cropped away"),
]


@pytest.mark.parametrize(
    ("make", "settings", "said"), CASES, ids=[f"{n}-{make.__name__}" for n, (make, _, _) in enumerate(CASES)]
)
def test_what_becomes_of_a_dataset(
    make: Callable[[Path], None], settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make(tmp_path / "data")
    found = outcome(tmp_path, **settings)
    assert not found.remedies, "a command that drops what it is about"
    if said != USED:
        assert has(found.said, said), found.said
        return
    assert found.table is not None, found.said
    assert sorted(record.prompt for record in found.table) == [f"thing {n}" for n in range(COUNT)]
    assert all(record.target_image is not None for record in found.table)
    assert not found.table.report["files"]["ignored"]
    assert ("source" in found.said) == (settings.get("task") == "i2i"), found.said


@pytest.mark.parametrize("column", ["license_url", "source_url", "homepage"])
def test_links_to_pages_are_no_pictures(column: str, tmp_path: Path) -> None:
    urls(column)(tmp_path / "data")
    found = outcome(tmp_path)
    assert f"{column} -> metadata" in found.said
    assert "URL" not in found.said
    assert "no record has a picture" not in found.said
    (remedy,) = outcome(tmp_path, **EDITS).remedies
    assert remedy.parameters == {"data.task": "t2i"}


def test_a_phrase_is_the_query_and_not_its_category(tmp_path: Path) -> None:
    for number, where in enumerate(("annotations", "images")):
        noun_phrases(tmp_path / f"{number}/data", where)
        table = prepare(tmp_path / f"{number}", **QUERIES)
        assert sorted(record.prompt for record in table) == [f"the red cup {n}" for n in range(COUNT)]


def test_a_guess_of_the_task_comes_after_the_rejections_and_reads_every_record(tmp_path: Path) -> None:
    rows(tmp_path / "data", "list.jsonl", {"n": range(COUNT)})
    found = outcome(tmp_path, **EDITS)
    rejections, _, guess = found.said.rpartition("\n")
    assert rejections.startswith("No record can be used. 8 records rejected:\n  list.jsonl, line 1 (id")
    assert guess.endswith("have no source_image, so they are prompts, and data.task is i2i.")
    assert [remedy.parameters for remedy in found.remedies] == [{"data.task": "t2i"}]
    with (tmp_path / "data/list.jsonl").open("a") as lines:
        lines.write('{"prompt": ""}\n')
    found = outcome(tmp_path, **EDITS)
    assert "so they are prompts" not in found.said
    assert not found.remedies


@contextmanager
def without_permission(path: Path) -> Iterator[None]:
    """A file or folder that this process may not open: root would, so that it is a different user for a while."""
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        path.chmod(0o700)


@pytest.mark.parametrize(
    ("closed", "records", "said"),
    [
        ("3.txt", 7, "the caption 3.txt cannot be read (Permission denied). Check the file and its permissions"),
        ("3.png", 7, "3.png cannot be read (Permission denied). Check the file and its permissions"),
        ("more", 8, "1 folder (such as more/) cannot be opened: check permissions"),
    ],
)
def test_what_may_not_be_read_is_said_and_the_rest_is_used(closed: str, records: int, said: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own lies where no other user may look.
        root = Path(folder)
        data = root / "data"
        captions(data, pictures(data, "{}.png"))
        captions(data, pictures(data, "more/{}.png", 200)[:1])
        if closed != "more":
            for file in (data / "more").iterdir():
                file.unlink()
        (root / "out").mkdir()
        for path in (root, data, root / "out", *data.rglob("*")):
            path.chmod(0o777)
        with without_permission(data / closed):
            found = outcome(root)
        assert found.table is not None, found.said
        assert said in found.said
        assert len(found.table) == records


def test_a_folder_of_pictures_that_may_not_be_opened_is_not_called_missing() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows(root / "data", "metadata.jsonl", {"file_name": pictures(root / "data", "images/{}.png")}, prompt="text")
        for path in (root, root / "data", *(root / "data").rglob("*")):
            path.chmod(0o777)
        with without_permission(root / "data/images"):
            assert "target_image 'images/0.png' cannot be opened (Permission denied)" in outcome(root).said


@pytest.mark.parametrize(
    ("name", "why"),
    [("clip", "Permission denied"), ("clip/deeper", "Permission denied"), ("clip" * 99, "File name too long")],
)
def test_a_record_whose_folder_of_frames_may_not_be_opened_is_rejected(name: str, why: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        targets: list[dict[str, str]] = [{}] * COUNT + [{"target_image": name}]
        jsonl(root / "data/list.jsonl", [{"prompt": f"thing {n}", **target} for n, target in enumerate(targets)])
        (root / "data/clip/deeper").mkdir(parents=True)
        for path in (root, root / "data"):
            path.chmod(0o777)
        with without_permission(root / "data/clip"):
            found = outcome(root, **CLIPS)
        assert f"cannot be opened ({why})" in found.said
        assert found.table is not None
        assert len(found.table) == COUNT
