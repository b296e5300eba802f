"""What earlier commands have left, damaged or gone: models, records, baselines, adapters."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.fault_cases.checkpoints import flip_bit
from tests.fault_cases.fault import TRAIN, Edit, Fault

EVALUATE = "--pipeline=evaluate"


def flipped(pattern: str) -> Edit:
    """One bit of the largest file that fits."""
    return lambda project: flip_bit(max(project.glob(pattern), key=lambda file: file.stat().st_size))


def halved(name: str) -> Edit:
    def edit(project: Path) -> None:
        content = (project / name).read_bytes()
        (project / name).write_bytes(content[: len(content) // 2])

    return edit


def gone(name: str) -> Edit:
    return lambda project: shutil.rmtree(project / name) if (project / name).is_dir() else (project / name).unlink()


ADAPTERS, BASELINE, BASE = "data/06_models/adapters", "data/07_model_output/baseline", "data/06_models/base"
FAULTS = (
    Fault(what="One bit of the adapters is flipped", edit=flipped(f"{ADAPTERS}/ar/*.safetensors"), run=EVALUATE),
    Fault(what="The adapters' `training.json` is half gone", edit=halved(f"{ADAPTERS}/training.json"), run=EVALUATE),
    Fault(what="The adapters are gone", edit=gone(ADAPTERS), run=EVALUATE),
    Fault(what="`adapter` names no run", run="--pipeline=evaluate --params=adapter=nosuchrun"),
    Fault(what="`adapter` names a folder without adapters", run="--pipeline=evaluate --params=adapter=data/01_raw"),
    Fault(what="The baseline is gone", edit=gone(BASELINE), run=TRAIN),
    Fault(what="The baseline's table is half gone", edit=halved(f"{BASELINE}/scores.parquet"), run=TRAIN),
    Fault(what="The records' table is half gone", edit=halved("data/05_model_input/records.parquet"), run=TRAIN),
    Fault(what="One bit of the base model is flipped", edit=flipped(f"{BASE}/**/*.safetensors"), run=EVALUATE),
    Fault(what="A folder of the base model is gone", edit=gone(f"{BASE}/vae"), run=TRAIN),
    Fault(what="`06_models/starter.json` is half gone", edit=halved("data/06_models/starter.json"), run=TRAIN),
)
