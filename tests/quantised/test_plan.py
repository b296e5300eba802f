"""A plan counts the bytes of a base of few bits as torch sets them aside, without bitsandbytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.operations.plan.test_against_cpu import FEW, measured, small
from tests.pretend.trained import networks_of
from tests.quantised.making import bytes_of
from tests.training.few_steps import resolved
from visual_grpo.operations.plan.dry_run import DryRunner, planned_model
from visual_grpo.operations.plan.estimate import parameters_in
from visual_grpo.training import components


def config_of(folder: Path, bits: str, module: str = "dit", optimizer: str = "adamw") -> Any:
    own = {"policy": {"train": module, "lora": {"rank": 64}}, "grpo": {**FEW, "optimizer": optimizer}}
    config = small("base", folder, own)
    return config.model_copy(update={"model": config.model.model_copy(update={"base_weights": bits})})


@pytest.mark.parametrize("bits", ["full", "8bit", "4bit"])
def test_weights_are_as_large_as_those_that_are_loaded(pipeline_folder: Path, bits: str) -> None:
    if bits != "full":
        pytest.importorskip("bitsandbytes", reason="make quantised")
    config = config_of(pipeline_folder, bits)
    runner = DryRunner(planned_model(config))
    model: Any = components.build_model(resolved(config, pipeline_folder))
    model.adapters.attach({"dit": config.lora_of("dit")}, 0)
    assert runner.weights == bytes_of(networks_of(model))


@pytest.mark.parametrize("module", ["ar", "dit"])
def test_the_peak_of_a_step_is_that_of_real_tensors(pipeline_folder: Path, module: str) -> None:
    pytest.importorskip("bitsandbytes", reason="make quantised")
    config = config_of(pipeline_folder, "4bit", module, "adamw_8bit")
    runner = DryRunner(planned_model(config))
    planned = runner.step().peak - runner.weights
    with runner.counting() as after:
        pass
    model = components.build_model(resolved(config, pipeline_folder))
    assert planned == pytest.approx(measured(runner, model), rel=0.05)
    trained = sum(p.nbytes for own in runner.trainer.modules.values() for p in own.parameters)
    assert 0.5 * trained < after.live - runner.weights < 0.52 * trained, (
        "of the optimiser: two bytes for a parameter of four"
    )


def test_a_plan_needs_no_library_and_counts_the_same_parameters(
    pipeline_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    counted, held = {}, {}
    for bits in ("full", "8bit", "4bit"):
        config = config_of(pipeline_folder, bits)
        planned = planned_model(config)
        counted[bits] = {name: parameters_in(network) for name, network in planned.networks.items()}
        runner = DryRunner(planned)
        held[bits] = runner.weights
    runner.step()
    assert counted["full"] == counted["8bit"] == counted["4bit"]
    assert held["full"] > held["8bit"] > held["4bit"]
