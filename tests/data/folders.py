"""Folders of data, as people keep them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.data.making import jsonl, parquet

CHINESE = (
    "清晨的薄雾笼罩着古老的江南水乡，青石板路被昨夜的细雨打湿，倒映着屋檐下摇曳的红灯笼；一位撑着油纸伞的老人"
    "缓缓走过拱桥，桥下乌篷船轻轻划开碧绿的水面，远处黛瓦白墙的民居层层叠叠，炊烟袅袅升起，与山间的云雾融为一体，"
    "画面采用浅景深、柔和的逆光，色调温润如水墨，细节丰富，氛围宁静而悠远，第{}张"
)
THINGS = ("lighthouse", "bicycle", "teapot", "violin", "cactus", "kite")


def photo(path: Path, seed: int, size: tuple[int, int] = (160, 200)) -> None:
    """A picture of soft blocks of colour, ``size`` = (height, width) in pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    Image.fromarray(small).resize(size[::-1], Image.Resampling.BICUBIC).save(path)


def prompts_only(folder: Path) -> None:
    folder.mkdir(parents=True)
    lines = [f"a photo of a {THINGS[n % len(THINGS)]} number {n}" for n in range(24)]
    (folder / "prompts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def captions(folder: Path) -> None:
    for n in range(24):
        photo(folder / f"{n:03}.jpg", n)
        (folder / f"{n:03}.txt").write_text(f"a {THINGS[n % len(THINGS)]}, {n} metres away", encoding="utf-8")


def image_folder(folder: Path) -> None:
    lines = ["file_name,text"]
    for n in range(24):
        photo(folder / f"images/{n}.png", n)
        lines.append(f"images/{n}.png,a {THINGS[n % len(THINGS)]} in room {n}")
    (folder / "metadata.csv").write_text("\n".join(lines), encoding="utf-8")


def edits(folder: Path) -> None:
    rows = []
    for n in range(24):
        photo(folder / f"before/{n}.png", n)
        photo(folder / f"after/{n}.png", n + 1000)
        names = {"source_image": f"before/{n}.png", "target_image": f"after/{n}.png"}
        rows.append({"prompt": f"turn it into a {THINGS[n % len(THINGS)]}", **names})
    jsonl(folder / "records.jsonl", rows)


def instructions(folder: Path) -> None:
    """Edits in a table with embedded images, under InstructPix2Pix's names."""
    rows = []
    for n in range(24):
        text = f"turn it into a {THINGS[n % len(THINGS)]}"
        row: dict[str, Any] = {"edit_prompt": text}
        for name, seed in (("input_image", n), ("edited_image", n + 1000)):
            photo(folder / "picture.png", seed)
            row[name] = {"bytes": (folder / "picture.png").read_bytes(), "path": None}
        rows.append(row)
    (folder / "picture.png").unlink()
    parquet(folder / "data/train.parquet", rows)


def chinese_photos(folder: Path) -> None:
    for n in range(40):
        photo(folder / f"照片 {n}.jpg", n, (300, 225))
        (folder / f"照片 {n}.txt").write_text(CHINESE.format(n), encoding="utf-8")


FOLDERS: dict[str, Callable[[Path], None]] = {
    "prompts": prompts_only,
    "captions": captions,
    "image_folder": image_folder,
    "edits": edits,
    "instructions": instructions,
    "chinese": chinese_photos,
}
