"""Fit, batches, seconds and advice."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from huggingface_hub import constants

from examples.flow_models.models import build_sd3_transformer
from tests.hub import hub
from tests.models.families.sd3 import tiny
from tests.operations.plan.configurations import parameters_of
from visual_grpo.common.errors import UserError
from visual_grpo.models.run_spec import resolve
from visual_grpo.models.without_weights import frozen
from visual_grpo.operations.plan.dry_run import planned_model, segmenter_of
from visual_grpo.operations.plan.estimate import (
    BANDWIDTH_SHARE,
    FLOPS_SHARE,
    LAUNCH_SECONDS,
    changes,
    find_card,
    largest_batches,
    make_plan,
    phase_seconds,
    smallest_card,
)
from visual_grpo.operations.plan.meter import Meter, Phase
from visual_grpo.pipelines import plan as nodes


def seconds(flops: float, moved: float, kernels: int, card: str = "H100", dtype: str = "bfloat16") -> float:
    return phase_seconds(Phase(flops=flops, moved=moved, kernels=kernels), find_card(card), dtype)


def test_the_longer_of_the_work_and_its_launches_counts():
    assert seconds(1e15, 3.35e12, 10) == pytest.approx(1 / (FLOPS_SHARE * 0.989) + 1 / BANDWIDTH_SHARE)
    assert seconds(10, 10, 2397) == pytest.approx(2397 * LAUNCH_SECONDS)
    assert seconds(1e15, 0, 10, "A100 80GB") == pytest.approx(1e15 / (FLOPS_SHARE * 312e12))
    assert seconds(1e15, 0, 10, dtype="float32") > 10 * seconds(1e15, 0, 10)


MEASURED = {
    "sd3, denoising": (718e12, 3.37e12, 121_337, 3.42),
    "sd3, reference": (88e12, 0.344e12, 18_289, 0.567),
    "sd3, replay of 16 rows": (178e12, 1.0e12, 36_852, 1.39),
    "flux2_klein, denoising": (2962e12, 9.94e12, 129_631, 8.06),
    "flux2_klein, replay of 2 rows": (1008e12, 4.06e12, 135_911, 4.52),
    "glm_image, denoising": (1984e12, 3.77e12, 35_723, 5.05),
    "glm_image, replay of 8 rows": (214e12, 0.81e12, 27_510, 1.03),
    "qwen2_5_vl 3B, replay of 2 rows": (178e12, 0.69e12, 83_447, 2.58),
}
"""(operations, bytes, kernels) as they are counted, seconds on the H200 of docs/experiments/gpu.md."""


@pytest.mark.parametrize("phase", MEASURED)
def test_the_estimate_is_near_what_was_measured(phase):
    flops, moved, kernels, measured = MEASURED[phase]
    assert seconds(flops, moved, kernels, "H200") == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("flops", "moved", "kernels", "measured"),
    [(41e12, 4.4e12, 1_024_577, 5.26), (70e12, 9.4e12, 1_436_081, 7.75)],
    ids=["qwen2_5_vl 3B, 8 answers of 512 tokens", "glm_image, 8 images of 512 pixels"],
)
def test_tokens_of_a_graph_take_what_was_measured(flops, moved, kernels, measured):
    phase = Phase(flops=flops, moved=moved, kernels=kernels, captured=0.98 * kernels)
    assert phase_seconds(phase, find_card("H200"), "bfloat16") == pytest.approx(measured, rel=0.2)


def test_a_card_is_found_by_its_name_and_an_unknown_one_is_told_with_all():
    assert find_card("rtx 4090") is find_card("RTX 4090")
    with pytest.raises(UserError, match=r"not a known card. Did you mean 'H100'\? Known: L4 \(22 GiB\), .*H200"):
        find_card("H10")
    assert smallest_card(23 * 10**9).name == "RTX 4090"
    assert smallest_card(10**12).name == "H200"


@pytest.mark.parametrize(("usable", "denoise", "micro"), [(50, 0, 0), (150, 1, 2), (300, 4, 8), (10**6, 32, 32)])
def test_the_largest_batches_follow_from_what_each_phase_holds_beside_its_rest(usable, denoise, micro):
    config = parameters_of(
        "sd3", {"policy": {"denoise_batch": 2}, "grpo": {"micro_batch_size": 4, "prompts_per_step": 4, "group_size": 8}}
    )
    meter = Meter()
    meter.phases = {
        "denoising": Phase(peak=200, rest=100),
        "dit: replay and gradient": Phase(peak=200, rest=100),
        "reference of denoising": Phase(peak=180, rest=80),
    }
    assert largest_batches(resolve(config), meter, usable) == {
        "policy.denoise_batch": {"set": 2, "largest": denoise},
        "grpo.micro_batch_size": {"set": 4, "largest": micro},
    }


def test_a_joint_rollout_decodes_each_sample_of_the_tokens_several_times():
    own = {"ar": {"group_size": 3}, "dit": {"group_size": 4}}
    policy = {"train": "all", "stages": "joint", "denoise_batch": 2}
    config = parameters_of("glm_image", {"policy": policy, "modules": own, "grpo": {"prompts_per_step": 2}})
    meter = Meter()
    phases = ("ar: replay and gradient", "dit: replay and gradient", "denoising")
    meter.phases = dict.fromkeys(phases, Phase(peak=200, rest=100))
    found = largest_batches(resolve(config), meter, 10**12)
    assert {name: batch["largest"] for name, batch in found.items()} == {
        "modules.ar.micro_batch_size": 2 * 3,
        "modules.dit.micro_batch_size": 2 * 3 * 4,
        "policy.denoise_batch": 2 * 3 * 4,
    }


def test_what_to_change_is_said_in_parameters():
    card = find_card("RTX 4090")
    batches = {"policy.denoise_batch": {"set": 8, "largest": 3}, "policy.decode_batch": {"set": 4, "largest": 9}}
    over, smaller, offload = card.usable + 1, "policy.denoise_batch=3 (set: 8)", "model.offload=phases (one network on"
    for given, peak, step, said in (
        ({}, card.usable, 0, []),
        ({}, over, card.usable, ["evaluation.batch_size=8 (set: 16; a step fits, the evaluation does not)"]),
        ({}, over, over, [smaller, offload, "model.base_weights=8bit", "plan.gpu=L40S"]),
        (
            {"policy": {"gradient_checkpointing": False}, "model": {"base_weights": "8bit"}},
            *(over, over),
            [smaller, "policy.gradient_checkpointing=true", offload, "model.base_weights=4bit", "plan.gpu=L40S"],
        ),
        ({"model": {"base_weights": "4bit"}}, over, 10**12, [smaller, offload, "plan.gpu=L40S"]),
        ({"distributed": {"processes": 2, "sharded": True}}, over, over, [smaller, "plan.gpu=L40S"]),
    ):
        found = changes(resolve(parameters_of("sd3", given)), card, peak, step, batches, 4)
        assert len(found) == len(said)
        assert all(line.startswith(start) for line, start in zip(found, said, strict=True)), found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("sd3")
    tiny.pipeline(t5=False).save_pretrained(folder)
    configuration = folder / "transformer/config.json"
    configuration.write_text(configuration.read_text().replace('"num_layers": 3', '"num_layers": 1'))
    return folder


def tiny_sd3(folder: Path | str, **given: Any) -> Any:
    few: dict[str, Any] = {
        "model": {
            "path": str(folder),
            "dtype": "float32",
            "options": {"max_sequence_length": 0},
            **given.pop("model", {}),
        },
        "data": {"height": 64, "width": 96},
        "policy": {"flow": {"window_steps": 1}},
        "sampling": {"rollout": {"steps": 2, "guidance_scale": 1.0}, "eval": {"steps": 1, "guidance_scale": 1.0}},
        "grpo": {"prompts_per_step": 2, "group_size": 2, "micro_batch_size": 2},
        "evaluation": {"batch_size": 2, "prompts": 2, "max_prompts": None, "controls": []},
        "plan": {"gpu": None, "prompt_words": 5},
    }
    return parameters_of("sd3", {**few, **given})


@pytest.fixture(scope="module")
def plan(model: Path) -> dict[str, Any]:
    return make_plan(tiny_sd3(model))


def test_the_answer_stands_in_the_first_lines_and_names_the_smallest_card(model, plan, capsys, monkeypatch):
    monkeypatch.setattr(nodes, "make_plan", lambda _: plan)
    nodes.require_fit(nodes.plan_training(tiny_sd3(model)))
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{model} fits on 1 x L4: at most 0.")
    assert second.startswith("Estimated: ")
    assert third.startswith("Largest batches, one changed at a time: grpo.micro_batch_size ")
    assert "--pipeline=gpu_check" in fourth
    with pytest.raises(UserError, match=r"does not fit on 1 x L4: .*\nWhat would help: a=1; b=2$"):
        nodes.require_fit({**plan, "fits": False, "changes": ["a=1", "b=2"]})


def test_every_process_needs_memory_of_the_host(model, plan):
    elements = 4 * sum(plan["parameters"].values()) / 1e9
    assert plan["host_gb"] == pytest.approx(elements)
    odd = {"prompts_per_step": 3, "group_size": 2, "micro_batch_size": 2}
    two = make_plan(tiny_sd3(model, model={"offload": "phases"}, distributed={"processes": 2}, grpo=odd))
    assert 2 * elements < two["host_gb"] < 4 * elements, "pinned in powers of two"
    assert two["copied_from_host_gb"] > 0
    assert two["peak_gb"] < plan["peak_gb"]
    assert two["largest_batches"]["grpo.micro_batch_size"]["largest"] == 2 * 2, "the larger share: two groups"


def test_a_model_that_was_downloaded_as_the_refusal_says_is_planned_by_its_files(model, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="hf download") as refused:
        planned_model(tiny_sd3("someone/small-sd3"))
    [command] = [line for line in str(refused.value).splitlines() if "hf download" in line]
    with hub("someone/small-sd3", model) as downloaded:
        told = [str(Path(sys.executable).with_name("hf")), *shlex.split(command)[1:]]
        subprocess.run(
            told, check=True, env={**os.environ, "HF_ENDPOINT": constants.ENDPOINT, "HF_HUB_CACHE": str(tmp_path)}
        )
    assert not any(file.endswith(".safetensors") for file in downloaded)
    assert planned_model(tiny_sd3("someone/small-sd3")).source.startswith(f"the configuration files in {tmp_path}")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"plan": {"gpu": "GTX 1"}}, "plan.gpu is 'GTX 1'"),
        ({"distributed": {"processes": 9}}, "distributed.processes is 9, but a step has 8 prompts"),
        ({"model": {"path": "zai-org/GLM-Imag", "family": "glm_image"}}, "mean .zai-org/GLM-Image.*hf download"),
        ({"starter": {"model": "no/such"}}, "no/such has no configuration files.*make the starter's"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(given, said):
    with pytest.raises(UserError, match=f"(?s){said}"):
        make_plan(parameters_of("base", given))


def test_the_segmenter_of_a_reward_is_counted():
    assert list(segmenter_of(parameters_of("qwen2_5_vl", {}).rewards)) == ["segmenter"]
    assert segmenter_of(parameters_of("sd3", {}).rewards) == {}


def test_a_module_without_weights_has_the_types_that_loading_gives(tmp_path):
    """Saved buffers follow the weights; what is made anew on loading does not."""
    build_sd3_transformer(64, 0).save_pretrained(tmp_path)
    loaded = SD3Transformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.float16)
    planned = frozen(lambda: SD3Transformer2DModel.from_config(loaded.config), torch.float16)
    found = {name: value.dtype for name, value in (*planned.named_parameters(), *planned.named_buffers())}
    assert found == {name: value.dtype for name, value in (*loaded.named_parameters(), *loaded.named_buffers())}
    assert "pos_embed.pos_embed" in found
