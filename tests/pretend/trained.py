"""Small models of the real classes, each trained for a step on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.replacing import replaced
from tests.toys import reproducible
from tests.training.few_steps import parameters, resolved
from visual_grpo.common.types import Needs, PromptRecord, Sample, TextSample, VideoSample
from visual_grpo.config import Parameters
from visual_grpo.grpo import optimizer
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.rewards.reward import FunctionReward
from visual_grpo.training import components

TOKENS = 20
PROMPTS = ["a red circle", 'a sign that says "open"', "画一只猫"]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training gave, all on the CPU."""

    adapters: dict[str, Tensor]
    metrics: list[dict[str, float]]
    """Of each step, without times and memory."""
    samples: Sequence[Sample]
    """Of the trained model at the eval sampler."""


def records_of(pictures: Sequence[Path] = ()) -> list[PromptRecord]:
    """With a picture each, where there are ``pictures``."""
    return [
        PromptRecord(id=f"r{n}", prompt=text, source_images=tuple(pictures[n : n + 1]))
        for n, text in enumerate(PROMPTS)
    ]


def config_of(folder: Path, device: str, kinds: Sequence[str] = ("tokens", "flow"), **changes: Any) -> Parameters:
    """A step of two updates with a penalty for the distance to the reference."""
    model = {"path": "named by the test", "device": device, "threads": 1, **changes.pop("model", {})}
    policy = {"train": "all", "signal_check": {"rollouts": 0}, **changes.pop("policy", {})}
    grpo = {"steps": 1, "prompts_per_step": 2, "group_size": 2, "updates_per_rollout": 2, "micro_batch_size": 2}
    return parameters(
        folder,
        starter={"world": "examples.scenes:WORLD"} if "flow" not in kinds else {},
        model=model,
        policy=policy,
        grpo={**grpo, "learning_rate": 1e-2, "kl_weight": 0.1, "schedule": "constant", **changes.pop("grpo", {})},
        sampling={"rollout": _of(kinds, steps=3), "eval": _of(kinds, steps=2)},
        **changes,
    )


def train(config: Parameters, folder: Path, records: Sequence[PromptRecord]) -> Trained:
    """As the pipeline does: loads ``folder``, puts adapters on, trains, draws."""
    spec = resolved(config, folder)
    model = components.build_model(spec)
    for network in networks_of(model):
        for tensor in (*network.parameters(), *network.buffers()):
            # As a GPU's copies are: a CPU rounds by where in memory weights begin, and those of a file begin anywhere.
            tensor.data = tensor.data.clone()
    trainer = components.build_trainer(spec, model, rewards_of(config))
    with replaced(optimizer, "in_double", lambda _: lambda *_: False):  # As on a GPU.
        steps = [step.values for step in trainer.fit(records)]
        samples = model.generate(records, list(range(len(records))), config.sampling.eval)
    adapters = {name: value.cpu() for name, value in model.adapters.state().items()}
    return Trained(adapters=adapters, metrics=[reproducible(step) for step in steps], samples=samples)


def rewards_of(config: Parameters) -> RewardSet:
    reward = FunctionReward("brightness", score)
    reward.needs = Needs(video=config.data.frames is not None)
    return RewardSet({"brightness": (reward, 1.0)})


def score(prompts: Any, samples: Sequence[Any]) -> list[float]:
    """Differs from sample to sample."""
    pixels = [s.frames if isinstance(s, VideoSample) else s for s in samples]
    return [_of_text(s) if isinstance(s, TextSample) else float(s.float().std()) for s in pixels]


def assert_equal(first: Trained, second: Trained) -> None:
    """Bit for bit."""
    assert first.adapters.keys() == second.adapters.keys()
    for name, value in first.adapters.items():
        assert torch.equal(value, second.adapters[name]), (name, (value - second.adapters[name]).abs().max())
    assert first.metrics == second.metrics
    for one, other in zip(first.samples, second.samples, strict=True):
        one, other = (s.frames if isinstance(s, VideoSample) else s for s in (one, other))
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def networks_of(model: Any) -> list[torch.nn.Module]:
    """All of a built model, the frozen ones too."""
    whole = model if hasattr(model, "pipeline") else model.model
    if not hasattr(whole, "pipeline"):
        return [whole.network]
    return [part for part in whole.pipeline.components.values() if isinstance(part, torch.nn.Module)]


def _of(kinds: Sequence[str], steps: int) -> dict[str, Any]:
    tokens = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} if "tokens" in kinds else {}
    return {**tokens, **({"steps": steps, "guidance_scale": 1.5} if "flow" in kinds else {})}


def _of_text(sample: TextSample) -> float:
    return sum(map(ord, sample.text)) % 97 / 97
