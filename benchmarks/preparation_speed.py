"""Measures the CPU time of data preparation beside plain `datasets` and Pillow, which write the same pictures.

    .venv/bin/python -m benchmarks.preparation_speed --pictures 2000

The pictures are JPEGs of 1024 px of noise in octaves, each with a caption. Both sides alternate; imports are left out.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import numpy as np
import pandas as pd
from PIL import Image, ImageOps

from visual_grpo.config import DataConfig
from visual_grpo.pipelines.data_preparation import prepare_records

SIDE, PREPARED = 1024, 512
OCTAVES, SHIFTS = range(2, 10), 16
"""Powers of two: cells a side of the noise that is added. Places to which the same noise is moved, to draw less."""


def draw(folder: Path, count: int) -> None:
    """Writes pictures whose detail falls off with its size as in photographs, with captions."""
    folder.mkdir()
    lines = []
    for number in range(count):
        if number % SHIFTS == 0:
            noise, pixels = np.random.default_rng(number), np.full((SIDE, SIDE, 3), 128, dtype=np.float32)
            for octave in OCTAVES:
                cells = Image.fromarray(noise.integers(0, 256, (2**octave, 2**octave, 3), dtype=np.uint8))
                pixels += (np.asarray(cells.resize((SIDE, SIDE), Image.Resampling.BICUBIC)) - 128.0) / (octave - 1)
        shifted = np.roll(pixels.clip(0, 255).astype(np.uint8), SIDE // SHIFTS * (number % SHIFTS), axis=1)
        Image.fromarray(shifted).save(folder / f"{number:05}.jpg", quality=90)
        lines.append(json.dumps({"file_name": f"{number:05}.jpg", "text": f"picture {number} of noise"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def ours(folder: Path, output: Path) -> None:
    with redirect_stdout(io.StringIO()):
        prepare_records(DataConfig(path=str(folder), height=PREPARED, width=PREPARED), {}, output / "records.parquet")


def plain(folder: Path, output: Path) -> None:
    rows = []
    found = datasets.load_dataset("imagefolder", data_dir=str(folder), split="train", cache_dir=str(output / "cache"))
    for number, row in enumerate(found):
        fitted = ImageOps.fit(row["image"].convert("RGB"), (PREPARED, PREPARED), Image.Resampling.LANCZOS)
        fitted.save(output / f"{number}.png", compress_level=1)
        rows.append({"prompt": row["text"], "target_image": f"{number}.png"})
    pd.DataFrame(rows).to_parquet(output / "records.parquet")


def seconds(prepare: Callable[[Path, Path], None], folder: Path) -> float:
    """CPU seconds of all threads."""
    with TemporaryDirectory(dir=folder.parent) as output:
        began = time.process_time()
        prepare(folder, Path(output))
        return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    with TemporaryDirectory() as temporary:
        draw(few := Path(temporary, "few"), 4)
        draw(folder := Path(temporary, "pictures"), arguments.pictures)
        for prepare in (ours, plain):
            seconds(prepare, few)  # Imports and the like.
        pairs = [(seconds(ours, folder), seconds(plain, folder)) for _ in range(arguments.repeats)]
    mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(f"{arguments.pictures} pictures: {mine:.2f} CPU s; datasets and Pillow {other:.2f}; ratio {mine / other:.3f}")


if __name__ == "__main__":
    main()
