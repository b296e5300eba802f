"""The check of a GPU as far as a CPU can tell: what it runs, how it tells phases apart, what it reports."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models.families.sd3 import tiny as sd3
from tests.operations.plan.configurations import parameters_of
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Parameters
from visual_grpo.operations.gpu_measurement import Stopwatch, known_card, measure, single_module
from visual_grpo.operations.plan.dry_run import planned_model
from visual_grpo.pipelines.gpu_check import check, phase_rows, show

CPU = torch.device("cpu")


def small(folder: Path | None, **changes: Any) -> Parameters:
    given = {
        "grpo": {"group_size": 3, "micro_batch_size": 2},
        "rewards": {"planned": {"function": "x:y"}},
        "model": {"path": None if folder is None else str(folder), "device": "cpu"},
        "data": {"height": 64, "width": 96},
        **changes,
    }
    return parameters_of("base", given)


def test_a_module_is_trained_alone_with_few_prompts():
    config = parameters_of("glm_image", {"rewards": {"planned": {"function": "x:y"}}, "distributed": {"processes": 2}})
    case = single_module(config, "dit")
    assert (case.policy.train, case.distributed.processes) == ("dit", 1)
    assert (case.grpo_of("dit").prompts_per_step, case.grpo_of("dit").steps) == (1, 2)
    assert case.grpo_of("dit").learning_rate == config.grpo_of("dit").learning_rate


@pytest.mark.parametrize(
    ("module", "phases"), [("ar", {"tokens", "ar: replay and gradient", "AdamW"}), ("dit", {"denoising"})]
)
def test_a_step_is_taken_and_its_phases_told_apart(pipeline_folder, module, phases):
    found = measure(single_module(small(pipeline_folder), module))
    assert found["source"] == f"the weights in {pipeline_folder}"
    assert phases <= found["phases"].keys()
    assert found["samples"] == 3
    assert sum(row["seconds"] for row in found["phases"].values()) == pytest.approx(found["step_seconds"])
    first, second = found["metrics"]
    assert first["ratio/first_max_abs_log"] < 1e-4
    assert first["grad_norm"] > 0
    assert first["loss"] != second["loss"]


def test_what_happens_within_another_phase_belongs_to_it_alone():
    watch = Stopwatch(CPU)
    with watch.phase("outer"):
        time.sleep(0.02)
        with watch.phase("inner"):
            time.sleep(0.1)
    watch.stop()
    assert watch.phases["inner"].seconds >= 0.1
    assert 0.02 <= watch.phases["outer"].seconds < 0.1


def test_a_model_without_weights_gets_random_ones_of_its_size(pipeline_folder, tmp_path):
    shutil.copytree(pipeline_folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    found = planned_model(small(tmp_path / "model"), measured=True)
    assert found.source.startswith("random weights")
    transformer: Any = found.networks["transformer"]
    weight = transformer.transformer_blocks[0].attn1.to_q.weight
    assert weight.device == CPU
    assert weight.std() > 0


@pytest.mark.parametrize(("saved", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_random_weights_have_the_dtype_that_is_asked_for_whatever_the_configuration_names(tmp_path, saved, dtype):
    sd3.pipeline().to(getattr(torch, saved)).save_pretrained(tmp_path)
    for weights in tmp_path.rglob("*.safetensors"):
        weights.unlink()
    own = {"model": {"path": str(tmp_path), "device": "cpu", "dtype": dtype}, "data": {"height": 64, "width": 96}}
    found = planned_model(parameters_of("sd3", {"rewards": {"planned": {"function": "x:y"}}, **own}), measured=True)
    assert {p.dtype for part in found.networks.values() for p in part.parameters()} == {getattr(torch, dtype)}
    assert found.model.model.conditions([PromptRecord(id="1", prompt="red")], [0], 1.0).prompts


def test_without_a_gpu_it_says_what_needs_none():
    with pytest.raises(UserError, match="the pipeline plan needs none") as error:
        check(small(None))
    assert error.value.remedy == Remedy("plan")


def case(**changes: Any) -> dict[str, Any]:
    return {
        "module": "ar",
        "source": "random weights",
        "loading_seconds": 2.0,
        "samples": 8,
        "step_seconds": 4.0,
        "peak_gb": 5.0,
        "phases": {"tokens": {"seconds": 3.2, "peak_gb": 4.0}, "AdamW": {"seconds": 0.8, "peak_gb": 5.0}},
        "metrics": [{"ratio/first_max_abs_log": 0.0, "grad_norm": 2.5, "tokens_per_sample": 100.0}],
        "plan": {
            "step": [
                {"phase": "tokens", "seconds": 3.0, "peak_gb": 4.1},
                {"phase": "AdamW", "seconds": 0.1, "peak_gb": 4.9},
            ]
        },
        **changes,
    }


@pytest.mark.parametrize("peak_gb", [5.0, 6.0])
def test_measured_and_planned_are_shown_side_by_side_with_what_differs(capsys, peak_gb):
    assert phase_rows(case())[0] == ["tokens", 3.2, 3.0, 4.0, 4.1]
    assert phase_rows(case())[-1] == ["step", 4.0, 3.1, 5.0, 4.9]
    show(case(peak_gb=peak_gb))
    differs = "ar: the peak is 6.0 GB, the plan expected 4.9 GB" in capsys.readouterr().out
    assert differs == (peak_gb == 6.0)


@pytest.mark.parametrize(
    ("name", "gib", "card"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6, "H100"),
        ("NVIDIA A100-SXM4-80GB", 80.0, "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", 40.0, None),
        ("NVIDIA A10G", 22.5, "A10G"),
        ("NVIDIA RTX A6000", 48.0, "RTX A6000"),
        ("NVIDIA GeForce RTX 4090", 24.0, "RTX 4090"),
        ("NVIDIA GeForce RTX 3090", 24.0, None),
    ],
)
def test_the_card_is_recognised_by_name_and_memory(monkeypatch, name, gib, card):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    facts = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    assert known_card(torch.device("cuda")) == card
