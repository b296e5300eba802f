"""What cannot be done is said before weights are loaded, and what to do; results of another base are told apart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.pretend.trained import records_of
from tests.quantised.making import few_bits, loaded, trainer_of
from tests.replacing import replaced
from visual_grpo.common.errors import UserError
from visual_grpo.config.decides import DEPENDS_ON
from visual_grpo.models import loading
from visual_grpo.models.quantized import check_base_weights, require_quantized
from visual_grpo.operations.preflight.check import check
from visual_grpo.provenance import NUMERICS, runtime, values


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize(
    ("setting", "value", "changes"),
    [
        ("model.base_weights", "4bit", {"model": {"base_weights": "4bit"}}),
        ("grpo.optimizer", "adamw_8bit", {"grpo": {"optimizer": "adamw_8bit"}}),
    ],
)
def test_a_missing_library_is_told_before_a_model_is_loaded(
    pipeline_folder: Path, tmp_path: Path, setting: str, value: str, changes: Any
) -> None:
    model = {"path": str(pipeline_folder), **changes.pop("model", {})}
    config = few_bits(tmp_path, "dit", model.pop("base_weights", "full"), model=model, **changes)
    with pytest.raises(UserError, match=f"{setting} is {value}, which needs the library bitsandbytes.*quantised.lock"):
        check(config, scores=False)
    with pytest.raises(UserError, match=r"quantised\.lock"):
        trainer_of(config, pipeline_folder)


def test_a_library_that_does_not_work_is_told_with_its_reason() -> None:
    pytest.importorskip("bitsandbytes", reason="make quantised")

    def fails(*_: object) -> None:
        raise RuntimeError("no kernel image")

    with (
        replaced(torch.ops.bitsandbytes, "quantize_4bit", lambda real: fails),
        pytest.raises(UserError, match="does not work on cpu: no kernel image"),
    ):
        check_base_weights("8bit", torch.device("cpu"))


def test_a_network_without_such_layers_is_refused() -> None:
    with pytest.raises(UserError, match="nothing to quantise in dit: expected nn"):
        require_quantized({"dit": nn.Sequential(nn.Linear(64, 64))}, "4bit")
    require_quantized({"dit": nn.Linear(64, 64)}, "full")


def test_a_family_that_quantises_nothing_is_refused(pipeline_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="make quantised")
    config = few_bits(tmp_path, "dit", "8bit")
    with (
        replaced(loading, "quantize", lambda real: lambda *_, **__: None),
        pytest.raises(UserError, match="in ar, dit"),
    ):
        loaded(config, pipeline_folder)


def test_another_base_decides_every_result_and_no_resume_may_change_it(tmp_path: Path) -> None:
    tree = {"model": {"base_weights": "8bit"}, "grpo": {"optimizer": "adamw_8bit"}}
    for pipeline in ("baseline", "evaluate"):
        assert values({"parameters": tree}, DEPENDS_ON[pipeline]) == {"model.base_weights": "8bit"}
    assert len(values({"parameters": tree}, DEPENDS_ON["train"], rounding=False)) == 2
    full, few = (few_bits(tmp_path, "dit", own) for own in ("full", "4bit"))
    optimiser = few_bits(tmp_path, "dit", "full", grpo={"optimizer": "adamw_8bit"})
    records = [runtime(own.model, own.grpo)[NUMERICS] for own in (full, few, optimiser)]
    assert ["bitsandbytes" in numerics for numerics in records] == [False, True, True]


def test_the_state_of_one_optimiser_is_not_loaded_into_the_other(tmp_path: Path, pipeline_folder: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="make quantised")
    model = loaded(few_bits(tmp_path, "dit", "full"), pipeline_folder)
    trainer = trainer_of(few_bits(tmp_path, "dit", "full"), pipeline_folder, model)
    next(iter(trainer.fit(records_of())))
    tensors, facts = trainer.state()
    other = trainer_of(few_bits(tmp_path, "dit", "full", grpo={"optimizer": "adamw_8bit"}), pipeline_folder)
    with pytest.raises(UserError, match=r"grpo\.optimizer"):
        other.load_state(tensors, facts)
