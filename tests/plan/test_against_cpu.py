"""A plan's peak memory against what torch's own profiler sees of the same step with real tensors on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plan.configurations import parameters_of
from visual_grpo import components
from visual_grpo.config import Parameters
from visual_grpo.grpo import update
from visual_grpo.plan.dry_run import DryRunner, records_for
from visual_grpo.plan.model import planned_model
from visual_grpo.plan.phases import replaced

FEW: Mapping[str, Any] = {"steps": 2, "prompts_per_step": 2, "group_size": 4, "kl_weight": 0.01}


def small(environment: str, folder: Path | None, changes: Mapping[str, Any]) -> Parameters:
    own = {"model": {"path": str(folder), "device": "cpu"}, "data": {"height": 64, "width": 96}} if folder else {}
    config = parameters_of(environment, {"grpo": FEW, "rewards": {"planned": {"function": "x:y"}}, **own, **changes})
    return config.model_copy(update={"model": config.model.model_copy(update={"device": "cpu"})})


def measured(runner: DryRunner, model: Any) -> int:
    """The most bytes that the first two steps of ``model`` have beside its weights; the second has AdamW's moments."""
    trainer: Any = components.build_trainer(runner.config, runner.planned.plan, model, runner.scorer)
    memory = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    single = replaced(update, "in_double", lambda _: lambda parameter: False)  # As on a GPU.
    with records_for(runner.config, 2) as records, single, memory:
        assert len(list(trainer.fit(records))) == 2
    events: Any = memory.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(change for _, change in changes))


@pytest.mark.parametrize("module", ["ar", "dit"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_small_glm_image(pipeline_folder, module, checkpointed):
    policy = {"train": module, "gradient_checkpointing": checkpointed}
    config = small("base", pipeline_folder, {"policy": policy})
    runner = DryRunner(config, planned_model(config))
    planned = runner.step().peak - runner.weights
    model = components.build_model(config, str(pipeline_folder))
    assert planned == pytest.approx(measured(runner, model), rel=0.1)


def test_large_adapters_have_their_moments_from_the_second_step_on(pipeline_folder):
    policy = {"train": "ar", "gradient_checkpointing": True, "lora": {"rank": 512}}
    config = small("base", pipeline_folder, {"policy": policy, "grpo": {**FEW, "updates_per_rollout": 1}})
    runner = DryRunner(config, planned_model(config))
    trained = sum(p.nbytes for own in runner.trainer.modules.values() for p in own.parameters)
    planned = runner.step().peak - runner.weights
    assert 2 * trained > 0.25 * planned, "or nothing would be shown"
    model = components.build_model(config, str(pipeline_folder))
    assert planned == pytest.approx(measured(runner, model), rel=0.1)


def test_a_small_qwen2_5_vl(tmp_path):
    from visual_grpo.starter.qwen2_5_vl.model import build_model, build_processor

    size = parameters_of("negative_points", {}).data
    processor = build_processor(size.height, size.width)
    for part in (build_model(processor, 0), processor):
        part.save_pretrained(tmp_path)
    config = small("negative_points", None, {"model": {"path": str(tmp_path)}})
    runner = DryRunner(config, planned_model(config))
    planned = runner.step().peak - runner.weights
    assert planned == pytest.approx(measured(runner, components.build_model(config, str(tmp_path))), rel=0.1)


def test_a_saved_model_is_planned_by_its_configuration_files_alone(pipeline_folder, tmp_path):
    import shutil

    without = tmp_path / "model"
    shutil.copytree(pipeline_folder, without)
    for file in without.rglob("*.safetensors"):
        file.unlink()
    plans = []
    for folder in (pipeline_folder, without):
        config = small("base", folder, {})
        planned = planned_model(config)
        assert all(p.device.type == "meta" for part in planned.networks.values() for p in part.parameters())
        plans.append(DryRunner(config, planned).weights)
    saved = sum(file.stat().st_size for file in pipeline_folder.rglob("*.safetensors"))
    assert plans[0] == plans[1]
    assert plans[0] == pytest.approx(saved, rel=0.1), "with its adapter and without the files' headers"


def test_the_first_step_of_samples_that_share_their_noise_counts_less(pipeline_folder):
    """Of 2 x 3 forwards a row, the first unconditional one is done once for the 4 rows of a group."""
    flops = []
    for shared in (True, False):
        changes = {
            "policy": {"train": "ar", "share_start_noise": shared, "decode_guidance_scale": None},
            "sampling": {"rollout": {"steps": 3, "guidance_scale": 1.5}},
        }
        config = small("base", pipeline_folder, changes)
        step = DryRunner(config, planned_model(config)).step()
        flops.append(step.phases["denoising"].flops)
    assert flops[0] / flops[1] == pytest.approx((3 + 0.25 + 2) / 6, rel=0.01)
