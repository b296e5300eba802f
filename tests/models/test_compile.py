"""Compiled blocks compute what the plain ones do, and each of their graphs is made in the first step.

With the backend that runs a graph by torch's own kernels (aot_eager), which needs no compiler; `slow`: inductor's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.conftest import stir
from tests.evaluation.painter import brightness
from tests.models.families.test_flow_families import CASES, CPU, SIZE
from visual_grpo.config import GRPOConfig, PolicyConfig, SamplerConfig
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.models.family import find_family
from visual_grpo.models.family_check import RECORDS, check_family
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training.components import load_model

FLOW = SamplerConfig(steps=3, guidance_scale=4.0)
BOTH = SamplerConfig(temperature=1.0, top_p=1.0, top_k=0, steps=3, guidance_scale=1.5)
FAMILIES = [name for name in CASES if "," not in name]
SOME = ("flux",)
"""Of the quick tests."""
NAMES = [pytest.param(name, marks=[] if name in SOME else pytest.mark.slow) for name in FAMILIES]
REWARDS = RewardSet({"brightness": (brightness, 1.0)})


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Counts those compiled since it was asked before."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))

    def count() -> int:
        found = counters["stats"]["unique_graphs"]
        counters.clear()
        return found

    yield count
    torch._dynamo.reset()


def saved(name: str, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    build, options = CASES[name]
    build().save_pretrained(tmp_path)
    return tmp_path, options


def trained(policy: Any, records: Any, config: GRPOConfig, graphs: Any) -> tuple[list[int], list[dict[str, float]]]:
    """The graphs compiled in each step, and its metrics."""
    counts, values = [], []
    for step in GRPOTrainer(policy, REWARDS, config).fit(records):
        counts.append(graphs())
        values.append(dict(step.values))
    return counts, values


@pytest.mark.parametrize("name", NAMES)
def test_a_family_draws_and_replays_as_without(name: str, tmp_path: Path, graphs: Any) -> None:
    folder, options = saved(name, tmp_path)
    family = find_family("auto", str(folder))
    config = CPU.model_copy(update={"compile": True})
    findings = check_family(family, str(folder), config, SIZE, family.options(**options), 4.0)
    assert [finding for finding in findings if not finding.passed] == []
    assert graphs() > 1


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_a_flow_training_compiles_in_its_first_step_only(
    name: str, checkpointing: bool, tmp_path: Path, graphs: Any
) -> None:
    folder, options = saved(name, tmp_path)
    config = GRPOConfig(steps=3, prompts_per_step=3, group_size=4, learning_rate=1e-2, kl_weight=0.01)

    def train(compiled: bool) -> tuple[list[int], list[dict[str, float]], dict[str, Any]]:
        policy = PolicyConfig(gradient_checkpointing=checkpointing)
        model = load_model(
            str(folder), size=SIZE, options=options, device="cpu", train=["dit"], policy=policy, compile=compiled
        )
        dit: Any = model.policy("dit", rollout=FLOW, evaluation=FLOW, kl_reference=True)
        stir(dit)
        return *trained(dit, RECORDS, config, graphs), dit.adapter_state_dict()

    counts, values, state = train(compiled=True)
    assert counts[0] > 1
    assert counts[1:] == [0, 0]
    assert all(step["ratio/first_max_abs_log"] < 1e-4 for step in values)
    _, _, plain = train(compiled=False)
    worst = max(float((state[name] - plain[name]).abs().max()) for name in plain)
    assert worst < 1e-2, "of three steps of 1e-2"
