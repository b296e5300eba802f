"""Makes the dataset and the base model to start from, or records the digest of the user's own model."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from visual_grpo.common import console
from visual_grpo.common.digests import content_digest, digest_once
from visual_grpo.config import DataConfig, ModelConfig, StarterConfig
from visual_grpo.models.lora_lookup import merged_lora
from visual_grpo.starter.build import pretrain_model, render_dataset
from visual_grpo.starter.pretraining import digest_of
from visual_grpo.starter.worlds import find_world


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
        tags=["training"],
    )


def build(starter: StarterConfig, data: DataConfig, model: ModelConfig, seed: int) -> dict[str, Any]:
    """Returns the dataset and model to start from: ``{"dataset", "model", "digest", "content"}``.

    ``digest`` is what baseline and adapters of the model are recognised by, ``content`` that of its files; a model on
    the hub has a ``commit`` instead. ``lora`` is the sha256 of a LoRA that is merged into the model. The dataset is
    rendered only where it is the data, and the small model pretrained only where it is the model.
    """
    if data.path == starter.dataset:
        render_dataset(starter, data, seed)
    if model.path == starter.model:
        if data.path != starter.dataset:
            console.note(
                f"Warning: the small base model is pretrained on rendered {find_world(starter.world).name} and nothing"
                f" else. It only tests whether a training on {data.path} works. For usable pictures, name a released"
                " model with model.path."
            )
        digests: dict[str, Any] = pretrain_model(starter, data, model.family, seed)
        console.note(what_is_there(starter, data))
    else:
        digests = _digests_of(model)
    if model.lora is not None:
        merged = digest_once(merged_lora(model.lora))
        digests |= {"digest": digest_of({"base": digests["digest"], "lora": merged}), "lora": merged}
    return {"dataset": data.path, "model": model.path, **digests}


def what_is_there(starter: StarterConfig, data: DataConfig) -> str:
    """Says where the dataset and the small model are, and what installs a judge of the dataset if there is none."""
    if data.path != starter.dataset:
        return f"Base model: {starter.model}"
    world, made = find_world(starter.world), f"Dataset: {starter.dataset}   Base model: {starter.model}"
    if not world.worker_judges or world.installed_judges:
        return made
    return (
        f"{made}\nNo judge is installed. One would show whether a gain carries over to a score other than the"
        f" reward: make install-worker NAME={next(iter(world.worker_judges))}"
    )


def _digests_of(model: ModelConfig) -> dict[str, str | None]:
    content = content_digest(model.path)
    # The same files elsewhere are the same model; the files of a hub id are known by their revision.
    recipe = {"path": model.path, "revision": model.revision} if content is None else {"content": content}
    return {"digest": digest_of(recipe), "content": content, "commit": model.revision if content is None else None}
