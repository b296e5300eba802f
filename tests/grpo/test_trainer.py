from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.toys import (
    CountingScorer,
    ToyGaussianPolicy,
    ToyTokenPolicy,
    given_gradients,
    one_reward,
    records,
    reproducible,
)
from visual_grpo.common.decisions import GaussianLikelihoods, Likelihoods
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Scores
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo.advantages import Scale, gdpo_rewards, group_advantages
from visual_grpo.grpo.losses import LOSSES
from visual_grpo.grpo.metrics import Clock, _reward_metrics
from visual_grpo.grpo.sampling import informative_groups, sample_and_score, with_all_groups
from visual_grpo.grpo.trainer import GRPOTrainer


def config(**changes: Any) -> GRPOConfig:
    base: dict[str, Any] = {"steps": 3, "prompts_per_step": 4, "group_size": 6, "learning_rate": 0.05}
    return GRPOConfig(**(base | changes))


def trainer_of(policy: Any, scorer: Any = None, dtype: str = "float32", **changes: Any) -> GRPOTrainer[Any]:
    policy.dtype = dtype
    return GRPOTrainer(policy, scorer or CountingScorer(), config(**changes), seed=1)


def trained(policy: Any, scorer: Any = None, **changes: Any) -> tuple[Any, list[Any]]:
    return policy, list(trainer_of(policy, scorer, **changes).fit(records(10)))


def losses_of(offered: type[Likelihoods]) -> list[str]:
    """Names of the losses that can be made of what a replay offers."""
    return sorted(name for name, algorithm in LOSSES.items() if issubclass(offered, algorithm.needs))


OF_TOKENS = losses_of(Likelihoods)


@pytest.mark.parametrize("loss", OF_TOKENS)
def test_every_loss_raises_the_reward(loss: str) -> None:
    wide: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3} if loss == "gspo" else {}
    _, metrics = trained(ToyTokenPolicy(), steps=40, loss=loss, updates_per_rollout=2, **wide)
    first, last = (sum(m.values["reward/total"] for m in part) / 8 for part in (metrics[:8], metrics[-8:]))
    assert first < 0.35
    assert last > 0.7


CASES: list[tuple[Any, str]] = [(ToyTokenPolicy, loss) for loss in OF_TOKENS]
CASES += [(ToyGaussianPolicy, loss) for loss in losses_of(GaussianLikelihoods) if not LOSSES[loss].whole_rows]


@pytest.mark.parametrize(("policy", "loss"), CASES)
def test_micro_batches_equal_the_full_batch(policy: Any, loss: str) -> None:
    options: dict[str, Any] = {"loss": loss, "updates_per_rollout": 2, "kl_weight": 0.1}
    whole, _ = trained(policy(), **options)
    parts, _ = trained(policy(), micro_batch_size=5, **options)
    torch.testing.assert_close(whole.table, parts.table, rtol=0, atol=2e-6)
    assert (whole.table - policy().table).abs().max() > 0.05


def test_dppo_learns_from_gaussian_steps_and_refuses_tokens_as_gspo_refuses_steps_apart() -> None:
    policy, metrics = trained(ToyGaussianPolicy(), loss="dppo", divergence_limit=1e-3, steps=30, updates_per_rollout=3)
    assert (policy.table > 0.5).all()
    assert all(step.values["update_1/clip_fraction"] == 0 for step in metrics), "nothing has moved yet"
    assert metrics[0].values["update_3/clip_fraction"] > 0
    with pytest.raises(
        UserError, match=r"loss is dppo, which needs exact divergences .*gives none\. Use a different loss"
    ):
        trained(ToyTokenPolicy(), loss="dppo")
    with pytest.raises(UserError, match="gspo, which needs all decisions of a row at once, but the policy replays"):
        trained(ToyGaussianPolicy(), loss="gspo")


ONE_PATH: Any = "a.png"


@pytest.mark.parametrize(
    ("prompts", "scorer", "complaint"),
    [
        (records(1)[0], None, "prompts must be a list of PromptRecord, got a PromptRecord"),
        (iter(records(4)), None, "prompts must be a list of PromptRecord, got a list_iterator"),
        (["a cat"], None, "each prompt must be a PromptRecord, got the str 'a cat'"),
        ([replace(records(1)[0], source_images=ONE_PATH)], None, "source_images must be a tuple of paths, got 'a.png'"),
        ([], None, "no prompts to train on"),
        (records(4), lambda prompts, images: [1.0] * len(images), r"must return Scores, got list\. .* RewardSet\("),
    ],
)
def test_slips_of_a_script_are_named(prompts: Any, scorer: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        next(trainer_of(ToyTokenPolicy(), scorer).fit(prompts))


def cancelling(prompts: Any, samples: Any) -> Scores:
    """Two rewards whose weighted sum is always 0, but not that of the normalised ones."""
    scores = CountingScorer()(prompts, samples)
    rewards = {"up": 2 * scores.total, "down": -scores.total}
    return replace(scores, rewards=rewards, weights={"up": 1.0, "down": 2.0}, total=0 * scores.total)


@pytest.mark.parametrize("scale", [None, "batch"])
def test_refills_and_advantages_go_by_what_gdpo_combines(scale: Scale | None) -> None:
    options: dict[str, Any] = {"combine": "gdpo", "max_refills": 3, "advantage_scale": scale}
    (metrics,) = trainer_of(ToyTokenPolicy(), cancelling, steps=1, **options).fit(records(10))
    assert metrics.values["samples"] == 24
    assert metrics.values["zero_variance_share"] == 0
    own = trainer_of(ToyTokenPolicy(), cancelling, **options)
    (batch,) = own.build_batches(
        sample_and_score(own.policy, own.scorer, records(4), own.config, own.generator, Clock())
    )
    combined = gdpo_rewards(batch.scores.rewards, batch.scores.weights, 6)
    expected = group_advantages(combined, 6, scale=scale or "batch_centred")
    torch.testing.assert_close(batch.advantages, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "largest"),
    [
        ({"loss": "grpo", "group_size": 30}, 5.0),  # 5.3 standard deviations
        ({"loss": "dr_grpo"}, 40 * 5 / 6),
        ({"loss": "grpo", "advantage_scale": "none"}, 40 * 5 / 6),
        ({"loss": "dr_grpo", "advantage_clip": 7.0}, 7.0),
    ],
)
def test_advantages_that_are_not_divided_are_clipped_only_when_asked(changes: dict[str, Any], largest: float) -> None:
    """One sample of each prompt is better than the others by 40."""
    size = changes.get("group_size", 6)
    own = trainer_of(ToyTokenPolicy(), lambda p, s: one_reward(40.0 * (torch.arange(len(s)) % size == 0)), **changes)
    (batch,) = own.build_batches(
        sample_and_score(own.policy, own.scorer, records(4), own.config, own.generator, Clock())
    )
    assert float(batch.advantages.max()) == pytest.approx(largest, rel=1e-6)


def test_unscored_rows_neither_teach_nor_count() -> None:
    _, metrics = trained(ToyTokenPolicy(), CountingScorer(unscored=(0, 7)), steps=1)
    assert metrics[0].values["reward/unscored_share"] == pytest.approx(2 / 24)
    own = trainer_of(ToyTokenPolicy(), CountingScorer(unscored=(0, 7)))
    (batch,) = own.build_batches(
        sample_and_score(own.policy, own.scorer, records(4), own.config, own.generator, Clock())
    )
    assert batch.rows.tolist() == [row for row in range(24) if row not in (0, 7)]
    _, metrics = trained(ToyTokenPolicy(), CountingScorer(unscored=tuple(range(18))), steps=1)
    assert metrics[0].values["zero_variance_share"] == 0, "three groups have no rewards that could be equal"
    with pytest.raises(UserError, match=r"No sample of step 1 could be scored: the reward .* scored none of them"):
        trained(ToyTokenPolicy(), CountingScorer(unscored=tuple(range(24))), steps=1)


def test_a_ratio_is_reported_as_the_sum_over_the_sum_and_nothing_where_nothing_was_scored() -> None:
    above, below = torch.rand(24), 1 + torch.arange(24.0)
    above[0] = below[0] = torch.nan
    scores = replace(one_reward(above), ratios={"count/share": (above, below), "count/none": (above * 0, below * 0)})
    unscored = torch.full((24,), torch.nan)
    scores = replace(scores, rewards={"guard": unscored}, parts={"guard/part": unscored})
    values = _reward_metrics([scores, scores], config())
    assert values["part/count/share"] == pytest.approx(float(above.nansum() / below.nansum()))
    assert not {"part/count/none", "reward/guard", "reward/guard_std", "part/guard/part"} & values.keys()


def test_a_rollout_that_lacks_a_part_leaves_it_to_the_others() -> None:
    """So a server's reward does where it answers nothing."""
    values = torch.rand(24)
    whole = replace(one_reward(values), parts={"count/part": values}, ratios={"count/share": (values, 2 * values)})
    found = _reward_metrics([one_reward(values), whole, one_reward(values)], config())
    assert found["part/count/part"] == pytest.approx(float(values.mean()))
    assert found["part/count/share"] == pytest.approx(0.5)


def two_rewards(prompts: Any, samples: Any) -> Scores:
    """The second is the first with the opposite sign and half the weight."""
    scores = CountingScorer()(prompts, samples)
    rewards = {"up": scores.total, "down": -scores.total, "told": scores.total}
    return replace(scores, rewards=rewards, weights={"up": 1.0, "down": 0.5, "told": 0.0}, total=scores.total / 2)


def test_each_rewards_share_of_the_variance_is_reported() -> None:
    _, (first, *_) = trained(ToyTokenPolicy(), two_rewards)
    shares = {name: value for name, value in first.values.items() if name.startswith("advantage_share/")}
    assert shares == pytest.approx({"advantage_share/up": 2.0, "advantage_share/down": -1.0})
    assert not any(name.startswith("advantage_share/") for name in trained(ToyTokenPolicy())[1][0].values)


class Elsewhere(CountingScorer):
    """Says when its work is begun and when it is asked for."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def begin(self, prompts: Any, samples: Any) -> Any:
        self.said.append(f"begin {len(samples)}")

        def result() -> Scores:
            self.said.append("result")
            return self(prompts, samples)

        return result


class Announcing(ToyTokenPolicy):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def rollout(self, *arguments: Any) -> Any:
        self.said.append("rollout")
        return super().rollout(*arguments)


def test_a_part_is_judged_while_the_next_is_drawn_and_nothing_else_changes() -> None:
    said: list[str] = []
    policy, metrics = trained(Announcing(said), Elsewhere(said), steps=1, rollout_prompts=3)
    assert said == ["rollout", "begin 18", "rollout", "result", "begin 6", "result"]
    plain, same = trained(ToyTokenPolicy(), steps=1, rollout_prompts=3)
    assert torch.equal(policy.table, plain.table)
    reported = [reproducible(own[0].values) for own in (metrics, same)]
    assert reported[0] == reported[1]
    assert reported[0]["samples"] == 24


class EveryThirdGroupVaries(CountingScorer):
    """Groups 0, 3, 6, ... have different rewards, all others the same."""

    def __init__(self) -> None:
        self.groups = 0

    def __call__(self, prompts: Any, samples: Any) -> Scores:
        total = torch.zeros(len(samples))
        for group in range(len(samples) // 6):
            if (self.groups + group) % 3 == 0:
                total[group * 6] = 1.0
        self.groups += len(samples) // 6
        return one_reward(total)


def test_refill_replaces_groups_without_variance() -> None:
    _, without = trained(ToyTokenPolicy(), EveryThirdGroupVaries(), loss="dapo", steps=1)
    _, refilled = trained(ToyTokenPolicy(), EveryThirdGroupVaries(), loss="dapo", steps=1, max_refills=20)
    assert without[0].values["advantage/abs_mean"] < refilled[0].values["advantage/abs_mean"]
    # 4 groups that vary are at positions 0, 3, 6 and 9 of the groups drawn.
    assert refilled[0].values["samples"] == 10 * 6
    assert refilled[0].values["zero_variance_share"] == pytest.approx(0.6)


def some_prompts_vary(prompts: Any, samples: Any) -> Scores:
    """Only the groups of some prompts have different rewards, so that what is refilled depends on what was drawn."""
    total = CountingScorer()(prompts, samples).total
    total[[int(record.id[1:]) % 3 > 0 for record in prompts]] = 0.5
    return one_reward(total)


RESUMED: list[dict[str, Any]] = [
    {"steps": 9, "updates_per_rollout": 2, "schedule": "cosine", "warmup_steps": 3},
    {"steps": 6, "loss": "dapo", "max_refills": 3},
]


@pytest.mark.parametrize("options", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(options: dict[str, Any]) -> None:
    def make() -> GRPOTrainer[Any]:
        return trainer_of(ToyTokenPolicy(), some_prompts_vary, **options)

    def shown(metrics: list[Any]) -> list[Any]:
        return [(m.step, [record.id for record in m.prompts], reproducible(m.values)) for m in metrics]

    whole, first, second = make(), make(), make()
    want = list(whole.fit(records(10)))
    stopped = [m for _, m in zip(range(3), first.fit(records(10)), strict=False)]
    assert (first.positions["0"] > 3 * 4) == ("max_refills" in options)
    second.load_state(*first.state())
    assert shown(stopped + list(second.fit(records(10)))) == shown(want)
    assert torch.equal(second.policy.adapter_state_dict()["table"], whole.policy.adapter_state_dict()["table"])


def test_a_state_in_memory_stays_as_it_was_while_training_goes_on() -> None:
    trainer, other = trainer_of(ToyTokenPolicy(), steps=9), trainer_of(ToyTokenPolicy(), steps=9)
    steps = trainer.fit(records(10))
    next(steps)
    kept, facts = trainer.state()
    before = {name: value.clone() for name, value in kept.items()}
    next(steps)
    other.load_state(kept, facts)
    next(other.fit(records(10)))
    assert all(torch.equal(value, before[name]) for name, value in kept.items())


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [
        (
            ["a circle"],
            r"each prompt must be a PromptRecord, got the str 'a circle'; make one of a text: PromptRecord\(",
        ),
        ([], "There are no prompts to train on; expected at least one PromptRecord"),
    ],
)
def test_what_are_no_prompts_is_refused_before_any_rollout(prompts: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        next(trainer_of(ToyTokenPolicy()).fit(prompts))


class Telling(ToyTokenPolicy):
    """Measures a share and seconds, both of the number of the rollout."""

    drawn = 0

    def rollout(self, *arguments: Any) -> Any:
        self.drawn += 1
        return replace(super().rollout(*arguments), stats={"entropy": self.drawn, "seconds/decode": self.drawn})


def test_refill_is_bounded_and_what_the_policy_measures_is_averaged_over_it() -> None:
    # No group ever varies.
    policy, (metrics,) = trained(Telling(), CountingScorer(target=99), loss="dapo", steps=1, max_refills=2)
    assert policy.drawn == 3
    assert metrics.values["samples"] == 3 * 24
    assert torch.equal(policy.table, torch.zeros(4, 5))
    assert metrics.values["entropy"] == pytest.approx(2.0)
    assert metrics.values["seconds/decode"] == pytest.approx(6.0)


@pytest.mark.parametrize(("schedule", "falls"), [("constant", False), ("linear", True)])
def test_warm_up_and_schedule_count_updates_and_not_rollouts(schedule: str, falls: bool) -> None:
    _, metrics = trained(ToyTokenPolicy(), steps=4, updates_per_rollout=3, warmup_steps=4, schedule=schedule)
    # The last updates of the four rollouts are the 3rd, 6th, 9th and 12th of 12.
    after = [1 - (update - 4) / 8 if falls else 1.0 for update in (5, 8, 11)]
    assert [m.values["learning_rate"] for m in metrics] == pytest.approx([0.05 * f for f in (3 / 4, *after)])


def test_gradients_are_unscaled_before_they_are_clipped() -> None:
    """The scale of float16's loss must be gone when the norm is measured, or every gradient would be clipped to it."""
    options: dict[str, Any] = {"steps": 1, "max_grad_norm": 0.05}
    plain, scaled = (trainer_of(ToyTokenPolicy(), dtype=dtype, **options) for dtype in ("float32", "float16"))
    assert scaled.optimizer.scaler.is_enabled()
    assert scaled.optimizer.scaler.get_scale() > 1000
    with given_gradients() as gradients:
        (want,), (got,) = (list(trainer.fit(records(10))) for trainer in (plain, scaled))
    assert plain.parameters[0].grad is None, "it would take memory while the next samples are drawn"
    assert want.values["grad_norm"] > 0.05
    assert got.values["grad_norm"] == pytest.approx(want.values["grad_norm"], rel=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=0)
    assert gradients[0].norm().item() == pytest.approx(0.05, rel=1e-3)


def test_groups_without_a_difference_only_fill_up_a_step() -> None:
    """Also where they come from several rollouts."""
    settings = config(max_refills=2, prompts_per_step=3, group_size=2)
    equal = Scores(total=torch.zeros(4), rewards={}, parts={}, weights={})
    rollout: Any = ToyTokenPolicy().rollout(records(2), 2, torch.Generator().manual_seed(0))
    scored = [with_all_groups(rollout, equal, 2) for _ in range(2)]
    chosen, missing = informative_groups(scored, settings)
    assert (sum(len(part.groups) for part in chosen), missing) == (3, 3)
