"""A plan's peak memory against what torch's own profiler sees of the same step with real tensors on a CPU."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.operations.plan.configurations import parameters_of
from tests.replacing import replaced
from visual_grpo.config import Parameters
from visual_grpo.grpo import optimizer
from visual_grpo.operations.plan.dry_run import DryRunner, planned_model, planned_trainer, records_for
from visual_grpo.operations.plan.meter import Meter
from visual_grpo.training import components

FEW: Mapping[str, Any] = {"steps": 2, "prompts_per_step": 2, "group_size": 4, "kl_weight": 0.01}


def small(environment: str, folder: Path | None, changes: Mapping[str, Any]) -> Parameters:
    own: dict[str, Any] = {}
    if folder:
        own = {"model": {"path": str(folder), "device": "cpu"}, "data": {"height": 64, "width": 96}}
    if environment == "base":
        own["sampling"] = {"rollout": {"steps": 3}}
    config = parameters_of(environment, {"grpo": FEW, "rewards": {"planned": {"function": "x:y"}}, **own, **changes})
    return config.model_copy(update={"model": config.model.model_copy(update={"device": "cpu"})})


def measured(runner: DryRunner, model: Any) -> int:
    """The most bytes that the first two steps of ``model`` have beside its weights; the second has AdamW's moments."""
    trainer = planned_trainer(replace(runner.planned, model=model))
    memory = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    single = replaced(optimizer, "in_double", lambda _: lambda parameter: False)  # As on a GPU.
    with records_for(runner.config.data, runner.config.plan.prompt_words, 2) as records, single, memory:
        assert len(list(trainer.fit(records))) == 2
    events: Any = memory.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(change for _, change in changes))


def assert_planned(config: Parameters) -> tuple[DryRunner, int]:
    """The plan's bytes beside the weights are those that are measured."""
    runner = DryRunner(planned_model(config))
    planned = runner.step().peak - runner.weights
    assert planned == pytest.approx(measured(runner, components.build_model(runner.planned.spec)), rel=0.1)
    return runner, planned


@pytest.mark.parametrize(
    ("module", "checkpointed", "rank"),
    [
        pytest.param("ar", False, 8, marks=pytest.mark.slow),
        pytest.param("dit", False, 8, marks=pytest.mark.slow),
        pytest.param("dit", True, 8, marks=pytest.mark.slow),
        ("ar", True, 512),
    ],
)
def test_a_small_glm_image(pipeline_folder, module, checkpointed, rank):
    policy = {"train": module, "gradient_checkpointing": checkpointed, "lora": {"rank": rank}}
    grpo = dict(FEW) | ({"updates_per_rollout": 1} if rank == 512 else {})
    runner, planned = assert_planned(small("base", pipeline_folder, {"policy": policy, "grpo": grpo}))
    trained = sum(p.nbytes for own in runner.trainer.modules.values() for p in own.parameters)
    assert rank < 512 or 2 * trained > 0.25 * planned, "or nothing of AdamW's moments would be shown"


def save_small_qwen2_5_vl(folder: Path) -> None:
    from examples.scenes.small_qwen2_5_vl import build_model, build_processor

    size = parameters_of("negative_points", {}).data
    processor = build_processor(size.height, size.width)
    for part in (build_model(processor, 0), processor):
        part.save_pretrained(folder)


@pytest.mark.slow
def test_a_small_qwen2_5_vl(tmp_path):
    save_small_qwen2_5_vl(tmp_path)
    assert_planned(small("negative_points", None, {"model": {"path": str(tmp_path)}}))


def test_a_saved_model_is_planned_by_its_configuration_files_alone(pipeline_folder, tmp_path):
    without = shutil.copytree(pipeline_folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    plans = []
    for folder in (pipeline_folder, without):
        config = small("base", folder, {})
        planned = planned_model(config)
        assert all(p.device.type == "meta" for part in planned.networks.values() for p in part.parameters())
        plans.append(DryRunner(planned).weights)
    saved = sum(file.stat().st_size for file in pipeline_folder.rglob("*.safetensors"))
    assert plans[0] == plans[1]
    assert plans[0] == pytest.approx(saved, rel=0.1), "with its adapter and without the files' headers"


def test_the_first_step_of_samples_that_share_their_noise_counts_less(pipeline_folder):
    """Of 2 x 2 forwards a row, the first unconditional one is done once for the 4 rows of a group."""
    flops = []
    for shared in (True, False):
        changes = {
            "policy": {"train": "ar", "share_start_noise": shared, "decode_guidance_scale": None},
            "sampling": {"rollout": {"steps": 2, "guidance_scale": 1.5}},
        }
        config, meter = small("base", pipeline_folder, changes), Meter()
        [own] = planned_trainer(planned_model(config)).modules.values()
        with records_for(config.data, config.plan.prompt_words, 1) as records, meter.counting():
            own.policy.rollout(records, 4, torch.Generator())
        flops.append(meter.phases["denoising"].flops)
    assert flops[0] / flops[1] == pytest.approx((2 + 0.25 + 1) / 4, rel=0.01)


@pytest.mark.parametrize(("task", "sources"), [("t2i", 0), ("i2i", 2), ("mixed", 2), ("segmentation", 1)])
def test_planned_records_have_the_sources_of_the_dearest_kind(task, sources):
    config = parameters_of("base", {"data": {"height": 32, "width": 32}}).data.model_copy(update={"task": task})
    with records_for(config, 3, 2, sources=2) as records:
        assert [len(record.source_images) for record in records] == [sources] * 2


@pytest.mark.parametrize("environment", [pytest.param("base", marks=pytest.mark.slow), "negative_points"])
def test_two_tokens_count_as_all_of_them(environment, pipeline_folder, tmp_path):
    """Beside them, only the keys and values of earlier tokens, of which the plan reads too many."""
    if environment == "negative_points":
        save_small_qwen2_5_vl(pipeline_folder := tmp_path)
    config = small(environment, pipeline_folder, {"policy": {"train": "ar" if environment == "base" else "vl"}})
    counted = []
    for shortens in (False, True):
        planned, meter, words = planned_model(config), Meter(), config.plan.prompt_words
        meter.shortens = shortens
        with records_for(config.data, words, 2) as records, torch.no_grad(), meter.counting():
            planned.model.generate(records, [0, 1], config.sampling.rollout)
        counted.append(meter)
    real, short = (sum_of(meter) for meter in counted)
    assert short["kernels"] == pytest.approx(real["kernels"], rel=0.02)
    assert short["flops"] == pytest.approx(real["flops"], rel=0.1)
    assert counted[0].peak == pytest.approx(counted[1].peak, rel=0.05)


def sum_of(meter: Meter) -> dict[str, float]:
    return {name: sum(getattr(row, name) for row in meter.phases.values()) for name in ("kernels", "flops")}
