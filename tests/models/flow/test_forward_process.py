"""Forward-process training: decisions, log-probs and KL against formulas in float64, and that it learns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from tests.models.flow.test_flow_policy import RECORDS, ROLLOUT
from tests.models.flow.test_flow_policy import policy_with as steps_policy
from tests.models.toy_flow import SlopeAdapter, ToyFlow
from visual_grpo.common.decisions import Likelihoods, Matches
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Scores
from visual_grpo.config import FlowConfig, GRPOConfig, PolicyConfig
from visual_grpo.grpo.losses import AWM, LOSSES, NFT, Algorithm
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.models.flow.flow_policy import FlowPolicy
from visual_grpo.models.rows import random_seeds

OFFSETS = torch.tensor([0.1, 0.1, 0.2, 0.2, 0.3, 0.3]).view(-1, 1, 1, 1).double()


def policy_with(**flow: Any) -> FlowPolicy[Tensor]:
    model = ToyFlow()
    config = PolicyConfig(flow=FlowConfig(**flow))
    return FlowPolicy(model, SlopeAdapter(model.transformer), ROLLOUT, config, forward_process=True)


def rollout(policy: FlowPolicy[Tensor]) -> Any:
    return policy.rollout(RECORDS, 2, torch.Generator().manual_seed(3))


def chunks(policy: FlowPolicy[Tensor], got: Any, rows: Tensor) -> list[Any]:
    return list(policy.replay(got.trajectory, rows))


@pytest.mark.parametrize("shape", [(4, 12, 16), (4, 3, 12, 16)], ids=["image", "video of as many channels as draws"])
def test_the_decisions_are_noised_samples_of_the_plain_ode_at_the_windows_levels(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToyFlow, "latent_shape", shape)
    policy = policy_with(window_start=1, window_steps=2, draws=2)
    got = rollout(policy)
    trajectory = got.trajectory
    assert trajectory.steps == (1, 1, 2, 2)
    assert got.log_probs.shape == (6, 4)
    levels = torch.tensor([0.8, 0.8, 0.5, 0.5]).view(1, 4, *[1] * len(shape))
    clean = trajectory.states - levels * trajectory.next_states  # x = x0 + s u
    noise = clean + trajectory.next_states
    torch.testing.assert_close(clean, clean[:, :1].expand_as(clean), rtol=0, atol=1e-5)
    assert float(noise.std()) == pytest.approx(1, abs=0.03)
    assert abs(float(noise.mean())) < 0.03
    assert torch.corrcoef(noise.flatten(2).flatten(0, 1)).fill_diagonal_(0).abs().max() < 0.2
    generator = torch.Generator().manual_seed(3)
    random_seeds(3, generator)  # Of the conditions.
    state = policy.denoiser.start_noise(random_seeds(6, generator)).double()
    for sigma, following in pairwise(ToyFlow.sigmas):
        state = state + (following - sigma) * (-0.4 * state + OFFSETS.view(-1, *[1] * len(shape)))
    torch.testing.assert_close(clean[:, 0].double(), state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [5, 0]])
def test_log_ratio_divergence_and_kl_by_the_formula(rows: list[int]) -> None:
    policy = policy_with(window_steps=2, draws=2)
    policy.kl_reference = True
    got = rollout(policy)
    trajectory, chosen = got.trajectory, torch.tensor(rows)
    before = torch.cat([chunk.log_probs for chunk in chunks(policy, got, chosen)], 1)
    torch.testing.assert_close(before.detach(), got.log_probs[chosen], rtol=0, atol=1e-4)
    with torch.no_grad():
        policy.model.transformer.slope -= 0.3
    for column, chunk in enumerate(chunks(policy, got, chosen)):
        state, target = (part[chosen, column].double() for part in (trajectory.states, trajectory.next_states))
        offsets = OFFSETS[chosen]
        old, new, base = (slope * state + offsets for slope in (-0.4, -0.7, 0.0))
        elements = state[0].numel()
        errors = [(velocity - target).square().flatten(1).sum(1) for velocity in (old, new)]
        want = (errors[0] - errors[1]) / elements**0.5
        ratio = (chunk.log_probs.detach() - got.log_probs[chosen, column : column + 1])[:, 0]
        torch.testing.assert_close(ratio.double(), want, rtol=1e-4, atol=1e-4)
        for velocity, offered in ((new, chunk.velocity), (old, chunk.old_velocity), (target, chunk.target)):
            torch.testing.assert_close(offered[:, 0].detach().double(), velocity, rtol=1e-4, atol=1e-4)
        assert chunk.level.item() == pytest.approx(ToyFlow.sigmas[trajectory.steps[column]])
        for value, other in ((chunk.divergence(), old), (chunk.kl.detach(), base)):
            distance = (new - other).square().flatten(1).mean(1, keepdim=True)
            torch.testing.assert_close(value.double(), distance, rtol=1e-4, atol=0)


def test_the_velocitys_norm_is_reported_relative_to_its_targets() -> None:
    got = rollout(policy_with(window_steps=3))
    norms = [part.flatten(2).norm(dim=2) for part in (got.trajectory.means, got.trajectory.next_states)]
    assert got.stats["velocity_norm"] == pytest.approx(float((norms[0] / norms[1]).mean()), rel=1e-5)


class Contrast:
    """Reward: the standard deviation of a picture, which the slope decides."""

    def __call__(self, prompts: Any, samples: Any) -> Scores:
        total = torch.stack([sample.float().std() / 255 for sample in samples])
        return Scores(total=total, rewards={"contrast": total}, parts={}, weights={"contrast": 1.0})


@dataclass(frozen=True, kw_only=True)
class Weighted(Algorithm[Matches]):
    """The error times the advantage, without a ratio."""

    needs: ClassVar[type[Likelihoods]] = Matches

    def __call__(self, decisions: Matches, advantages: Tensor, counted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        error = (decisions.velocity - decisions.target).square().flatten(2).mean(2).cpu()
        return advantages[:, None] * error, {"error": error}


def test_an_algorithm_may_know_velocities_alone_and_reports_what_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "grpo", Weighted)
    settings: dict[str, Any] = {"prompts_per_step": 3, "group_size": 4, "learning_rate": 0.02, "target_kl": 1e-3}
    config = GRPOConfig(steps=15, updates_per_rollout=2, **settings)
    found = list(GRPOTrainer(policy_with(window_steps=None, draws=2), Contrast(), config).fit(RECORDS))
    rewards = [step.values["reward/total"] for step in found]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.005
    reported = found[-1].values
    assert {"error", "update_1/error", "update_2/error", "approx_kl", "ratio/first_max_abs_log"} <= reported.keys()
    assert not {"ratio/mean", "clip_fraction"} & reported.keys()
    averaging = GRPOConfig(steps=1, loss="awm", prompts_per_step=3, group_size=4, learning_rate=0.02)
    for unfit in (config, averaging):
        with pytest.raises(UserError, match=r"needs velocities .*replay gives none\. Make .* forward_process=True"):
            list(GRPOTrainer(steps_policy(), Contrast(), unfit).fit(RECORDS))


@pytest.mark.parametrize("beta", [1.0, 0.25])
@pytest.mark.parametrize("advantage", [-7.0, -1.0, 0.0, 2.0, 5.0])
def test_nft_is_the_loss_of_its_authors_code(beta: float, advantage: float) -> None:
    """Their code (NVlabs/DiffusionNFT, train_nft_sd3.py) compares samples; here the same in float64."""
    policy = policy_with(window_steps=2)
    got = rollout(policy)
    rows = torch.arange(6)
    with torch.no_grad():
        policy.model.transformer.slope -= 0.3
    for column, chunk in enumerate(chunks(policy, got, rows)):
        state, target = (part[:, column].double() for part in (got.trajectory.states, got.trajectory.next_states))
        level = ToyFlow.sigmas[got.trajectory.steps[column]]
        clean = state - level * target
        old, new = (slope * state + OFFSETS for slope in (-0.4, -0.7))

        def distance(velocity: Tensor, state: Tensor = state, level: float = level, clean: Tensor = clean) -> Tensor:
            sample = state - level * velocity
            return ((sample - clean) ** 2 / (sample - clean).abs().mean((1, 2, 3), keepdim=True)).mean((1, 2, 3))

        good = min(max(advantage / 5, -1), 1) / 2 + 0.5
        better, worse = beta * new + (1 - beta) * old, (1 + beta) * old - beta * new
        want = 5 * (good * distance(better) / beta + (1 - good) * distance(worse) / beta)
        loss, metrics = NFT(nft_beta=beta)(chunk, torch.full((6,), advantage), torch.ones(6, 1, dtype=torch.bool))
        torch.testing.assert_close(loss.detach()[:, 0].double(), want, rtol=1e-4, atol=1e-5)
        assert metrics == {}


@pytest.mark.parametrize("advantage", [-7.0, -1.0, 0.0, 2.0, 5.0])
def test_awm_is_the_loss_of_its_authors_code(advantage: float) -> None:
    """Their code (scxue/advantage_weighted_matching, train_sd3_awm.py with ghuber, clip 1) in float64."""
    policy = policy_with(window_steps=2)
    got = rollout(policy)
    with torch.no_grad():
        policy.model.transformer.slope -= 3.0  # Far enough for the clip.
    ratios = []
    for column, chunk in enumerate(chunks(policy, got, torch.arange(6))):
        state, target = (part[:, column].double() for part in (got.trajectory.states, got.trajectory.next_states))
        old, new = (slope * state + OFFSETS for slope in (-0.4, -3.4))
        level = ToyFlow.sigmas[got.trajectory.steps[column]]

        def log_prob(velocity: Tensor, target: Tensor = target, level: float = level) -> Tensor:
            error = (velocity - target).square().mean((1, 2, 3)) + 1e-10
            return -(error**0.25 - 1e-10**0.25) * level / 0.25

        ratio = (log_prob(new) - log_prob(old)).exp()
        ratios.append(ratio)
        scaled = min(max(advantage, -5.0), 5.0) / 5
        surrogate = torch.maximum(-scaled * ratio, -scaled * ratio.clamp(0, 2))
        average = -1.4 * state + OFFSETS
        pulled = replace(chunk, average_velocity=average[:, None].float())
        for decisions, centre in ((chunk, old), (pulled, average)):
            want = surrogate + (new - centre).square().mean((1, 2, 3))
            loss, metrics = AWM()(decisions, torch.full((6,), advantage), torch.ones(6, 1, dtype=torch.bool))
            torch.testing.assert_close(loss.detach()[:, 0].double(), want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(metrics["ratio"].detach()[:, 0].double(), ratio, rtol=1e-4, atol=1e-5)
    assert torch.cat(ratios).min() < 0.9


def test_each_update_of_a_rollout_takes_its_own_noise() -> None:
    policy, replay, seen = policy_with(window_steps=2, draws=2), FlowPolicy.replay, []

    def recorded(trajectory: Any, rows: Tensor) -> Any:
        seen.append((trajectory.steps, trajectory.next_states))
        return replay(policy, trajectory, rows)

    policy.replay = recorded  # type: ignore[method-assign]
    settings: dict[str, Any] = {"steps": 1, "prompts_per_step": 3, "group_size": 2, "learning_rate": 0.02}
    list(GRPOTrainer(policy, Contrast(), GRPOConfig(updates_per_rollout=3, **settings)).fit(RECORDS))
    assert [steps for steps, _ in seen] == [(0, 1)] * 3
    assert not torch.equal(seen[0][1], seen[1][1])
    assert torch.equal(seen[0][1], seen[2][1])  # There are two: the third update begins again.


def test_an_update_that_takes_its_noise_again_compares_with_the_first_replay() -> None:
    policy, sample = policy_with(window_steps=2, draws=2), FlowPolicy.rollout

    def rounded(prompts: Any, group_size: int, generator: Any, share: Any = None) -> Any:
        found = sample(policy, prompts, group_size, generator, share)
        return replace(found, log_probs=found.log_probs + 0.05)

    policy.rollout = rounded  # type: ignore[method-assign]
    settings: dict[str, Any] = {"steps": 1, "prompts_per_step": 3, "group_size": 2, "learning_rate": 1e-9}
    replayed: dict[str, Any] = {"old_log_probs": "replay", "ratio_tolerance": 1.0, "updates_per_rollout": 3}
    (step,) = GRPOTrainer(policy, Contrast(), GRPOConfig(**settings, **replayed)).fit(RECORDS)
    ratios = [step.values[f"update_{number}/ratio"] for number in (1, 2, 3)]
    assert ratios == pytest.approx([1, math.exp(-0.05), 1], abs=1e-4)  # The second takes what was not replayed first.


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": "dppo", "divergence_limit": 0.01},
        {"kl_weight": 0.01},
        {"loss": "nft", "nft_beta": 0.5},
        {"loss": "awm", "updates_per_rollout": 1},  # A second one is mostly pulled back.
    ],
)
def test_it_raises_the_reward(changes: dict[str, Any]) -> None:
    policy = policy_with(window_steps=None, draws=2)
    policy.kl_reference = "kl_weight" in changes
    settings: dict[str, Any] = {"steps": 15, "prompts_per_step": 3, "group_size": 4, "learning_rate": 0.05}
    trainer = GRPOTrainer(policy, Contrast(), GRPOConfig(**{"updates_per_rollout": 2, **settings, **changes}))
    found = [step.values["reward/total"] for step in trainer.fit(RECORDS)]
    assert sum(found[-5:]) / 5 > sum(found[:5]) / 5 + 0.005


def averaging(loss: Literal["nft", "awm"], **changes: Any) -> GRPOTrainer[Any]:
    settings: dict[str, Any] = {"steps": 5, "prompts_per_step": 3, "group_size": 2, "learning_rate": 0.05}
    config = GRPOConfig(**settings, loss=loss, updates_per_rollout=2, **changes)
    return GRPOTrainer(policy_with(draws=2), Contrast(), config)


def test_nft_samples_with_the_average_of_its_authors_code() -> None:
    """Their code (NVlabs/DiffusionNFT, train_nft_sd3.py) at the end of an epoch: old = d old + (1 - d) trained, with
    d = min(0.001 n, 0.5) after n updates; here at most 0.003.
    """
    trainer, sampled, steps = averaging("nft", average_decay=0.003), [], []
    slope, sample = trainer.parameters[0], trainer.policy.rollout

    def recorded(*arguments: Any, **options: Any) -> Any:
        sampled.append(slope.item())
        return sample(*arguments, **options)

    trainer.policy.rollout = recorded  # type: ignore[method-assign]
    old, want = slope.item(), [slope.item()]
    for number, metrics in enumerate(trainer.fit(RECORDS), 1):
        decay = min(0.001 * 2 * number, 0.003)
        old = decay * old + (1 - decay) * slope.item()
        want.append(old)
        steps.append(metrics.values)
    assert sampled == pytest.approx(want[:-1], abs=1e-7)
    assert abs(want[-1] - slope.item()) > 1e-6, "the average is not the trained slope"
    # Only the first rollout is the trained weights': later log-ratios are no rounding.
    assert ["ratio/first_max_abs_log" in values for values in steps] == [True, False, False, False, False]


def test_awm_is_pulled_to_the_average_of_its_authors_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their code (scxue/advantage_weighted_matching, train_sd3_awm.py) at the end of an epoch: ema = d ema + (1 - d)
    trained, with d = min(0.001 n, 0.3) after n updates; here at most 0.003. The trained weights sample.
    """
    trainer, centres, sampled = averaging("awm", average_decay=0.003), list[float](), list[float]()
    slope, policy_loss = trainer.parameters[0], AWM.__call__

    def recorded(self: AWM, decisions: Any, *others: Any) -> Any:
        # A velocity is the slope times the state, plus a constant of the prompt: its deviation tells the slope.
        new, pull, old = (
            velocity.detach()[0].std()
            for velocity in (decisions.velocity, decisions.average_velocity, decisions.old_velocity)
        )
        centres.append(float(pull / new) * slope.item())
        sampled.append(float(old / new) * slope.item())
        return policy_loss(self, decisions, *others)

    monkeypatch.setattr(AWM, "__call__", recorded)
    average, want, last = slope.item(), list[float](), list[float]()
    steps = trainer.fit(RECORDS)
    for number in range(1, 6):
        want += [average] * 2
        last += [slope.item()] * 2
        next(steps)
        decay = min(0.001 * 2 * number, 0.003)
        average = decay * average + (1 - decay) * slope.item()
    per_update = len(centres) // 10  # Decisions of an update.
    assert centres[::per_update] == pytest.approx(want, abs=1e-6)
    assert sampled[::per_update] == pytest.approx(last, abs=1e-6)
    assert max(abs(a - b) for a, b in zip(want, last, strict=True)) > 1e-5, "the average is the policy that sampled"


def test_each_decision_has_its_own_velocity_of_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step, the average is the policy that sampled. Rollouts take their noises in different turns."""
    policy, policy_loss, seen = policy_with(window_steps=2, draws=2, train_share=0.5), AWM.__call__, []

    def recorded(self: AWM, decisions: Any, *others: Any) -> Any:
        seen.append(float((decisions.average_velocity - decisions.old_velocity).abs().max()))
        return policy_loss(self, decisions, *others)

    monkeypatch.setattr(AWM, "__call__", recorded)
    settings: dict[str, Any] = {"steps": 1, "prompts_per_step": 3, "group_size": 2, "learning_rate": 0.02}
    changes: dict[str, Any] = {"loss": "awm", "rollout_prompts": 1, "updates_per_rollout": 2, "micro_batch_size": 1}
    for seed in range(4):
        list(GRPOTrainer(policy, Contrast(), GRPOConfig(**settings, **changes), seed=seed).fit(RECORDS))
    assert len(seen) > 4 * 12
    assert max(seen) < 1e-5


@pytest.mark.parametrize("loss", ["nft", "awm"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_average_goes_on_bit_for_bit(precision: str, loss: Literal["nft", "awm"]) -> None:
    whole, first, rest = (averaging(loss) for _ in range(3))
    for trainer in (whole, first, rest):
        trainer.replay_is_old = precision == "bfloat16"
    list(whole.fit(RECORDS))
    steps = first.fit(RECORDS)
    for _ in range(2):
        next(steps)
    rest.load_state(*first.state())
    list(rest.fit(RECORDS))
    got, want = rest.state()[0], whole.state()[0]
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
