"""The whole flow of conf/negative_points, from drawn scenes to the evaluation, with a few steps of everything."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kedro.config import OmegaConfigLoader
from kedro.io import AbstractDataset, DataCatalog, MemoryDataset
from kedro_datasets.json import JSONDataset
from peft import PeftModel
from safetensors.torch import load_file
from transformers import Qwen2_5_VLForConditionalGeneration

from examples.scenes import pretrain_vl, small_qwen2_5_vl
from examples.scenes.scenes import ANSWER_LENGTH, draw_scene_records
from tests.pipelines.painted import folders, run_nodes
from tests.rewards.segmentation.small_sam2 import save_sam2
from tests.starter.tasks import in_this_process
from tests.training.few_steps import resolved
from visual_grpo.common.images import read_size
from visual_grpo.common.types import PromptRecord, StepMetrics, TextSample
from visual_grpo.config import Parameters
from visual_grpo.config.pipelines import DATA_FLOW
from visual_grpo.config.validation import validate
from visual_grpo.data.datasets import RecordsDataset
from visual_grpo.hooks.parameters import RUN_SPEC, parameter_entries
from visual_grpo.models.run_spec import resolve
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.settings import CONFIG_LOADER_ARGS
from visual_grpo.starter import build
from visual_grpo.starter.world_defaults import with_world
from visual_grpo.training import components
from visual_grpo.training.resuming import resumed_run
from visual_grpo.training.run import Callbacks, TrainingRun

ROOT = Path(__file__).parents[2]
SILENT = {"signal_check": {"rollouts": 0}}  # Random weights have nothing to learn.
MADE_BY = {"baseline": "baseline", "adapters": "train", "trained": "evaluate", "evaluation_report": "evaluate"}


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataCatalog:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "run_side_by_side", in_this_process)
    monkeypatch.setattr(pretrain_vl, "POOL", 20)
    monkeypatch.setattr(pretrain_vl, "_BATCH", 4)
    changes = {
        "starter": {"records_per_prompt": 4, "vl_steps": 1},
        "model": {"options": {"max_tokens": 6}},
        "grpo": {"steps": 1, "prompts_per_step": 2, "group_size": 3},
        "evaluation": {"prompts": 2, "max_prompts": 2, "images_per_prompt": 1, "bootstrap_samples": 100},
        "tracking": {"images_every": 0},
        "data": {"held_out_share": 0.3, "eval_share": 0.2},
    }
    config = loaded("negative_points", output=str(tmp_path), **changes)
    typed = parameter_entries(config) | {RUN_SPEC: resolve(config)}
    reports = ("base_model", "data_report", "evaluation")
    entries: dict[str, AbstractDataset[Any, Any]] = {
        **{name: MemoryDataset(value) for name, value in typed.items()},
        "records": RecordsDataset(filepath=str(tmp_path / "05_model_input/records.parquet")),
        "training_history": MemoryDataset(),
        **{name: JSONDataset(filepath=str(tmp_path / f"{name}.json")) for name in reports},
        **folders(tmp_path, MADE_BY),
    }
    return DataCatalog(entries)


@pytest.mark.slow
def test_from_scenes_to_an_evaluation(catalog: DataCatalog, tmp_path: Path) -> None:
    for name in DATA_FLOW:
        run_nodes(register_pipelines()[name], catalog)
    report = catalog.load("data_report")
    assert report["rejected"]["total"] == 0
    assert report["warnings"] == [], "the independent units are the images, not the queries"
    entries = {(e["sampler"], e["split"], e["name"]) for e in catalog.load("evaluation")["rewards"]}
    for sampler in ("rollout", "eval"):
        for name in ("gIoU", "gIoU_without", "cIoU", "cIoU_without", "contrast", "malformed"):
            assert (sampler, "held_out", f"negative_points/{name}") in entries
    assert not any(sampler == "sde" for sampler, _, _ in entries)
    (picture, *_) = sorted((tmp_path / "trained/eval").glob("*.png"))
    assert read_size(picture) == (192, 3 * 192 + 2 * 4)
    assert (tmp_path / "evaluation_report" / "evaluation.html").is_file()

    facts = catalog.load("base_model")
    plain = Qwen2_5_VLForConditionalGeneration.from_pretrained(facts["model"])
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "adapters" / "vl")).state_dict()
    saved = load_file(tmp_path / "adapters" / "vl" / "adapter_model.safetensors")
    assert saved
    for name, value in saved.items():
        torch.testing.assert_close(loaded[name.replace(".weight", ".default.weight")], value, rtol=0, atol=0)


def loaded(environment: str, **changes: Any) -> Parameters:
    loader = OmegaConfigLoader(
        str(ROOT / "conf"), env=environment, runtime_params={"policy": SILENT, **changes}, **CONFIG_LOADER_ARGS
    )
    return validate(with_world(loader["parameters"], environment))


def make_run(config: Parameters, folder: Path) -> TrainingRun:
    """On a small random Qwen2.5-VL and drawn scenes, both left in ``folder`` for the next call."""
    if not (folder / "model").exists():
        processor = small_qwen2_5_vl.build_processor(config.data.height, config.data.width)
        small_qwen2_5_vl.build_model(processor, seed=0).save_pretrained(folder / "model")
        processor.save_pretrained(folder / "model")
        draw_scene_records(folder / "data", 2, config.data.height, config.data.width, seed=0)
    rows = [json.loads(line) for line in (folder / "data" / "records.jsonl").read_text().splitlines()]
    records = [
        PromptRecord(
            id=row["id"],
            prompt=row["query"],
            source_images=(folder / "data" / row["image"],),
            target_image=folder / "data" / row["mask"],
            metadata={"box": row["box"], "points": row["points"]},
        )
        for row in rows
    ]
    spec = resolved(config, folder / "model")
    qwen, scorer = components.build_model(spec), components.build_scorer(spec)
    trainer = components.build_trainer(spec, qwen, scorer)
    return TrainingRun(
        spec,
        qwen,
        scorer,
        trainer,
        data={"train": records[:12], "eval": records[12:]},
        provenance={"parameters": config.public()},
        run_id=None,
        resumed=resumed_run(config),
    )


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def config(name: str, resume: str) -> Parameters:
        return loaded(
            "negative_points",
            resume=resume,
            # Answers that no reward can read differ by their length alone; a reward that is never 0 for all.
            rewards={"negative_points": None, "length": {"function": "tests.pipelines.test_negative_points:length"}},
            model={"options": {"max_tokens": 8}},
            grpo={"steps": 3, "prompts_per_step": 2, "group_size": 3},
            evaluation={"every": 2, "prompts": 2},
            tracking={"checkpoint_every": 1, "checkpoints": str(tmp_path / name)},
        )

    def stop(metrics: StepMetrics, row: dict[str, float]) -> None:
        if metrics.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    whole, first = (make_run(config(name, "never"), tmp_path) for name in ("whole", "parts"))
    whole.run(Callbacks(on_step=lambda metrics, row: None, note=print))
    first.run(Callbacks(on_step=stop, note=print))
    assert first.stopped_by
    second = make_run(config("parts", "auto"), tmp_path)
    second.run(Callbacks(on_step=lambda metrics, row: None, note=print))
    expected, got = whole.model.adapters.state(), second.model.adapters.state()
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert not all(torch.equal(expected[name], value) for name, value in first.model.adapters.state().items())
    assert second.progress.best_step == whole.progress.best_step


def length(prompts: Sequence[PromptRecord], samples: Sequence[TextSample]) -> list[float]:
    return [float(len(sample.text)) for sample in samples]


def test_the_released_models_configuration_trains_small_ones(tmp_path: Path) -> None:
    """conf/qwen2_5_vl as it stands (bf16, gradient checkpointing, SAM2) but for size and length."""
    save_sam2(tmp_path / "sam2")
    segmenter = {"kind": "sam2", "path": str(tmp_path / "sam2"), "device": "cpu"}
    config = loaded(
        "qwen2_5_vl",
        data={"height": 64, "width": 64},
        model={"path": str(tmp_path / "model"), "device": "cpu", "options": {"max_tokens": 6}},
        rewards={
            "negative_points": {"options": {"segmenter": segmenter}},
            "length": {"function": "tests.pipelines.test_negative_points:length"},
        },
        grpo={"steps": 2, "warmup_steps": 0, "prompts_per_step": 2, "group_size": 3},
        evaluation={"prompts": 1},
        tracking={"checkpoints": str(tmp_path / "checkpoints")},
    )
    assert config.model.dtype == "bfloat16"
    assert config.policy.gradient_checkpointing
    run = make_run(config, tmp_path)
    before = run.model.adapters.state()
    run.run(Callbacks(on_step=lambda metrics, row: None, note=print))
    after = run.model.adapters.state()
    assert [name for name in before if "lora_B" in name and torch.equal(before[name], after[name])] == []
    assert run.progress.history[0]["part/negative_points/truncated"] > 0.5


def test_the_configuration_leaves_room_for_an_answer() -> None:
    """An answer that is taught must not be cut off."""
    tree: Any = loaded("negative_points")
    assert tree.model.options["max_tokens"] >= ANSWER_LENGTH
    step = small_qwen2_5_vl.PATCH * small_qwen2_5_vl.MERGE
    assert tree.data.height % step == tree.data.width % step == 0
