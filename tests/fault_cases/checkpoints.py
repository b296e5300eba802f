"""Checkpoints that are not as they were written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.fault_cases.fault import RESUME, Fault

FOLDER = Path("data/06_models/checkpoints")
NEWEST = FOLDER / "step-000002"


def flip(name: str) -> object:
    """Changes one bit in the middle of a file."""

    def edit(project: Path) -> None:
        content = bytearray((project / name).read_bytes())
        content[len(content) // 2] ^= 1
        (project / name).write_bytes(content)

    return edit


def flip_newest(project: Path) -> None:
    flip_bit(project / NEWEST / "state.safetensors")


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(project: Path) -> None:
    file = project / NEWEST / "state.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def empty_latest(project: Path) -> None:
    (project / FOLDER / "latest.json").write_bytes(b"")


def damage_all(project: Path) -> None:
    for file in (project / FOLDER).glob("step-*/state.safetensors"):
        flip_bit(file)


def half_written(project: Path) -> None:
    partial = project / FOLDER / ".step-000003.partial"
    partial.mkdir()
    whole = (project / NEWEST / "state.safetensors").read_bytes()
    (partial / "state.safetensors").write_bytes(whole[: len(whole) // 2])


def change_parameter(project: Path) -> None:
    """As somebody would who knows the files, but not the sums."""
    file = project / NEWEST / "facts.json"
    facts = json.loads(file.read_text(encoding="utf-8"))
    facts["parameters"]["grpo"]["learning_rate"] = 1.0
    file.write_text(json.dumps(facts), encoding="utf-8")


FAULTS = (
    Fault(what="One bit of the newest checkpoint is flipped", edit=flip_newest, run=RESUME, says="The checkpoint "),
    Fault(what="The newest checkpoint is truncated to 1,000 bytes", edit=truncate, run=RESUME, says="The checkpoint "),
    Fault(
        what="A killed process has left half a checkpoint",
        edit=half_written,
        run=RESUME,
        says="data/06_models/checkpoints/.step-000003.partial",
    ),
    Fault(
        what="A file of the newest checkpoint is gone",
        edit=lambda project: (project / NEWEST / "facts.json").unlink(),
        run=RESUME,
        says="The checkpoint ",
    ),
    Fault(
        what="The sums of the newest checkpoint are gone",
        edit=lambda project: (project / NEWEST / "SHA256SUMS").unlink(),
        run=RESUME,
        says="The checkpoint ",
    ),
    Fault(
        what="A parameter was changed in the newest checkpoint's `facts.json`",
        edit=change_parameter,
        run=RESUME,
        says="The checkpoint ",
    ),
    Fault(what="`latest.json` is empty", edit=empty_latest, run=RESUME, says="data/06_models/checkpoints/latest.json"),
    Fault(
        what="The folder that `latest.json` names is gone",
        edit=lambda project: shutil.rmtree(project / NEWEST),
        run=RESUME,
        says="data/06_models/checkpoints/latest.json",
    ),
    Fault(what="Every checkpoint is damaged", edit=damage_all, run=RESUME),
    Fault(
        what="`resume` names a damaged checkpoint",
        edit=flip_newest,
        run=f"--pipeline=train --params=resume={NEWEST},grpo.steps=3",
    ),
    Fault(
        what="`resume` names a folder without a checkpoint",
        run="--pipeline=train --params=resume=data/01_raw,grpo.steps=3",
    ),
    Fault(
        what="A resumed run is given another learning rate",
        run="--pipeline=train --params=resume=auto,grpo.learning_rate=0.1",
    ),
    Fault(
        what="A resumed run is given fewer steps than it has done",
        run="--pipeline=train --params=resume=auto,grpo.steps=1",
    ),
)
