"""Measures peak memory and time of the data preparation for different numbers of records.

    .venv/bin/python benchmarks/data_memory.py 1000 200000

Each size is prepared in a new process: 64 px JPEGs at 32 px, from a records.jsonl or a Parquet table with the images.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from visual_grpo.config import DataConfig
from visual_grpo.data.manifest import RecordTable
from visual_grpo.data.preparation import Preparation

_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of ru_maxrss."""
LAYOUTS = ("records", "table")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sizes", type=int, nargs="*", default=[1000, 20000], help="numbers of records")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    for layout in arguments.layouts:
        for size in arguments.sizes:
            with tempfile.TemporaryDirectory() as folder:
                draw(Path(folder) / "records", size, layout)
                command = [sys.executable, __file__, "--measure", folder]
                result = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                rate = size / result["seconds"]
                print(f"{layout}: {size} records, peak {result['peak_mib']:.0f} MiB, {rate:.0f} records/s", flush=True)


def draw(folder: Path, size: int, layout: str) -> None:
    """Writes records with distinct images."""
    folder.mkdir()
    if layout == "records":
        (folder / "images").mkdir()
        with (folder / "records.jsonl").open("w", encoding="utf-8") as file:
            for row in rows(size):
                name = f"images/{row['id']}.jpg"
                (folder / name).write_bytes(row.pop("image")["bytes"])
                file.write(json.dumps(row | {"target_image": name}) + "\n")
        return
    import datasets

    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_generator(rows, gen_kwargs={"size": size}, cache_dir=str(folder.parent / "cache"))
    dataset.to_parquet(folder / "records.parquet", batch_size=1000)


def rows(size: int) -> Iterator[dict[str, Any]]:
    from PIL import Image

    for number in range(size):
        colour = (number & 255, number >> 8 & 255, number >> 16 & 255)
        file = io.BytesIO()
        Image.new("RGB", (64, 64), colour).save(file, "JPEG")
        image = {"bytes": file.getvalue(), "path": None}
        yield {"id": str(number), "prompt": f"a plain image with colour {colour}", "image": image}


def measure(folder: Path) -> dict[str, float]:
    """Prepares the records, then reads the whole table once."""
    started = time.perf_counter()
    config = DataConfig.model_validate({"path": str(folder / "records"), "height": 32, "width": 32})
    Preparation(config).write(folder / "prepared" / "records.parquet")
    table = RecordTable(folder / "prepared" / "records.parquet")
    assert len(table.digest) == 64
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES
    return {"peak_mib": peak / 2**20, "seconds": time.perf_counter() - started}


if __name__ == "__main__":
    main()
