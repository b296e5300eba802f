"""Checkpoints of safetensors and JSON that exist whole or not at all.

A checkpoint is written into a hidden sibling folder, flushed to disk and then renamed, and
``latest.json`` is replaced only after that: a process killed at any moment leaves the previous
checkpoint in force.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visual_grpo.errors import UserError

LATEST = "latest.json"


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, keep: int = 2
) -> Path:
    """Writes ``folder/step-XXXXXX`` and makes it the latest; keeps the ``keep`` newest."""
    from safetensors.torch import save_file

    name = f"step-{step:06d}"
    partial = folder / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # Clones, because safetensors refuses tensors that share memory.
    save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, partial / "state.safetensors")
    (partial / "facts.json").write_text(json.dumps(facts, indent=1, sort_keys=True), encoding="utf-8")
    for file in partial.iterdir():
        _flush(file)
    final = folder / name
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _flush(folder)
    _write_whole(folder / LATEST, json.dumps({"checkpoint": name, "step": step} | dict(facts.get("public", {}))))
    for old in sorted(folder.glob("step-*"))[:-keep]:
        if old != final:
            shutil.rmtree(old)
    return final


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that ``latest.json`` names, or None where there is none."""
    pointer = folder / LATEST
    if not pointer.is_file():
        return None
    path = folder / json.loads(pointer.read_text(encoding="utf-8"))["checkpoint"]
    if not path.is_dir():
        raise UserError(
            f"{pointer} names the checkpoint {path.name}, which is not there; delete {folder} to start again."
        )
    return path


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of one checkpoint folder."""
    from safetensors.torch import load_file

    return load_file(path / "state.safetensors"), load_facts(path)


def load_facts(path: Path) -> dict[str, Any]:
    """Facts of one checkpoint folder, without its tensors."""
    facts: dict[str, Any] = json.loads((path / "facts.json").read_text(encoding="utf-8"))
    return facts


def random_states() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """States of torch's, Python's and NumPy's own generators, as tensors and as JSON facts.

    The trainer owns its generator; these are the ones that a reward or a library may draw from.
    """
    tensors = {"rng/torch": torch.get_rng_state()}
    for device in range(torch.cuda.device_count()):
        tensors[f"rng/cuda{device}"] = torch.cuda.get_rng_state(device)
    numpy_state = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    return tensors, {"python": random.getstate(), "numpy": numpy_state}


def restore_random_states(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Puts every generator back to what ``random_states`` saw."""
    torch.set_rng_state(tensors["rng/torch"])
    for device in range(torch.cuda.device_count()):
        if f"rng/cuda{device}" in tensors:
            torch.cuda.set_rng_state(tensors[f"rng/cuda{device}"], device)
    version, internal, gauss = facts["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(facts["numpy"])


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    _flush(partial)
    partial.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
