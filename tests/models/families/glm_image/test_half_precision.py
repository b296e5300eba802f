"""In bfloat16 sampler and replay round otherwise: the ratio is 1 all the same, and a wrong replay is still seen."""

from __future__ import annotations

import contextlib
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import SIZE, stir
from tests.evaluation.painter import brightness
from tests.models.families.glm_image.test_ar import RECORDS
from visual_grpo.config import Dtype, GRPOConfig, SamplerConfig
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.models.lora_layers import fast_lora
from visual_grpo.models.tokens.probabilities import deviation, expected_gap
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training.components import load_policy

BENCHMARK = runpy.run_path(str(Path(__file__).parents[4] / "benchmarks" / "rounding_gap.py"))


def half(folder: Path, module: str, **settings: Any) -> Any:
    given: Any = {"kl_reference": True, "dtype": "bfloat16", "device": "cpu", **settings}
    policy = load_policy(str(folder), module=module, size=SIZE, **given)
    stir(policy)
    return policy


def first_step(policy: Any, **changes: Any) -> dict[str, float]:
    config = GRPOConfig(
        steps=1, prompts_per_step=3, group_size=2, learning_rate=1e-2, kl_weight=0.01, updates_per_rollout=2, **changes
    )
    trainer = GRPOTrainer(policy, RewardSet({"brightness": (brightness, 1.0)}), config)
    return dict(next(trainer.fit(RECORDS)).values)


@pytest.mark.parametrize(
    ("module", "micro_batch_size"), [pytest.param("ar", None, marks=pytest.mark.slow), ("ar", 3), ("dit", 3)]
)
def test_the_first_ratio_is_exactly_one(pipeline_folder: Path, module: str, micro_batch_size: int | None) -> None:
    values = first_step(half(pipeline_folder, module), micro_batch_size=micro_batch_size)
    assert values["ratio/first_max_abs_log"] == 0
    assert values["update_1/ratio"] == 1
    assert values["update_2/ratio"] != 1
    assert values["kl"] > 0
    assert 0 <= values["sampler_gap/mean"] < 0.04


@pytest.mark.parametrize(
    ("module", "dtype"),
    [
        ("ar", "float16"),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in (("ar", "bfloat16"), ("dit", "float16"))),
    ],
)
def test_half_precision_trains(pipeline_folder: Path, module: str, dtype: Dtype) -> None:
    policy: Any = load_policy(str(pipeline_folder), module=module, size=SIZE, dtype=dtype, device="cpu")
    assert {parameter.dtype for parameter in policy.trainable_parameters()} == {torch.float32}
    config = GRPOConfig(steps=2, prompts_per_step=3, group_size=2, learning_rate=1e-3)
    before = policy.adapter_state_dict()
    trainer = GRPOTrainer(policy, RewardSet({"b": (brightness, 1.0)}), config)
    assert (trainer.dtype, trainer.optimizer.scaler.is_enabled()) == (dtype, dtype == "float16")
    metrics = list(trainer.fit(RECORDS))
    after = policy.adapter_state_dict()
    assert any(not torch.equal(before[name], value) for name, value in after.items())
    assert all(value.isfinite().all() for value in after.values())
    assert not math.isnan(metrics[0].values["loss"])


class Kernels(TorchDispatchMode):
    """Counts operations that compute something."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not operation.is_view and operation.overloadpacket is not torch.ops.aten._unsafe_view
        return operation(*args, **(kwargs or {}))


def layers_of(network: Any) -> list[Any]:
    return [layer for layer in network.modules() if isinstance(layer, LoraLayer)]


@pytest.mark.parametrize("module", ["ar", "dit"])
def test_sampling_and_replay_add_the_adapter_alike_in_few_kernels(pipeline_folder: Path, module: str) -> None:
    policy = half(pipeline_folder, module)
    network = policy.model.network if module == "ar" else policy.model.transformer
    layers = layers_of(network)
    outputs: list[list[torch.Tensor]] = []
    counts = []
    for where in (contextlib.nullcontext(), fast_lora(network)):
        with where, torch.no_grad(), Kernels() as kernels:
            outputs.append([layer(half_rows(layer)) for layer in layers])
            counts.append(kernels.count / len(layers))
    assert counts[0] <= 6 + 1  # With the making of an input.
    assert counts[1] <= 3 + 1
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
    for layer, output in zip(layers, outputs[0], strict=True):
        x = half_rows(layer).float()
        base, (down, up) = layer.get_base_layer(), (layer.lora_A["default"], layer.lora_B["default"])
        exact = x @ base.weight.float().t() + (0 if base.bias is None else base.bias.float())
        exact = exact + up(down(x)) * layer.scaling["default"]
        # Even where the adapter makes most of the output.
        error = (output.float() - exact).detach() / exact.std().detach()
        assert float(error.square().mean().sqrt()) < 0.006
        layer(half_rows(layer)).float().square().sum().backward()
        assert all(factor.weight.grad.dtype == torch.float32 and factor.weight.grad.any() for factor in (down, up))


def half_rows(layer: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 5, layer.in_features, generator=generator, dtype=torch.bfloat16)


@pytest.mark.parametrize("layers", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_the_rounding_that_is_expected_is_what_is_measured(layers: int) -> None:
    model = BENCHMARK["tokens_of"](layers, 256, torch.bfloat16)
    BENCHMARK["scale_logits"](model, 2.0)
    mean, _, spread = BENCHMARK["gap"](model, rows=6)
    expected = expected_gap(model.network, model.head.dtype, spread)
    assert expected / 1.5 < mean < 1.5 * expected


def test_a_temperature_divides_the_rounding_that_is_expected(pipeline_folder: Path) -> None:
    one, two = (
        half(pipeline_folder, "ar", rollout=SamplerConfig(temperature=temperature, steps=2, guidance_scale=1))
        .rollout(RECORDS, 2, torch.Generator().manual_seed(0))
        .rounding
        for temperature in (1.0, 2.0)
    )
    assert one == pytest.approx(2 * two, rel=0.1)


def test_the_deviation_is_that_of_the_logits_that_may_be_drawn() -> None:
    logits = torch.tensor([[1.0, 3.0, -torch.inf, 5.0], [2.0, 2.0, 2.0, 10.0]])
    expected = [(8 / 3) ** 0.5, 12**0.5]
    assert deviation(logits.log_softmax(-1)).tolist() == pytest.approx(expected)
