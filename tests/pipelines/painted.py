"""A catalog for the baseline and evaluate pipelines, and a painter in the place of GLM-Image."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from kedro.framework.hooks import hook_impl
from kedro.framework.hooks.manager import _create_hook_manager
from kedro.io import AbstractDataset, DataCatalog, MemoryDataset
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from kedro.runner import SequentialRunner
from PIL import Image

from tests.evaluation.defaults import parameters
from tests.evaluation.painter import Painter, records
from tests.training.few_steps import resolved
from visual_grpo.config import Parameters
from visual_grpo.data.datasets import PATH, FolderDataset, RecordsDataset
from visual_grpo.data.manifest import write_manifest
from visual_grpo.hooks.inputs_and_outputs import OutputHooks
from visual_grpo.hooks.parameters import RUN_SPEC, parameter_entries
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.training import components

GAIN = 0.2
"""How much brighter the trained painter paints."""
STARTER_REPORT = {"model": "the model", "digest": "digest", "content": None}
BRIGHTNESS = {"brightness": {"function": "tests.evaluation.painter:brightness", "weight": 1.0}}
SMALL = {"images_per_prompt": 2, "batch_size": 3, "bootstrap_samples": 200}
MADE_BY = {
    "baseline": "baseline",
    "adapters": "train",
    "trained": "evaluate",
    "evaluation_report": "evaluate",
    "reward_report": "reward_report",
    "votes": "vote",
}


def folders(parent: Path, made_by: Mapping[str, str]) -> dict[str, AbstractDataset[Any, Any]]:
    """Catalog entries of folders, as conf/base/catalog.yml has them."""
    return {"draft": MemoryDataset("a path")} | {
        name: FolderDataset(filepath=str(parent / name), metadata={"made_by": maker}) for name, maker in made_by.items()
    }


def run_nodes(pipeline: Pipeline, catalog: DataCatalog, *hooks: object) -> dict[str, Any]:
    """Runs nodes with the hook that gives each its paths, and no other hook of the project."""
    for name in pipeline.inputs():
        if name.startswith(PATH):
            catalog[name] = MemoryDataset("a path")
    manager = _create_hook_manager()
    for hook in (OutputHooks(), *hooks):
        manager.register(hook)
    return SequentialRunner().run(pipeline, catalog, hook_manager=manager)


class Failures:
    """Notes the nodes that fail."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    @hook_impl
    def on_node_error(self, node: Node) -> None:
        self.names.append(node.name)


class Project:
    """Three held-out prompts, two eval prompts with two records each, a training prompt and two that are sealed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.policies: list[tuple[str, Path | None]] = []
        monkeypatch.setattr(components, "build_model", self._build_model)
        self.prepare(train=1)

    def prepare(self, train: int, held_out: int = 3, evaluated: int = 2, targets: int = 0) -> None:
        """Writes the records, with so many prompts; the first held-out ones have a target, dark on the left."""
        found = [
            *records("held_out", held_out),
            *records("eval", evaluated, per_prompt=2),
            *records("train", train),
            *records("sealed", 2),
        ]
        rows: list[dict[str, Any]] = [
            {"id": r.id, "prompt": r.prompt, "split": r.split, "metadata": "{}"} for r in found
        ]
        Image.fromarray(np.repeat([[0] * 16 + [255] * 16], 32, 0).astype("uint8")).save(self.folder / "target.png")
        for row in rows[:targets]:
            row["target_image"] = "target.png"
        write_manifest(self.folder / "records.parquet", rows)

    def run(
        self,
        pipeline: Pipeline,
        failed: list[str] | None = None,
        rewards_used: Mapping[str, Any] = BRIGHTNESS,
        base_model: Mapping[str, Any] = STARTER_REPORT,
        **changes: Any,
    ) -> DataCatalog:
        """Runs a pipeline with the default parameters, a few images per prompt and ``changes``.

        ``failed`` gets the name of the node that fails.
        """
        tree = parameters(**({"evaluation": SMALL} | changes)).model_dump(mode="json")
        tree |= {
            "reward": None,
            "rewards": rewards_used,
            "modules": {},
            "output": str(self.folder),
            "model": tree["model"] | {"family": "glm_image", "path": base_model["model"]},
        }
        config = Parameters.model_validate(tree)
        memory = parameter_entries(config) | {
            RUN_SPEC: resolved(config, changes.get("model", {}).get("path") or base_model["model"]),
            "base_model": dict(base_model),
        }
        catalog = DataCatalog(
            {name: MemoryDataset(value) for name, value in memory.items()}
            | {"records": RecordsDataset(filepath=str(self.folder / "records.parquet"))}
            | {"evaluation": MemoryDataset(), "result": MemoryDataset()}
            | folders(self.folder, MADE_BY)
        )
        run_nodes(pipeline, catalog, Failures(failed if failed is not None else []))
        return catalog

    def train(self, digest: str = "digest", **facts_too: Any) -> None:
        """Leaves what the train pipeline leaves, as far as evaluation reads it."""
        adapters = self.folder / "adapters"
        for module in ("ar", "dit"):
            (adapters / module).mkdir(parents=True)
        facts = {"steps": 12, "best_step": 10, "adapter": "best", "model_digest": digest} | facts_too
        (adapters / "training.json").write_text(json.dumps(facts), encoding="utf-8")
        pd.DataFrame({"step": [1, 2], "reward/total": [0.4, 0.5]}).to_csv(adapters / "training.csv", index=False)

    def _build_model(self, spec: RunSpec, adapters: Path | None = None) -> Painter:
        self.policies.append((spec.config.model.path, adapters))
        return Painter(gain=0.0 if adapters is None else GAIN)
