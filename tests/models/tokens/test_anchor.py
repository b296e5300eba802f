"""The anchor of tokens: the base model's own, their loss and its gradient by plain forwards, and who is anchored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import SIZE, stir
from tests.models.token_policies import hidden_whole
from tests.pretend.conftest import vl_folder
from tests.pretend.trained import config_of, records_of, rewards_of
from visual_grpo.common.types import PromptRecord, Share
from visual_grpo.config import SamplerConfig
from visual_grpo.models.rows import ANCHOR_NOISE, random_seeds
from visual_grpo.models.run_spec import resolve
from visual_grpo.models.tokens.policy import sample_with_adapter
from visual_grpo.training import components

__all__ = ["vl_folder"]

WARM = SamplerConfig(temperature=1.7, top_p=1.0, top_k=0, steps=2, guidance_scale=1.0)
OPTIONS: dict[str, dict[str, object]] = {"pipeline_folder": {}, "vl_folder": {"max_tokens": 24}}


@pytest.fixture(params=list(OPTIONS))
def case(request: pytest.FixtureRequest, source_images: list[Path]) -> tuple[Path, dict[str, object], Any]:
    """GLM-Image's tokens, of one length, and Qwen2.5-VL's, of several."""
    records = records_of(source_images if request.param == "vl_folder" else ())
    return request.getfixturevalue(request.param), OPTIONS[request.param], records


def policy_with(folder: Path, options: dict[str, object], *, effect: bool = True, anchor: bool = True) -> Any:
    policy: Any = components.load_policy(
        str(folder), size=SIZE, rollout=WARM, anchor=anchor, options=options, device="cpu"
    )
    if effect:
        stir(policy, 0.3)
    return policy


def rollout(policy: Any, records: Sequence[PromptRecord], share: Share | None = None) -> Any:
    return policy.rollout(records, 2, torch.Generator().manual_seed(3), share)


def plain_loss(policy: Any, anchor: Any, prompt: int) -> Tensor:
    """Of one prompt: one forward over its whole sequence, and the counted tokens one by one."""
    model, tokens = policy.model, anchor.tokens[prompt]
    hidden = hidden_whole(model.network, anchor.prompts, torch.tensor([prompt]), tokens[None])[0]
    logits = hidden @ model.head.t() + (0 if model.bias is None else model.bias)
    log_probs = (logits / 1.7).log_softmax(-1)
    said = [place for place, counts in enumerate(anchor.mask[prompt].tolist()) if counts]
    return -sum((log_probs[place, tokens[place]] for place in said), torch.zeros(())) / len(said)


def test_its_tokens_are_the_base_models_at_the_training_temperature(case: Any) -> None:
    folder, options, records = case
    anchor = rollout(policy_with(folder, options), records).trajectory.anchor
    seeds = [seed ^ ANCHOR_NOISE for seed in random_seeds(6, torch.Generator().manual_seed(3))[::2]]
    plain, trained = (policy_with(folder, options, effect=effect) for effect in (False, True))
    base, other = (sample_with_adapter(p.model, records, seeds, WARM, p.config) for p in (plain, trained))
    assert torch.equal(anchor.tokens, base.trajectory.tokens)
    assert torch.equal(anchor.mask, base.trajectory.mask)
    assert not torch.equal(anchor.tokens, other.trajectory.tokens)
    (chunk,) = plain.replay(rollout(plain, records).trajectory, torch.arange(6))
    likelihood = torch.where(base.trajectory.mask, base.log_probs, 0.0).sum(1) / base.trajectory.mask.sum(1)
    torch.testing.assert_close(chunk.anchor()[::2, 0], -likelihood, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("effect", [True, False])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [5, 0, 4]])
def test_the_loss_of_a_row_and_its_gradient_are_those_of_its_prompts_answer(
    case: Any, rows: list[int], effect: bool
) -> None:
    folder, options, records = case
    policy = policy_with(folder, options, effect=effect)
    trajectory = rollout(policy, records).trajectory
    assert not options or not trajectory.anchor.mask.all(), "answers of several lengths"
    weights, parameters = torch.linspace(0.3, 2, len(rows)), policy.trainable_parameters()
    (chunk,) = policy.replay(trajectory, torch.tensor(rows))
    found = chunk.anchor()
    want = torch.stack([plain_loss(policy, trajectory.anchor, row // 2) for row in rows])
    torch.testing.assert_close(found, want[:, None], rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad((loss * weights).sum(), parameters) for loss in (found[:, 0], want)]
    assert any(bool(gradient.abs().max() > 1e-3) for gradient in gradients[1])
    for got, expected in zip(*gradients, strict=True):
        assert (got - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_it_changes_nothing_else(case: Any) -> None:
    folder, options, records = case
    found = []
    for anchor in (True, False):
        policy, generator = policy_with(folder, options, anchor=anchor), torch.Generator().manual_seed(3)
        got = policy.rollout(records, 2, generator)
        (chunk,) = policy.replay(got.trajectory, torch.arange(6))
        assert (chunk.anchor is None) == (not anchor)
        found.append((got.trajectory.tokens, got.log_probs, chunk.log_probs, generator.get_state()))
    assert all(map(torch.equal, *found))


def test_a_share_of_a_rollout_has_the_anchors_of_the_whole(case: Any) -> None:
    folder, options, records = case
    policy = policy_with(folder, options)
    whole = rollout(policy, records).trajectory.anchor
    part = rollout(policy, records[1:], Share(start=1, size=2, total=3)).trajectory.anchor
    assert torch.equal(part.tokens, whole.tokens[1:])


@pytest.mark.parametrize(
    ("shared", "own", "anchored"),
    [
        (0.0, {}, set()),
        (0.0, {"ar": 0.5}, {"ar"}),
        (0.5, {}, {"ar", "dit"}),
        (0.5, {"ar": 0.0}, {"dit"}),
    ],
)
@pytest.mark.parametrize("stages", ["joint", "alternating"])
def test_each_module_has_a_weight_of_its_own(
    pipeline_folder: Path, tmp_path: Path, shared: float, own: dict[str, float], anchored: set[str], stages: str
) -> None:
    config = config_of(
        tmp_path,
        "cpu",
        policy={"stages": stages},
        grpo={"anchor_weight": shared, "steps": 2},
        modules={name: {"anchor_weight": weight} for name, weight in own.items()},
    )
    spec = resolve(config, str(pipeline_folder))
    trainer = components.build_trainer(spec, components.build_model(spec), rewards_of(config))
    reported = {
        name.partition("/")[0] for step in trainer.fit(records_of()) for name in step.values if "penalty" in name
    }
    assert reported == anchored
