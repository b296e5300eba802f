"""The node of the starter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visual_grpo.config import Parameters


def build(parameters: dict[str, Any]) -> dict[str, Any]:
    """The dataset and model to start from: ``{"dataset", "model", "digest"}``.

    Where ``model.path`` names a pipeline nothing is pretrained; the dataset is drawn only if it is the data.
    """
    config = Parameters.model_validate(parameters)
    if config.model.path is not None:
        return _use_given_model(config, config.model.path)
    from visual_grpo import console
    from visual_grpo.starter.build import build_starter

    report = build_starter(config.starter, config.data, config.seed, console.progress)
    console.note(f"Dataset: {report['dataset']}   base model: {report['model']}")
    return report


def _use_given_model(config: Parameters, model: str) -> dict[str, Any]:
    from visual_grpo.starter.build import draw_world
    from visual_grpo.starter.stamped_folder import digest_of

    starter, data = config.starter, config.data
    if Path(data.path) == Path(starter.dataset):
        draw_world(starter, data, config.seed)
    return {"dataset": data.path, "model": model, "digest": digest_of({"path": model})}
