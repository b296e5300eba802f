"""The whole flow of conf/negative_points, from drawn scenes to the evaluation, with a few steps of everything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kedro.config import OmegaConfigLoader
from kedro.io import DataCatalog, MemoryDataset
from kedro.runner import SequentialRunner
from kedro_datasets.json import JSONDataset
from peft import PeftModel
from safetensors.torch import load_file
from transformers import Qwen2_5_VLForConditionalGeneration

import visual_grpo.pipelines.baseline as baseline
import visual_grpo.pipelines.data_preparation as data_preparation
import visual_grpo.pipelines.evaluate as evaluate
import visual_grpo.pipelines.starter as starter
import visual_grpo.pipelines.train as train
from visual_grpo.datasets import FolderDataset, RecordsDataset
from visual_grpo.images import read_size
from visual_grpo.parameters import validate
from visual_grpo.settings import CONFIG_LOADER_ARGS
from visual_grpo.starter.scenes import answers, model

ROOT = Path(__file__).parents[2]
MADE_BY = {"baseline": "baseline", "adapters": "train", "trained": "evaluate", "evaluation_report": "evaluate"}


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataCatalog:
    monkeypatch.chdir(tmp_path)
    changes = {
        "starter": {"records_per_prompt": 4, "vl_steps": 2},
        "grpo": {"steps": 2, "prompts_per_step": 2, "group_size": 3},
        "policy": {"signal_check": {"rollouts": 0}},
        "evaluation": {"prompts": 2, "max_prompts": 4, "bootstrap_samples": 100},
        "tracking": {"images_every": 1},
        "data": {"held_out_share": 0.3, "eval_share": 0.2},
    }
    loader = OmegaConfigLoader(str(ROOT / "conf"), env="negative_points", runtime_params=changes, **CONFIG_LOADER_ARGS)
    tree = validate(loader["parameters"]).model_dump(mode="json")
    reports = ("starter_report", "data_report", "evaluation")
    return DataCatalog(
        {"parameters": MemoryDataset(tree), "records": RecordsDataset(filepath=str(tmp_path / "records.parquet"))}
        | {"training_history": MemoryDataset()}
        | {name: JSONDataset(filepath=str(tmp_path / f"{name}.json")) for name in reports}
        | {n: FolderDataset(filepath=str(tmp_path / n), made_by=by) for n, by in MADE_BY.items()}
    )


def test_from_scenes_to_an_evaluation(catalog: DataCatalog, tmp_path: Path) -> None:
    for stage in (starter, data_preparation, baseline, train, evaluate):
        SequentialRunner().run(stage.create_pipeline(), catalog)
    report = catalog.load("data_report")
    assert report["rejected"]["total"] == 0
    assert not report["warnings"]
    entries = {(e["sampler"], e["split"], e["name"]) for e in catalog.load("evaluation")["rewards"]}
    for sampler in ("rollout", "stock"):
        for name in ("gIoU", "gIoU_without", "cIoU", "cIoU_without", "contrast", "malformed"):
            assert (sampler, "held_out", f"negative_points/{name}") in entries
    assert not any(sampler == "sde" for sampler, _, _ in entries)
    (picture, *_) = sorted((tmp_path / "trained" / "stock").glob("*.png"))
    assert read_size(picture) == (3 * 192 + 2 * 4, 192)
    assert (tmp_path / "evaluation_report" / "evaluation.html").is_file()

    facts = catalog.load("starter_report")
    plain = Qwen2_5_VLForConditionalGeneration.from_pretrained(facts["model"])
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "adapters" / "vl")).state_dict()
    saved = load_file(tmp_path / "adapters" / "vl" / "adapter_model.safetensors")
    assert saved
    for name, value in saved.items():
        torch.testing.assert_close(loaded[name.replace(".weight", ".default.weight")], value, rtol=0, atol=0)


def test_the_configuration_leaves_room_for_an_answer(catalog: DataCatalog) -> None:
    """An answer that is taught must not be cut off."""
    tree = validate(catalog.load("parameters"))
    assert tree.policy.vl.max_tokens >= answers.LENGTH
    step = model.PATCH * model.MERGE
    assert tree.data.height % step == tree.data.width % step == 0
