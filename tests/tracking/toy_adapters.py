"""Folders as trainings leave them, with weights that are only bytes: what the registry needs of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.evaluation.defaults import parameters
from visual_grpo.adapter_folder import BEST, FACTS, HELD_OUT, HISTORY, LAST, weight_sums
from visual_grpo.common.digests import content_digest
from visual_grpo.config import Parameters

MODULE_FILES = {"ar": "adapter_model.safetensors", "dit": "pytorch_lora_weights.safetensors"}


def base_model(folder: Path) -> Path:
    """A folder that is recognised as a GLM-Image."""
    folder.mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "GlmImagePipeline"}))
    (folder / "model.safetensors").write_bytes(b"b" * 1000)
    return folder


def adapters(folder: Path, base: Path | str, *, weights: str = "w", **facts: Any) -> Path:
    """Of both modules of a GLM-Image."""
    for step in ("", BEST, LAST):
        for module, name in MODULE_FILES.items():
            (folder / step / module).mkdir(parents=True)
            (folder / step / module / name).write_text(f"{weights} {module} {step if step == LAST else BEST}")
    config = parameters(data={"path": "data/01_raw/shapes"}, model={"family": "glm_image"})
    return with_facts(folder, base, config, **facts)


def with_facts(folder: Path, base: Path | str, config: Parameters, **facts: Any) -> Path:
    """What a training writes beside its adapters."""
    content = content_digest(base)
    told = {
        "seed": 0,
        "steps": 80,
        "best_step": 60,
        "adapter": "best",
        "samples": 640,
        "mlflow_run_id": None,
        "model": str(base),
        "model_digest": "d1",
        "data": "d" * 64,
        "command": ".venv/bin/kedro run",
        "git.commit": "c0ffee",
        "git.state": "clean",
        "sums": weight_sums(folder),
        "parameters": config.public(),
        **({} if content is None else {"model_content": content}),
        **facts,
    }
    (folder / FACTS).write_text(json.dumps(told))
    (folder / HISTORY).write_text("step\n1\n")
    (folder / HELD_OUT).write_text(json.dumps(["a held-out prompt"]))
    return folder
