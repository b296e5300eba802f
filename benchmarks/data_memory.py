"""Measures peak memory and time of the data preparation for different numbers of records.

    .venv/bin/python benchmarks/data_memory.py 1000 20000

Each size is run twice, each time in a new process: the first run prepares every image, the second reuses them. Records
are 64 px JPEGs, prepared at 32 px.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from visual_grpo.config import DataConfig
from visual_grpo.records.preparation import Preparation
from visual_grpo.records.table import RecordTable

_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of ru_maxrss."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sizes", type=int, nargs="*", default=[1000, 20000], help="numbers of records")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            draw(Path(folder) / "records", size)
            for run in ("first", "second"):
                command = [sys.executable, __file__, "--measure", folder]
                result = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                print(
                    f"{size:>7} records, {run:<6} run: peak {result['peak_mib']:.0f} MiB,"
                    f" {result['seconds']:.1f} s ({size / result['seconds']:.0f} records/s)"
                )


def draw(folder: Path, size: int) -> None:
    """Writes a records.jsonl with distinct images."""
    from PIL import Image

    images = folder / "images"
    images.mkdir(parents=True)
    with (folder / "records.jsonl").open("w", encoding="utf-8") as file:
        for number in range(size):
            colour = (number & 255, number >> 8 & 255, number >> 16 & 255)
            Image.new("RGB", (64, 64), colour).save(images / f"{number}.jpg")
            record = {"id": f"record {number}", "prompt": f"a plain image with colour {colour}"}
            file.write(json.dumps({**record, "target_image": f"images/{number}.jpg"}) + "\n")


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
