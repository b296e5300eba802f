"""Whatever a dataset holds is used, named with its reason, or refused: over generated folders, none is read silently.

Each seed is a folder: kinds of pictures and videos x names of columns x layouts x tasks, and files beside them.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.clips import clip
from tests.data.making import data_config, jsonl, parquet, prepare
from visual_grpo.common.errors import UserError
from visual_grpo.data.columns import NO_FILE, NOT_FETCHED
from visual_grpo.operations.preflight.findings import OF_A_RECORD, look_at_folder

FEW, MANY = 40, 600
"""Folders of a quick run, and of a slow one."""
ROWS = 3
COLUMNS = (
    *("image", "img", "image_path", "file_name", "target_image", "Image", "edited_image", "video", "video_path"),
    *("videos", "media_path", "file_path", "source_image", "control_path", "input_image", "source", "image_url", "url"),
    *("photo", "clip", "control", "depth", "mask", "image_2", "thumbnail", "target", "png", "mp4", "control_path_1"),
)
PROMPTS = ("prompt", "text", "caption", "Prompt", "instruction", "query")
TASKS = ("t2i", "t2i", "i2i", "mixed", "segmentation")
READ = {"target", "source", "prompt", "id", "group", "metadata", "box", "points", "box and points"}


@dataclass
class Planted:
    """What a generated folder has of pictures and videos."""

    layout: str = ""
    readable: dict[str, str] = field(default_factory=dict)
    """Column -> kind."""
    unreadable: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    """Pictures and videos on the disk."""
    in_records: bool = False
    """Every record must have one of the files, unless the folder is refused."""


def png(seed: int, size: tuple[int, int] = (40, 36)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="session")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Small files of each kind, copied into the folders."""
    folder = tmp_path_factory.mktemp("videos")
    return {suffix: clip(folder / f"a{suffix}", range(20, 200, 20)) for suffix in (".mp4", ".gif")}


class Maker:
    """Writes files of a dataset, and cells that name or hold pictures."""

    def __init__(self, folder: Path, rng: random.Random, videos: Mapping[str, Path]) -> None:
        self.folder, self.rng, self.videos, self.files = folder, rng, videos, list[str]()

    def file(self, name: str, seed: int) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in self.videos:
            shutil.copy(self.videos[path.suffix], path)
            with path.open("ab") as end:  # Each has its own bytes.
                end.write(seed.to_bytes(8, "little"))
        else:
            Image.open(io.BytesIO(png(seed))).save(path)
        self.files.append(name)
        return name

    def cell(self, kind: str, column: str, n: int) -> Any:
        seed = self.rng.randrange(2**32)
        content = base64.b64encode(png(seed)).decode()
        if kind in ("png", "jpg", "mp4", "gif"):
            return self.file(f"files/{column}-{n}.{kind}", seed)
        if kind == "array":
            return np.asarray(Image.open(io.BytesIO(png(seed)))).tolist()
        if kind == "mapping":
            return {"path": self.file(f"files/{column}-{n}.png", seed), "bytes": None}
        cells: dict[str, Callable[[], Any]] = {
            "base64": lambda: content,
            "data URL": lambda: f"data:image/png;base64,{content}",
            "list": lambda: [self.file(f"files/{column}-{n}.png", seed)],
            "JSON list": lambda: json.dumps([self.file(f"files/{column}-{n}.png", seed)]),
            "Windows path": lambda: self.file(f"files/{column}-{n}.png", seed).replace("/", "\\"),
            "bytes": lambda: {"bytes": png(seed), "path": None},
            "URL": lambda: f"https://example.org/{column}/{n}.png",
            "URL without suffix": lambda: f"https://example.org/{column}?id={n}",
            "missing": lambda: f"gone/{column}-{n}.png",
            "foreign": lambda: f"/home/me/{column}-{n}.mp4",
        }
        return cells[kind]()


READABLE = ("png", "jpg", "mp4", "gif", "base64", "data URL", "list", "JSON list", "Windows path", "mapping", "array")
UNREADABLE = ("URL", "URL without suffix", "missing", "foreign")
TABLES = ("list.jsonl", "train.json", "lines.json", "records.jsonl", "metadata.jsonl", "metadata.csv", "list.csv")


def table(maker: Maker, layout: str) -> Planted:
    rng, planted = maker.rng, Planted(layout)
    columns = rng.sample(COLUMNS, rng.choice((1, 1, 2, 3)))
    flat = layout.endswith((".csv", ".parquet"))
    kinds = [kind for kind in (*READABLE, *UNREADABLE) if not flat or kind not in ("array", "mapping", "list")]
    if layout.endswith(".parquet"):
        kinds += ["bytes", "list"]
    chosen = {column: rng.choice(kinds) for column in columns}
    for column, kind in chosen.items():
        if (column, kind) != ("url", "URL without suffix"):  # It may be of a page.
            (planted.readable if kind in (*READABLE, "bytes") else planted.unreadable)[column] = kind
    prompt = rng.choice(PROMPTS) if layout != "records.jsonl" else "prompt"
    rows = [
        {prompt: f"thing {n}", "score": n} | {column: maker.cell(kind, column, n) for column, kind in chosen.items()}
        for n in range(ROWS)
    ]
    file = maker.folder / layout
    file.parent.mkdir(parents=True, exist_ok=True)
    if layout.endswith(".parquet"):
        parquet(file, rows)
    elif layout.endswith(".csv"):
        with file.open("w", newline="") as lines:
            writer = csv.DictWriter(lines, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif layout == "train.json":
        file.write_text(json.dumps(rows))
    else:
        jsonl(file, rows)
    return planted


def tar(maker: Maker, layout: str) -> Planted:
    suffix = maker.rng.choice(("png", "jpg", "webp", "mp4", "jpeg", "control.png"))
    names = [f"{n}.{part}" for n in range(ROWS) for part in sorted(("txt", suffix))]
    if maker.rng.random() < 0.3:
        names.sort(key=lambda name: name.partition(".")[::-1])
    maker.folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(maker.folder / layout, "w") as archive:
        for name in names:
            content = name.encode() if name.endswith("txt") else png(maker.rng.randrange(2**32))
            if name.endswith("mp4"):
                content = maker.videos[".mp4"].read_bytes()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return Planted(layout, readable={suffix: suffix})


def captions(maker: Maker, layout: str) -> Planted:
    folder = maker.rng.choice(("", "train/", "target/", "pictures/"))
    suffix = maker.rng.choice(("png", "jpg", "mp4", "gif"))
    for n in range(ROWS):
        name = maker.file(f"{folder}{n}.{suffix}", maker.rng.randrange(2**32))
        (maker.folder / name).with_suffix(".txt").write_text(f"thing {n}")
        if maker.rng.random() < 0.3:
            maker.file(f"{maker.rng.choice(('control', 'source', 'other'))}/{n}.png", n)
    return Planted(layout, in_records=True)


def prompts(maker: Maker, layout: str) -> Planted:
    lists, suffix = maker.rng.random() < 0.4, maker.rng.choice(("png", "mp4"))
    folder = maker.rng.choice(("target_images", "videos", "train", "val", "pictures", "source"))
    names = [maker.file(f"{folder}/{n}.{suffix}", maker.rng.randrange(2**32)) for n in range(ROWS)]
    (maker.folder / "prompts.txt").write_text("\n".join(f"thing {n}" for n in range(ROWS)))
    if lists and folder != "target_images":
        (maker.folder / maker.rng.choice(("videos.txt", "images.txt"))).write_text("\n".join(names))
    return Planted(layout)


LAYOUTS: dict[str, Callable[[Maker, str], Planted]] = {
    **dict.fromkeys((*TABLES, "data/train.parquet"), table),
    "0.tar": tar,
    "captions": captions,
    "prompts.txt": prompts,
}


def generated(folder: Path, seed: int, videos: Mapping[str, Path]) -> tuple[Planted, dict[str, Any]]:
    rng = random.Random(seed)
    maker = Maker(folder, rng, videos)
    layout = rng.choice([*TABLES, *LAYOUTS])
    planted = LAYOUTS[layout](maker, layout)
    for name in rng.sample(
        ("README.md", "notes.txt", "stray.png", "extra/stray.mp4", "val/stray.jpg"), rng.randrange(3)
    ):
        if name.endswith((".md", ".txt")):
            (folder / name).write_text("notes")
        else:
            maker.file(name, rng.randrange(2**32))
    planted.files = maker.files
    task, is_video = rng.choice(TASKS), rng.random() < 0.4
    return planted, {"task": task} | ({"frames": 3, "fps": 8} if is_video and task != "segmentation" else {})


def silence(planted: Planted, report: Mapping[str, Any]) -> list[str]:
    """Returns what nobody was told."""
    said = " ".join(report["warnings"])
    faults, files, columns = [], report["files"], report["columns"]
    if files["found"] != files["used"] + sum(files["ignored"].values()):
        faults.append(f"{files} do not add up")
    if len({*planted.files} - {*files["listed"]}) > files["used"]:
        faults.append(f"{files} says nothing of some of {planted.files}")
    has_pictures = report["with_pictures"] > 0
    for column in (*planted.readable, *planted.unreadable):
        became = columns.get(column)
        if became is None:
            faults.append(f"the column {column} has no line")
            continue
        if sum(became.values()) != report["records"]:
            faults.append(f"{column} became {became} in {report['records']} records")
        is_read, is_told = bool(READ & {*became}), bool({NO_FILE, NOT_FETCHED} & {*became})
        if column in planted.unreadable and not is_read and not (is_told and (has_pictures or column in said)):
            faults.append(f"{column} cannot be read, and nothing says so")
        if column in planted.readable and not is_read and not has_pictures and column not in said:
            faults.append(f"{column} is left out, and no record has a picture")
    if planted.files and not has_pictures and "no record has a picture" not in said:
        faults.append("no record has a picture, and nothing says so")
    if planted.in_records and report["with_pictures"] + report["rejected"]["total"] != report["records"]:
        faults.append("a picture is not in its record")
    return faults


def check(folder: Path, seeds: range, videos: Mapping[str, Path]) -> dict[str, int]:
    """Returns how many of the folders were prepared, and how many refused."""
    counts, faults = {"prepared": 0, "refused": 0}, list[str]()
    for seed in seeds:
        root = folder / str(seed)
        planted, settings = generated(root / "data", seed, videos)
        try:
            problems = look_at_folder(data_config(root / "data", **settings), OF_A_RECORD[:2]).problems
            if problems:
                raise problems[0]
            made = prepare(root, **settings)
        except UserError as error:
            counts["refused"] += 1
            if error.remedy is not None and error.remedy.parameters.get("data.task") == "t2i":
                faults.append(f"seed {seed}: {error.remedy} drops the pictures of {planted}")
        else:
            counts["prepared"] += 1
            pictures = sum(record.target_image is not None or bool(record.source_images) for record in made)
            report = made.report | {"with_pictures": pictures}
            faults += [f"seed {seed}, {settings}, {planted}: {fault}" for fault in silence(planted, report)]
        shutil.rmtree(root)
    assert not faults, "\n".join(faults)
    return counts


def test_nothing_is_read_silently(tmp_path: Path, videos: Mapping[str, Path]) -> None:
    counts = check(tmp_path, range(FEW), videos)
    assert min(counts.values()) > FEW / 8, counts


@pytest.mark.slow
def test_nothing_is_read_silently_in_many_folders(tmp_path: Path, videos: Mapping[str, Path]) -> None:
    counts = check(tmp_path, range(FEW, FEW + MANY), videos)
    assert min(counts.values()) > MANY / 8, counts
