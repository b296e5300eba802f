"""Small datasets that are huge once they are read: decompression bombs, endless lines, deep nesting."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from tests.records.making import picture

HUGE = 300_000_000
"""Bytes of a line, a caption, a cell. Files get them without taking the disk, as holes."""


def bombs_images(folder: Path, count: int, dice: random.Random) -> None:
    """Images of which a header or a few kilobytes say gigabytes; ``count`` good ones, too."""
    picture(folder / "good.png")
    names = ["good.png"] * count
    for name, data in (
        ("zeros.png", png(30_000, 30_000)),
        ("large.png", png(5000, 1000)),
        ("header.png", png(2_000_000_000, 2_000_000_000)),
        ("header.gif", b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0) + b",\0\0\0\0\xff\xff\xff\xff\0\2"),
        ("header.bmp", b"BM" + struct.pack("<IHHIIiiHH", 54, 0, 0, 54, 40, 60_000, 60_000, 1, 24) + bytes(24)),
        ("header.ppm", b"P6 100000 100000 255 "),
        ("program.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n"),
    ):
        (folder / name).write_bytes(data)
        names.append(name)
    _animation(folder / "animation.gif")
    _hole(folder / "huge.png", HUGE)
    names += ["animation.gif", "huge.png"]
    rows = [{"id": n, "prompt": f"picture {n}", "target_image": name} for n, name in enumerate(names)]
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, rows)))


def bombs_lines(folder: Path, count: int, dice: random.Random) -> None:
    """Good lines around one of 300 MB, one of thousands of brackets and one of hundreds of misspelt keys."""
    folder.mkdir(parents=True)
    good = b"".join(b'{"id": %d, "prompt": "a cat %d"}\n' % (n, n) for n in range(count))
    many = json.dumps({"prompt": "x", **{f"target_imag{n}": n for n in range(300)}})
    deep = b'{"prompt": "x", "k": ' + b"[" * 4000 + b"]" * 4000 + b"}\n"
    with (folder / "records.jsonl").open("wb") as file:
        file.write(good + deep + many.encode() + b"\n" + b'{"prompt": "')
        file.truncate(file.tell() + HUGE)
        file.seek(0, 2)
        file.write(b'"}\n{"id": "last", "prompt": "after"}')


def bombs_csv(folder: Path, count: int, dice: random.Random) -> None:
    """A field of 300 MB, and a row of 20,000 lines in quotes."""
    picture(folder / "a.png")
    with (folder / "metadata.csv").open("wb") as file:
        file.write(b"id,file_name,text\n" + b"".join(b"%d,a.png,a cat %d\n" % (n, n) for n in range(count)))
        file.write(b'x,a.png,"' + b"no end\n" * 20_000 + b'"\ny,a.png,')
        file.truncate(file.tell() + HUGE)
        file.seek(0, 2)
        file.write(b"\nlast,a.png,after\n")


def bombs_captions(folder: Path, count: int, dice: random.Random) -> None:
    for number in range(count):
        picture(folder / f"{number}.png").with_suffix(".txt").write_text(f"a cat {number}")
    _hole(picture(folder / "huge.png").with_suffix(".txt"), HUGE)


def bombs_cells(folder: Path, count: int, dice: random.Random) -> None:
    """A Parquet table of a few kilobytes with a cell of 300 MB."""
    _table(folder, [("image", bytes(HUGE)), ("problem", "x"), ("solution", "x")])


def bombs_masks(folder: Path, count: int, dice: random.Random) -> None:
    """A Parquet table of a few kilobytes with a mask of 50 million pixels: run lengths, that no size tells of."""
    import pyarrow as pa

    pixels = 50_000_000
    values = pa.Array.from_buffers(pa.bool_(), pixels, [None, pa.py_buffer(bytes(pixels // 8))])
    row = pa.ListArray.from_arrays(pa.array([0, pixels], pa.int32()), values)
    _table(folder, [("image", b"x"), ("problem", "x"), ("mask", pa.ListArray.from_arrays([0, 1], row))])


KINDS: dict[str, Callable[[Path, int, random.Random], None]] = {
    "bombs_images": bombs_images,
    "bombs_lines": bombs_lines,
    "bombs_csv": bombs_csv,
    "bombs_captions": bombs_captions,
    "bombs_cells": bombs_cells,
    "bombs_masks": bombs_masks,
}


def png(width: int, height: int) -> bytes:
    """A grey PNG of any size; of its rows only the first megabytes are there."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(10_000_000), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _animation(path: Path) -> None:
    frames = [Image.new("P", (500, 500), n % 2) for n in range(300)]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def _hole(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def _table(folder: Path, columns: list[tuple[str, object]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    table = {name: cell if isinstance(cell, pa.Array) else pa.array([cell]) for name, cell in columns}
    pq.write_table(
        pa.table(table), folder / "train.parquet", compression="zstd", use_dictionary=False, write_statistics=False
    )
