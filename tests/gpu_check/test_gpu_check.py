"""The check of a GPU, as far as a CPU can tell: what it runs, how it tells phases apart, what it reports."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plan.page import parameters_of
from visual_grpo.config import Parameters
from visual_grpo.errors import UserError
from visual_grpo.gpu_check import check, machine, model
from visual_grpo.gpu_check.cases import cases_of
from visual_grpo.gpu_check.measure import measure
from visual_grpo.gpu_check.report import findings, report_of, rows_of
from visual_grpo.gpu_check.stopwatch import Stopwatch
from visual_grpo.plan.released import weightless
from visual_grpo.policies.families import find_family

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


def test_the_cases_are_all_modules_at_both_sizes_with_few_prompts():
    config = parameters_of("glm_image", {"rewards": {"planned": {"function": "x:y"}}})
    cases = cases_of(config, find_family("glm_image"))
    assert [case.title for case in cases] == ["ar, 512 x 512", "dit, 512 x 512", "ar, 1024 x 1024", "dit, 1024 x 1024"]
    configured = cases[1].configured(config)
    assert (configured.data.height, configured.policy.train) == (512, "dit")
    assert configured.grpo_of("dit").prompts_per_step == 1
    assert configured.grpo_of("dit").learning_rate == config.grpo_of("dit").learning_rate


def test_the_width_keeps_its_proportion_and_odd_sizes_are_refused():
    config = small(None, gpu_check={"sizes": [64, 128], "modules": ["dit"]})
    assert [(case.height, case.width) for case in cases_of(config, find_family("glm_image"))] == [(64, 96), (128, 192)]
    with pytest.raises(UserError, match="100 x 150"):
        cases_of(small(None, gpu_check={"sizes": [100]}), find_family("glm_image"))


@pytest.mark.parametrize(
    ("module", "phases"), [("ar", {"tokens", "ar: replay and gradient", "ar: AdamW"}), ("dit", {"denoising"})]
)
def test_a_step_is_taken_and_its_phases_told_apart(pipeline_folder, module, phases):
    config = small(pipeline_folder, gpu_check={"steps": 2})
    case = next(case for case in cases_of(config, find_family("glm_image")) if case.module == module)
    found = measure(case.configured(config))
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
            time.sleep(0.2)
        time.sleep(0.02)
    watch.stop()
    assert watch.phases["inner"].seconds >= 0.2
    assert 0.04 <= watch.phases["outer"].seconds < 0.2


def test_a_model_that_is_not_there_gets_random_weights_of_its_size(monkeypatch):
    built = []
    monkeypatch.setattr(model, "build_released", lambda path, dtype: built.append(weightless.frozen(_layer, dtype)))
    config = parameters_of("sd3", {"rewards": {"planned": {"function": "x:y"}}})
    family, _, source = model.check_model(config, CPU)
    assert family.name == "sd3"
    assert "random weights" in source
    assert built[0].weight.device == CPU
    assert built[0].weight.dtype == getattr(torch, config.model.dtype)
    assert built[0].weight.std() > 0
    assert weightless.frozen(_layer, torch.float32).weight.device.type == "meta"


def _layer():
    return torch.nn.Linear(4, 4)


def test_an_unknown_model_is_refused():
    config = small(None, model={"path": "someone/else", "family": "sd3", "device": "cpu"})
    with pytest.raises(UserError, match="someone/else, which is not on this machine"):
        model.check_model(config, CPU)


def test_without_a_gpu_it_says_what_needs_none():
    with pytest.raises(UserError, match="kedro run --pipeline=plan"):
        check.check_gpu(small(None))


def case(**changes: Any) -> dict[str, Any]:
    return {
        "module": "ar",
        "height": 64,
        "width": 96,
        "source": "random weights",
        "weights_gb": 3.0,
        "loading_seconds": 2.0,
        "samples": 8,
        "tokens_per_sample": 100.0,
        "step_seconds": 4.0,
        "peak_gb": 5.0,
        "phases": {"tokens": {"seconds": 3.2, "peak_gb": 4.0}, "ar: AdamW": {"seconds": 0.8, "peak_gb": 5.0}},
        "host_waits": {"visual_grpo/a.py:3": 7, "torch/b.py:1": 2},
        "metrics": [{"ratio/first_max_abs_log": 0.0, "grad_norm": 2.5}],
        "plan": {
            "step": [
                {"phase": "tokens", "seconds": 3.0, "peak_gb": 4.1, "host_waits": 6},
                {"phase": "ar: AdamW", "seconds": 0.1, "peak_gb": 4.9, "host_waits": 2},
            ],
            "peak_gb_of_step": 4.9,
        },
        **changes,
    }


def checked(*cases: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return {
        "machine": {"gpu": "A", "attention": {"flash": True}} | facts,
        "model": "m",
        "prompts": 1,
        "group_size": 8,
        "cases": list(cases),
    }


def test_the_report_holds_measured_beside_planned():
    text = report_of(checked(case()))
    assert "| tokens | 3.2 | 3 | 4 | 4.1 |" in text
    assert "| step | 4 | 3.1 | 5 | 4.9 |" in text
    assert "- tokens a second: 250" in text
    assert "- host waits: 9, planned 8" in text
    assert rows_of(case(plan={"error": "none"}))[0] == ["tokens", 3.2, None, 4.0, None]


def test_what_is_wrong_is_found():
    assert findings(checked(case())) == []
    assert "the peak is 6.0 GB, planned were 4.9 GB" in findings(checked(case(peak_gb=6.0)))[0]
    assert "does not fit" in findings(checked({"module": "ar", "height": 1, "width": 1, "error": "does not fit"}))[0]
    assert "attention" in findings(checked(case(), attention={"flash": False}))[0]


def test_an_error_ends_its_case_alone(monkeypatch):
    found = check._caught(_broken, small(None))
    assert found["error"] == "ZeroDivisionError: division by zero"
    assert "_broken" in found["traceback"]


def _broken(config: Parameters) -> dict[str, Any]:
    return {"x": 1 / 0}


@pytest.mark.parametrize(
    ("name", "gib", "card"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6, "H100"),
        ("NVIDIA H200", 140.4, "H200"),
        ("NVIDIA A100-SXM4-80GB", 80.0, "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", 40.0, None),
        ("NVIDIA A10", 22.5, "A10"),
        ("NVIDIA A10G", 22.5, "A10G"),
        ("NVIDIA L4", 22.5, "L4"),
        ("NVIDIA L40S", 45.0, "L40S"),
        ("NVIDIA A100-SXM4-80GB MIG 2g.20gb", 22.5, None),
        ("NVIDIA RTX A6000", 48.0, "RTX A6000"),
        ("NVIDIA GeForce RTX 4090", 24.0, "RTX 4090"),
        ("NVIDIA GeForce RTX 3090", 24.0, None),
    ],
)
def test_the_card_is_recognised_by_name_and_memory(monkeypatch, name, gib, card):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)

    class Facts:
        total_memory = gib * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Facts)
    found = machine.card_of(torch.device("cuda"))
    assert (found and found.name) == card
