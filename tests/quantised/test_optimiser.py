"""AdamW with moments of 8 bits: what it keeps, that it resumes bit for bit, and that it learns as AdamW does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.pretend.trained import records_of
from tests.quantised.making import assert_same, few_bits, loaded, trainer_of
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo.checkpoint import load_checkpoint, save_checkpoint
from visual_grpo.grpo.optimizer import build_optimizer, optimizer_state

pytest.importorskip("bitsandbytes", reason="make quantised")
LARGE, SMALL = 4096, 64
CONFIG = GRPOConfig(
    steps=1, prompts_per_step=1, group_size=2, learning_rate=0.01, weight_decay=0.1, optimizer="adamw_8bit"
)
WIDE = {"lora": {"rank": 64, "alpha": 64}}
"""So that the small models' adapters are large enough for 8 bits."""


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size)) for size in (LARGE, SMALL)]


def updated(optimiser: torch.optim.Optimizer, own: list[nn.Parameter], times: range) -> None:
    for number in times:
        generator = torch.Generator().manual_seed(number)
        for parameter in own:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * parameter.detach().abs()
        optimiser.step()


def test_large_matrices_have_codes_and_small_ones_numbers() -> None:
    own = parameters()
    optimiser = build_optimizer(own, CONFIG)
    updated(optimiser, own, range(2))
    state = optimizer_state(optimiser)
    assert state["0/state1"].dtype == state["0/state2"].dtype == torch.uint8
    assert state["1/state1"].dtype == state["1/state2"].dtype == torch.float32
    assert int(state["0/step"]) == 2
    of_the_large = sum(value.nbytes for name, value in state.items() if name.startswith("0/"))
    assert of_the_large < 0.26 * (2 * LARGE * 4)


def test_it_moves_as_adamw_does_but_for_the_rounding_of_its_moments() -> None:
    start, one, other = parameters(), parameters(), parameters()
    updated(build_optimizer(one, CONFIG), one, range(30))
    plain = CONFIG.model_copy(update={"optimizer": "adamw"})
    updated(build_optimizer(other, plain), other, range(30))
    for began, rounded, exact in zip(start, one, other, strict=True):
        apart, way = float((rounded - exact).detach().norm()), float((exact - began).detach().norm())
        assert apart < 0.1 * way
    assert not torch.equal(one[0], other[0])
    assert torch.allclose(one[1], other[1], atol=1e-6)


@pytest.mark.parametrize("case", ["dit", "alternating"])
def test_a_training_goes_on_from_its_checkpoint_bit_for_bit(pipeline_folder: Path, tmp_path: Path, case: str) -> None:
    config = few_bits(tmp_path, case, "4bit", policy=WIDE, grpo={"optimizer": "adamw_8bit", "steps": 3})
    model = loaded(config, pipeline_folder)
    trainer = trainer_of(config, pipeline_folder, model)
    steps = trainer.fit(records_of())
    next(steps)
    saved = save_checkpoint(tmp_path / "checkpoints", 1, *trainer.state())
    expected = list(steps)
    tensors, facts = load_checkpoint(saved)
    codes = [value for name, value in tensors.items() if name.endswith("/state1") and value.dtype == torch.uint8]
    assert codes, "nothing was kept in 8 bits"
    again = loaded(config, pipeline_folder)
    resumed = trainer_of(config, pipeline_folder, again)
    resumed.load_state(tensors, facts)
    found = list(resumed.fit(records_of()))
    assert [step.values["reward/total"] for step in expected] == [step.values["reward/total"] for step in found]
    assert_same(model.adapters.state(), again.adapters.state())
    assert_same(trainer.state()[0], resumed.state()[0])
