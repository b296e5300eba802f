from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Needs, PromptRecord, RewardOutput, TextSample
from visual_grpo.config import RewardConfig
from visual_grpo.rewards.build import build_reward
from visual_grpo.rewards.combine import ClipAndConditions, RewardSet
from visual_grpo.rewards.reward import FunctionReward

PROMPTS = [PromptRecord(id=i, prompt=i) for i in ("a", "b", "c")]
SAMPLES = [torch.zeros(3, 32, 32, dtype=torch.uint8)] * 3


def constant(*values: float | None):
    return lambda prompts, samples: values


class NeedsTarget:
    needs = Needs(target=True)

    def __call__(self, prompts, samples):
        return RewardOutput(values=torch.ones(len(samples)), parts={"half": torch.full((len(samples),), 0.5)})


class NeedsSource(NeedsTarget):
    needs = Needs(source=True)


def test_the_total_is_the_weighted_sum() -> None:
    pair = (torch.ones(3), torch.full((3,), 2.0))
    rewards = RewardSet(
        {
            "x": (constant(1, 2, None), 2.0),
            "y": (lambda prompts, images: torch.tensor([1.0, 0.0, 1.0], requires_grad=True), -0.5),
            "z": (NeedsTarget(), 0.0),
            "guard": (
                lambda prompts, images: RewardOutput(values=torch.full((3,), torch.nan), ratios={"half": pair}),
                0.0,
            ),
        }
    )
    scores = rewards(PROMPTS, SAMPLES)
    assert scores.total[:2].tolist() == [1.5, 4.0]
    assert scores.total[2].isnan(), "unscored by a reward with a weight"
    assert list(scores.ratios) == ["guard/half"]
    assert not scores.total.requires_grad, "the graph of a reward model would stay in memory"
    assert scores.rewards["y"].tolist() == [1, 0, 1]
    assert scores.rewards["z"].tolist() == [1, 1, 1]
    assert list(scores.parts) == ["z/half"]
    assert scores.weights == {"x": 2.0, "y": -0.5, "z": 0.0, "guard": 0.0}


def test_two_records_with_one_id_are_refused(tmp_path: Path) -> None:
    """A reward would compare both with the target of the last."""
    black, white = (PromptRecord(id="a", prompt="", target_image=tmp_path / name) for name in ("black", "white"))
    rewards = RewardSet({"x": (constant(1, 2, 3), 1.0)})
    assert rewards([black, replace(black), PROMPTS[1]], SAMPLES).total.tolist() == [1, 2, 3]
    with pytest.raises(UserError, match=r"two records have the id 'a' and a different target_image"):
        rewards([black, PROMPTS[1], white], SAMPLES)


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        ({}, "nothing to optimise"),
        ({"x": 0.0, "y": 0.0}, "nothing to optimise"),
        ({"total": 1.0}, "'total'"),
        ({"a/b": 1.0}, "'a/b'"),
        ({"x": float("nan")}, "'x' must be a finite number, got nan"),
    ],
)
def test_impossible_names_and_weights_are_refused(weights: dict[str, float], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        RewardSet({name: (constant(1, 2, 3), weight) for name, weight in weights.items()})


@pytest.mark.parametrize(
    ("rewards", "complaint"),
    [
        ({"x": constant(1)}, r"'x' must be \(reward, weight\), got <function .* For example: RewardSet\("),
        ({"x": (constant(1),)}, r"'x' must be \(reward, weight\), got \(<function"),
        ({"x": (1.0, constant(1))}, r"'x' must be \(reward, weight\), got \(1.0, "),
        ({"x": (constant(1), "1")}, r"'x' must be \(reward, weight\), .*'1'\)"),
        (constant(1), r"rewards must map names to \(reward, weight\), got function"),
        ([(constant(1), 1.0)], r"rewards must map names to \(reward, weight\), got list"),
    ],
)
def test_what_is_no_set_of_rewards_says_what_one_is(rewards: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        RewardSet(rewards)


def test_records_without_targets_are_named_before_anything_runs() -> None:
    rewards = RewardSet({"plain": (constant(1), 1.0), "target": (NeedsTarget(), 0.5)})
    there = PromptRecord(id="there", prompt="", target_image=Path("x.png"))
    rewards.check_records([there])
    with pytest.raises(UserError, match=r"target.* 7 records have none: 'r0', 'r1', 'r2', 'r3', 'r4' \.\.\.") as caught:
        rewards.check_records([there, *(PromptRecord(id=f"r{i}", prompt="") for i in range(7))])
    assert "plain" not in str(caught.value)
    edits = RewardSet({"mine": (FunctionReward("another name", NeedsSource()), 1.0)})
    edits.check_records([PromptRecord(id="e", prompt="", source_images=(Path("x.png"),))])
    with pytest.raises(UserError, match=r"the reward mine compares with a source image, and 3 records have none: 'a'"):
        edits.check_records(PROMPTS)


def test_an_unknown_reward_suggests_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"no built-in reward 'ssmi'\. Did you mean 'ssim'\?.*rewards.ssmi.function"):
        build_reward("ssmi", RewardConfig())


class Painting:
    """Draws every sample in a uniform grey."""

    def __init__(self, level: int) -> None:
        self.level = level

    def __call__(self, prompts: Any, samples: Any) -> list[float]:
        return [0.0] * len(samples)

    def picture(self, record: PromptRecord, sample: Any) -> torch.Tensor:
        return torch.full((3, 8, 8), self.level, dtype=torch.uint8)


def test_a_text_is_painted_by_the_first_reward_that_paints() -> None:
    text = TextSample(text="left", finished=True, frame=(8, 8))
    plain = FunctionReward("another name", constant(1))
    judge = RewardSet({"plain": (plain, 1.0), "one": (Painting(1), 0.0), "two": (Painting(2), 1.0)})
    painted = judge.picture(PROMPTS[0], text)
    assert painted is not None
    assert painted.unique().tolist() == [1]
    assert RewardSet({"plain": (plain, 1.0)}).picture(PROMPTS[0], text) is None


def counting(**rules: ClipAndConditions) -> RewardSet:
    return RewardSet({"easy": (constant(-1, 0.5, 3), 2.0), "hard": (constant(0.1, 0.9, None), 1.0)}, rules)


def test_scores_beyond_the_range_count_as_its_end_and_are_told_as_they_are() -> None:
    scores = counting(easy=ClipAndConditions(clip=(0.0, 1.0)))(PROMPTS, SAMPLES)
    assert scores.rewards["easy"].tolist() == [0, 0.5, 1]
    assert scores.parts["easy/raw"].tolist() == [-1, 0.5, 3]
    assert scores.total[:2].tolist() == pytest.approx([0.1, 1.9])
    assert "hard/raw" not in scores.parts


def test_a_reward_names_its_measure_of_the_task() -> None:
    exact, other = constant(1), constant(1)
    exact.measure = ("hit", "exactly right")
    assert RewardSet({"mine": (exact, 1.0), "other": (other, 1.0)}).measures == {"mine/hit": "exactly right"}
    exact.measure = ("hit",)
    with pytest.raises(UserError, match=r"'mine': its `measure` must be \(part, its name in reports\), got \('hit',\)"):
        RewardSet({"mine": (exact, 1.0)})


def test_a_reward_counts_only_where_another_is_had() -> None:
    rules = {"easy": ClipAndConditions(clip=(-2.0, None), only_where={"hard": 0.9})}
    scores = counting(**rules)(PROMPTS, SAMPLES)
    assert scores.rewards["easy"][:2].tolist() == [-2, 0.5]
    assert scores.rewards["easy"][2].isnan(), "whether it counts is not known"
    lower = RewardSet({"size": (constant(1, 2, 3), -1.0), "hard": (constant(0, 1, 1), 1.0)},
                      {"size": ClipAndConditions(clip=(None, 9.0), only_where={"hard": 1.0})})  # fmt: skip
    assert lower(PROMPTS, SAMPLES).rewards["size"].tolist() == [9, 2, 3], "of what is to be low, the worst is high"
    assert lower.weighted({"size": -2.0, "hard": 1.0})(PROMPTS, SAMPLES).total.tolist() == [-18, -3, -5]


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ({"clip": (1.0, 0.0)}, r"rewards.easy.clip must be \[low, high\] with low < high, got \[1, 0\]"),
        (
            {"clip": (0.0, None), "only_where": {"hrad": 0.5}},
            "'hrad', which is not one of the other .* Did you mean 'hard'",
        ),
        ({"clip": (0.0, None), "only_where": {"easy": 0.5}}, "names 'easy', which is not one of the other reward"),
        ({"clip": (None, 1.0), "only_where": {"hard": 0.5}}, "rewards.easy.clip has no lower end"),
    ],
)
def test_rules_that_cannot_be_applied_are_refused(rule: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        counting(easy=ClipAndConditions(**rule))


def test_a_judge_may_have_a_judge_as_its_condition_and_rollouts_have_neither() -> None:
    judge = FunctionReward("judge", constant(0, 1, 1))
    judge.judge_of = "total"
    rewards = {"easy": (constant(1, 2, 3), 1.0), "judge": (judge, 0.0), "second": (judge, 0.0)}
    rule = ClipAndConditions(clip=(0.0, 1.0), only_where={"judge": 0.5})
    assert RewardSet(rewards, {"second": rule}).without_judges().counting == {}


def test_all_that_is_missing_on_the_machine_is_told_at_once() -> None:
    class Lacking(NeedsTarget):
        def check_machine(self) -> None:
            raise UserError("the server is not there")

    rewards = RewardSet({"a": (Lacking(), 1.0), "b": (constant(1), 1.0), "c": (Lacking(), 0.0)})
    with pytest.raises(UserError, match=r"reward 'a': the server is not there[\s\S]*reward 'c': the server is"):
        rewards.check_machine()


def test_a_judge_scores_no_rollout_and_does_not_name_the_measure() -> None:
    def judge(prompts, samples):
        return RewardOutput(values=torch.ones(3), parts={"hit": torch.ones(3)})

    judge.measure = ("hit", "exactly right")  # type: ignore[attr-defined]
    second = FunctionReward("second", judge)
    second.judge_of = "easy"
    rules = {"second": ClipAndConditions(clip=(0.0, 0.5)), "easy": ClipAndConditions(clip=(0.0, 1.0))}
    rewards = RewardSet({"easy": (constant(-1, 0.5, 3), 2.0), "second": (second, 0.0)}, rules)
    assert (rewards.judges, rewards.measures) == ({"second": "easy"}, {})
    assert rewards(PROMPTS, SAMPLES).rewards["second"].tolist() == [0.5] * 3
    rollouts = rewards.without_judges()
    assert rollouts(PROMPTS, SAMPLES).rewards.keys() == {"easy"}
    assert rollouts(PROMPTS, SAMPLES).total.tolist() == rewards(PROMPTS, SAMPLES).total.tolist() == [0, 1, 2]
    assert build_reward("ocr", RewardConfig(judge=True)).judge_of == "total"


def test_a_judge_leaves_the_records_unscored_that_lack_what_it_compares_with() -> None:
    class Counts(NeedsTarget):
        def __call__(self, prompts, samples):
            values = torch.tensor([float(len(record.id)) for record in prompts])
            return RewardOutput(values=values, parts={"twice": values * 2}, ratios={"of": (values, values + 1)})

    judge = FunctionReward("second", Counts())
    judge.judge_of = "total"
    rewards = RewardSet({"plain": (constant(1, 2, 3), 1.0), "second": (judge, 0.0)})
    some = [PROMPTS[0], PromptRecord(id="four", prompt="", target_image=Path("x.png")), PROMPTS[2]]
    rewards.check_records(some)
    scores = rewards(some, SAMPLES)
    assert scores.total.tolist() == [1, 2, 3]
    columns = [scores.rewards["second"], scores.parts["second/twice"], *scores.ratios["second/of"]]
    assert [column.isnan().tolist() for column in columns] == [[True, False, True]] * 4
    assert [column[1].item() for column in columns] == [4, 8, 4, 5]
    assert rewards(PROMPTS, SAMPLES).rewards["second"].isnan().all()
    guard = RewardSet({"plain": (constant(1, 2, 3), 1.0), "guard": (NeedsTarget(), 0.0)})
    with pytest.raises(UserError, match="the reward guard compares with a target image, and 2 records have none"):
        guard.check_records(some)


def test_a_plain_text_is_no_record() -> None:
    rewards = RewardSet({"mine": (lambda prompts, samples: [1.0 for _ in samples], 1.0)})
    with pytest.raises(UserError, match="each prompt must be a PromptRecord, got the str 'a red cup'"):
        rewards(["a red cup"], [torch.zeros(3, 8, 8, dtype=torch.uint8)])  # type: ignore[list-item]
