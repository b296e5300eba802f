"""The node of the starter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.pipeline import Node, Pipeline

from visual_grpo.common import console
from visual_grpo.common.digests import content_digest
from visual_grpo.config import DataConfig, ModelConfig, StarterConfig
from visual_grpo.config.presets import is_drawn
from visual_grpo.starter.build import build_starter, draw_world
from visual_grpo.starter.pretraining import digest_of


def create_pipeline() -> Pipeline:
    return Pipeline(
        [
            Node(
                build,
                ["params:starter", "params:data", "params:model", "params:seed"],
                "base_model",
                name="build_starter",
            ),
        ],
        namespace="starter",
        prefix_datasets_with_namespace=False,
        tags=["training"],
    )


def build(starter: StarterConfig, data: DataConfig, model: ModelConfig, seed: int) -> dict[str, Any]:
    """Returns the dataset and model to start from: ``{"dataset", "model", "digest", "content"}``.

    ``digest`` is what baseline and adapters of the model are recognised by, ``content`` that of its files.

    Where ``model.path`` names a pipeline nothing is pretrained; the dataset is drawn only if it is the data.
    """
    if model.path is not None:
        return _use_given_model(starter, data, model, model.path, seed)

    family = None if model.family == "auto" else model.family
    report = build_starter(starter, data, seed, family)
    console.note(what_is_there(starter, data, report["model"]))
    return report


def what_is_there(starter: StarterConfig, data: DataConfig, model: str) -> str:
    """Says where the drawn dataset and the small model are, or that this model is not made for the user's data."""
    if is_drawn(data.path, starter.dataset):
        return f"Dataset: {starter.dataset}   Base model: {model}"
    return (
        f"Base model: {model}\nWarning: this small model was pretrained on drawn {starter.world} and nothing else. It"
        f" shows that {data.path} trains; for pictures worth having name a released model with model.path."
    )


def _use_given_model(
    starter: StarterConfig, data: DataConfig, config: ModelConfig, model: str, seed: int
) -> dict[str, Any]:
    if Path(data.path) == Path(starter.dataset):
        draw_world(starter, data, seed)
    content = content_digest(model)
    # The same files elsewhere are the same model; those of a hub id are known by their revision.
    facts = {"path": model, "revision": config.revision} if content is None else {"content": content}
    return {"dataset": data.path, "model": model, "digest": digest_of(facts), "content": content}
