"""Data from strangers, and data that was copied badly: each folder has good records beside what is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from tests.fault_cases.fault import Edit, Fault
from tests.records.making import jsonl, parquet, picture, png

FOLDER = "mine"
PREPARE = f"--pipeline=data_preparation --params=data.path={FOLDER}"
GOOD = 20
REJECTED = "rejected "


def folder(change: Callable[[Path, list[dict[str, Any] | str]], None]) -> Edit:
    """A folder of good records with targets, which ``change`` gets with its rows."""

    def edit(project: Path) -> None:
        own = project / FOLDER
        rows: list[dict[str, Any] | str] = []
        for number in range(GOOD):
            picture(own / f"{number}.png", (32, 32), (number, 0, 0))
            rows.append({"id": str(number), "prompt": f"a cat {number}", "target_image": f"{number}.png"})
        change(own, rows)
        jsonl(own / "records.jsonl", rows)

    return edit


def target(name: str) -> Edit:
    """One record more, with this target."""

    def change(own: Path, rows: list[dict[str, Any] | str]) -> None:
        picture(own.parent / "private.png", (32, 32), "blue")
        rows.append({"id": "bad", "prompt": "a dog", "target_image": name.replace("PROJECT", str(own.parent))})

    return folder(change)


def line(text: str) -> Edit:
    return folder(lambda own, rows: rows.append(text))


def link_out(own: Path, rows: list[dict[str, Any] | str]) -> None:
    picture(own.parent / "private.png", (32, 32), "blue")
    (own / "link.png").symlink_to(own.parent / "private.png")
    rows.append({"id": "bad", "prompt": "a dog", "target_image": "link.png"})


def pipe(own: Path, rows: list[dict[str, Any] | str]) -> None:
    os.mkfifo(own / "pipe.png")
    rows.append({"id": "bad", "prompt": "a dog", "target_image": "pipe.png"})


def truncated(own: Path, rows: list[dict[str, Any] | str]) -> None:
    file = own / "half.png"
    Image.effect_noise((64, 64), 50).save(file)
    file.write_bytes(file.read_bytes()[:1000])
    rows.append({"id": "bad", "prompt": "a dog", "target_image": file.name})


def bomb(own: Path, rows: list[dict[str, Any] | str]) -> None:
    (own / "bomb.png").write_bytes(png(30_000, 30_000))
    rows.append({"id": "bad", "prompt": "a dog", "target_image": "bomb.png"})


def twice(own: Path, rows: list[dict[str, Any] | str]) -> None:
    rows.append({"id": "3", "prompt": "a dog"})


def only(name: str, content: bytes) -> Edit:
    """A folder with a single file."""

    def edit(project: Path) -> None:
        (project / FOLDER).mkdir()
        (project / FOLDER / name).write_bytes(content)

    return edit


def cut_table(project: Path) -> None:
    file = parquet(project / FOLDER / "a.parquet", [{"prompt": f"a cat {number}"} for number in range(GOOD)])
    file.write_bytes(file.read_bytes()[:-20])


FAULTS = (
    Fault(what="A record's image is `../private.png`", edit=target("../private.png"), run=PREPARE, says=REJECTED),
    Fault(what="A record's image is an absolute path", edit=target("PROJECT/private.png"), run=PREPARE, says=REJECTED),
    Fault(what="A record's image is a link out of the folder", edit=folder(link_out), run=PREPARE, says=REJECTED),
    Fault(what="A record's image is a pipe", edit=folder(pipe), run=PREPARE, says=REJECTED),
    Fault(what="A record's image is `/dev/zero`", edit=target("/dev/zero"), run=PREPARE, says=REJECTED),
    Fault(what="An image is truncated", edit=folder(truncated), run=PREPARE, says=REJECTED),
    Fault(what="An image says 900 million pixels in a few kilobytes", edit=folder(bomb), run=PREPARE, says=REJECTED),
    Fault(what="An image does not exist", edit=target("nowhere.png"), run=PREPARE, says=REJECTED),
    Fault(
        what="`target_image` is misspelt",
        edit=line(json.dumps({"prompt": "a dog", "target_imge": "1.png"})),
        run=PREPARE,
        says=REJECTED,
    ),
    Fault(
        what="A prompt has control characters",
        edit=line(json.dumps({"prompt": "a \x1b[2Jdog"})),
        run=PREPARE,
        says=REJECTED,
    ),
    Fault(what="A prompt is a number", edit=line(json.dumps({"prompt": 5})), run=PREPARE, says=REJECTED),
    Fault(what="A prompt is empty", edit=line(json.dumps({"prompt": " "})), run=PREPARE, says=REJECTED),
    Fault(
        what="A prompt is a whole document",
        edit=line(json.dumps({"prompt": "a dog " * 500_000})),
        run=f"{PREPARE},data.max_record_mb=10",
        says=REJECTED,
    ),
    Fault(
        what="A record has a key twice",
        edit=line('{"prompt": "a dog", "prompt": "a cat"}'),
        run=PREPARE,
        says=REJECTED,
    ),
    Fault(what="Two records have one id", edit=folder(twice), run=PREPARE, says=REJECTED),
    Fault(what="A line is no JSON", edit=line('{"prompt": "a dog"'), run=PREPARE, says=REJECTED),
    Fault(what="A Parquet table is cut", edit=cut_table, run=PREPARE),
    Fault(what="The folder has nothing in it", edit=lambda project: (project / FOLDER).mkdir(), run=PREPARE),
    Fault(what="The folder does not exist", run=PREPARE),
    Fault(what="`prompts.txt` has empty lines only", edit=only("prompts.txt", b"\n\n\n"), run=PREPARE),
    Fault(what="`records.jsonl` is a picture", edit=only("records.jsonl", b"\x89PNG\r\n\x1a\n" * 9), run=PREPARE),
    Fault(what="`data.path` is `/dev/zero`", run="--pipeline=data_preparation --params=data.path=/dev/zero"),
    Fault(
        what="A record is wrong, and the records are to be strict",
        edit=target("nowhere.png"),
        run=f"{PREPARE},data.strict=true",
    ),
)
