"""Mutated records and images, prepared as a whole dataset.

``python -m tests.records.fuzz FOLDER COUNT TASK KIND...`` prepares them in a separate process and prints the
outcome as JSON, with the peak memory: of a process that has done something else before, it would say nothing.
"""

from __future__ import annotations

import csv
import io
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from tests.records import bombs
from tests.records.making import picture
from visual_grpo.config import DataConfig
from visual_grpo.records.preparation import Preparation
from visual_grpo.records.table import RecordTable

ROOT = Path(__file__).parents[2]

PIXELS = 4_000_000
"""data.max_pixels of the mutated datasets."""

TOKENS = (
    *(b"null", b"NaN", b"1e999", b"[]", b"{}", b'""', b"[" * 200, b'{"a":' * 150, b"9" * 5000, b'"\\ud800"'),
    *(
        b"\x00",
        b"\x1b[2J",
        b"\xff\xfe",
        b"\\u0000",
        b"\xe2\x80\xae",
        b"\\",
        b'"',
        b",",
        b":",
        b"../../",
        b"/etc/passwd",
    ),
    *(b"target_imge", b"/dev/zero", b"/proc/self/environ", b".", b"\xf0\x9f\x90\x88", b"x" * 3000),
)
"""What mutations insert: pieces at the limits of what JSON, text and paths may be."""

KEYS = (
    "target_imge",
    "promt",
    "source-image",
    "Prompt",
    "_prompt",
    "style",
    "\ud800",
    "",
    "a\x1b[2Jb",
    "bbox",
    "img_width",
)
IMAGES = (
    *(
        "a.png",
        "b.jpg",
        "deep/c.webp",
        "deep/../a.png",
        "../data/a.png",
        "../../secret.png",
        "/etc/hostname",
        "linked.png",
    ),
    *(
        "linked/secret.png",
        "pipe.png",
        "/dev/zero",
        "/proc/self/environ",
        "deep",
        "",
        "a\0.png",
        "\ud800.png",
        "x" * 300,
    ),
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        -0.0,
        1.5,
        10**300,
        float("inf"),
        float("-inf"),
        [],
        {},
        [[]],
        "",
        " ",
        "\x00",
        "\x1b[31mred",
        "\u202e",
        "\ud800",
    ),
    *("a cat\n\ton a mat", "x" * 2000, [1, 2, 3, 4], [[1, 2]], [[0, 0], [1e300, 2]], {"a": {"b": [1]}}, list(IMAGES)),
)


def mutated(data: bytes, other: bytes, dice: random.Random, tokens: tuple[bytes, ...] = TOKENS) -> bytes:
    """``data`` with one to four mutations; ``other`` is something to splice in."""
    for _ in range(dice.randint(1, 4)):
        start, end = sorted(dice.randrange(len(data) + 1) for _ in range(2))
        found = dice.randrange(7)
        if found == 0 and data:
            at = dice.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]
        elif found == 1:
            data = data[:start] if dice.random() < 0.5 else data[start:]
        elif found == 2:
            data = data[:start] + data[min(end, start + 16) :]
        elif found == 3:
            data = data[:start] + dice.choice(tokens) + data[start:]
        elif found == 4:
            data = data[:start] + dice.choice(tokens) + data[min(end, start + 32) :]
        elif found == 5:
            data = data[:end] + data[start:]
        else:
            data = data[:start] + other[start:end]
    return data


def odd(row: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """``row`` with one to three keys or values of another kind."""
    for _ in range(dice.randint(1, 3)):
        key = dice.choice(list(row) or ["prompt"])
        found = dice.randrange(5)
        if found == 0:
            row = {**row, dice.choice(KEYS): row.get(key)}
        elif found == 1:
            row = {name: value for name, value in row.items() if name != key}
        elif found == 2:
            row = {**row, dice.choice(("target_image", "source_image", "image", "mask")): dice.choice(IMAGES)}
        else:
            value = dice.choice(VALUES)
            for _ in range(dice.choice((0, 0, 0, 3, 150))):
                value = [value]
            row = {**row, key: value}
    return row


def records(folder: Path, count: int, dice: random.Random) -> None:
    """``records.jsonl`` with a mutated record on each line, after some good ones to train on."""
    for name in ("a.png", "b.jpg", "deep/c.webp"):
        picture(folder / name, (40, 48), (200, 30, 30))
    picture(folder / "../outside/secret.png", colour="blue")
    (folder / "linked.png").symlink_to(folder / "../outside/secret.png")
    (folder / "linked").symlink_to(folder / "../outside")
    os.mkfifo(folder / "pipe.png")
    rows = list(_good_records())
    good = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    lines = [*_mutations(good, count // 2, dice)]
    lines += [json.dumps(odd(dice.choice(rows), dice)).encode() for _ in range(count - len(lines))]
    lines = [line.replace(b"\n", b" ") for line in lines]
    (folder / "records.jsonl").write_bytes(b"\n".join([*good, *(line if line.strip() else b"x" for line in lines)]))


def metadata_csv(folder: Path, count: int, dice: random.Random) -> None:
    picture(folder / "a.png")
    text = io.StringIO()
    csv.writer(text).writerows([[f"{n}", "a.png", f'a cat, "{n}"\non a mat', "1.5"] for n in range(20)])
    good = text.getvalue().encode().split(b"\r\n")
    lines = _mutations(good, count, dice)
    (folder / "metadata.csv").write_bytes(b"\r\n".join([b"id,file_name,text,score", *good, *lines]))


def metadata_jsonl(folder: Path, count: int, dice: random.Random) -> None:
    records(folder, count, dice)
    text = (folder / "records.jsonl").read_bytes().replace(b'"target_image"', b'"file_name"')
    text = text.replace(b'"source_image"', b'"other"')
    (folder / "records.jsonl").unlink()
    (folder / "metadata.jsonl").write_bytes(text)


def prompts(folder: Path, count: int, dice: random.Random) -> None:
    folder.mkdir(parents=True)
    good = [f"a lighthouse, number {n} 灯塔".encode() for n in range(20)]
    (folder / "prompts.txt").write_bytes(b"\n".join([*good, *_mutations(good, count, dice)]))


def images(folder: Path, count: int, dice: random.Random) -> None:
    """Images of many formats, cut off, with flipped bytes, of swapped suffixes, each the target of a record."""
    good = [(suffix, data) for suffix, data in _good_images()]
    rows = []
    for number in range(count + len(good)):
        suffix, data = good[number % len(good)]
        if number >= len(good):
            data = mutated(data, dice.choice(good)[1], dice, (b"\x00\x00", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x01"))
            suffix = dice.choice(good)[0] if dice.random() < 0.3 else suffix
        name = f"{number}.{suffix}"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        rows.append(json.dumps({"id": number, "prompt": f"picture {number}", "target_image": name}))
    (folder / "records.jsonl").write_text("\n".join(rows))


KINDS: dict[str, Callable[[Path, int, random.Random], None]] = {
    "records": records,
    "metadata_csv": metadata_csv,
    "metadata_jsonl": metadata_jsonl,
    "prompts": prompts,
    "images": images,
    **bombs.KINDS,
}


def measured(folder: Path, *kinds: str, count: int, task: str = "mixed") -> tuple[int, list[dict[str, Any]]]:
    """As `run`, of one kind after the other in another process.

    Returns:
        By how many MB its peak memory has grown after the libraries were loaded and a few records prepared; and
        the reports.
    """
    command = [sys.executable, "-m", "tests.records.fuzz", str(folder), str(count), task, *kinds]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    grown, reports = json.loads(done.stdout)
    return grown, reports


def run(folder: Path, kind: str, count: int, **changes: Any) -> dict[str, Any]:
    """Prepares a mutated dataset and reads all that was made of it.

    Returns:
        The data report, with ``seen``: how many records the progress counted, and ``read``: how many are in the table.
    """
    KINDS[kind](folder / "data", count, random.Random(f"{kind} {count}"))
    sizes = {"height": 32, "width": 32, "max_pixels": PIXELS, "max_file_mb": 10, "max_record_mb": 0.01}
    shares = {"held_out_share": 0.1, "eval_share": 0.1}
    config = DataConfig.model_validate({"path": str(folder / "data"), "task": "mixed", **sizes, **shares, **changes})
    seen = 0

    def count_record(done: int, total: int) -> None:
        nonlocal seen
        seen += 1

    Preparation(config).write(folder / "out/records.parquet", count_record)
    table = RecordTable(folder / "out/records.parquet")
    return {**table.report, "seen": seen, "read": sum(1 for _ in table), "digest": table.digest}


def _good_records() -> Iterator[dict[str, Any]]:
    for number in range(20):
        yield {
            "id": f"r{number}",
            "prompt": f"a cat, number {number}, 猫",
            "target_image": "a.png",
            "group": number % 3,
        }
        yield {
            "prompt": f"make it red {number}",
            "source_image": ["b.jpg", "deep/c.webp"],
            "metadata": {"k": [1, {"b": 2}]},
        }
        yield {
            "query": "the wing",
            "image": "a.png",
            "mask": "a.png",
            "box": [1, 2, 30, 31],
            "points": [[3, 4]],
            "prompt": "x",
        }


def _mutations(good: list[bytes], count: int, dice: random.Random) -> Iterator[bytes]:
    return (mutated(dice.choice(good), dice.choice(good), dice) for _ in range(count))


def _good_images() -> Iterator[tuple[str, bytes]]:
    """(suffix, content) in the formats and modes that people have."""
    noise = Image.effect_noise((72, 56), 60)
    colour = Image.merge("RGB", [noise, noise.rotate(90, expand=False), noise.transpose(Image.Transpose.ROTATE_180)])
    frames = [colour, colour.rotate(180)] * 3
    kinds: list[tuple[str, Image.Image, dict[str, Any]]] = [
        *((suffix, colour, {}) for suffix in ("png", "jpg", "webp", "bmp", "tif", "ppm", "tga", "gif", "ico", "jp2")),
        ("png", noise.convert("I;16"), {}),
        ("png", colour.quantize(32), {}),
        ("tif", noise.convert("F"), {}),
        ("tif", colour, {"compression": "tiff_lzw"}),
        ("jpg", colour, {"progressive": True, "exif": Image.Exif()}),
        *(
            (suffix, frames[0], {"save_all": True, "append_images": frames[1:]})
            for suffix in ("gif", "webp", "png", "tif")
        ),
    ]
    for suffix, image, options in kinds:
        file = io.BytesIO()
        image.save(file, Image.registered_extensions()[f".{suffix}"], **options)
        yield suffix, file.getvalue()


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def main(folder: str, count: str, task: str, *kinds: str) -> None:
    run(Path(folder) / "warm", "images", 50)
    before = _peak_mb()
    found = [run(Path(folder) / kind, kind, int(count), task=task) for kind in kinds]
    sys.stdout.write(json.dumps([round(_peak_mb() - before), found]))


if __name__ == "__main__":
    main(*sys.argv[1:])
