"""Which rewards a configuration stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.defaults import parameters
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters, merged
from visual_grpo.config.presets import PRESETS
from visual_grpo.config.validation import ParameterError, validate
from visual_grpo.rewards.catalogue import BUILT_IN
from visual_grpo.starter.world_defaults import with_world


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": 3}, "data = 3: expected a section"),
        ({"rewards": {"shapes": 3}}, r"rewards\.shapes = 3: expected a section"),
        ({"modules": {"dit": {"rewards": 3}}}, r"modules\.dit\.rewards = 3: expected a section"),
    ],
)
def test_what_should_be_a_section_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parameters(**changes)


ROOT = Path(__file__).parents[2]
OWN = {"data": {"path": "my/photos"}}
GUARDS: dict[str, Any] = {"edge_density": (0.0, {}), "colour_entropy": (0.0, {})}
NO_GUARDS = dict.fromkeys(GUARDS)
REDNESS = {"redness": {"function": "my_rewards:redness"}}


def entries(config: Parameters) -> dict[str, tuple[float, dict[str, object]]]:
    return {name: (reward.weight, reward.options) for name, reward in config.rewards.items()}


def test_ones_own_reward_is_the_only_one():
    for data in ({}, OWN):
        config = parameters(**data, rewards=REDNESS)
        assert config.reward is None
        assert list(entries(config).items()) == [("redness", (1.0, {})), *GUARDS.items()]
        assert config.modules["dit"].rewards == {}


def test_the_guard_beside_ones_own_reward_can_be_changed_and_removed():
    assert entries(parameters(rewards={**REDNESS, **NO_GUARDS})) == {"redness": (1.0, {})}
    weighted = parameters(rewards={"edge_density": {"weight": 0.5}, **REDNESS})
    assert entries(weighted) == {**GUARDS, "edge_density": (0.5, {}), "redness": (1.0, {})}
    assert list(weighted.rewards) == ["edge_density", "redness", "colour_entropy"]
    stored = parameters(rewards={**REDNESS, **NO_GUARDS}).public()
    assert entries(parameters(**stored)) == {"redness": (1.0, {})}
    of_a_preset = parameters(**OWN, reward="text", rewards=NO_GUARDS).public()
    assert entries(parameters(**of_a_preset)) == {"ocr": (1.0, {})}
    assert entries(parameters(reward="listed", rewards=REDNESS)) == {"redness": (1.0, {})}


def test_a_reward_that_only_one_module_optimises_is_ones_own_too():
    rewards = {"redness": {**REDNESS["redness"], "weight": 0.0}}
    config = parameters(rewards=rewards, modules={"dit": {"rewards": {"redness": 2.0}}})
    assert config.reward is None
    assert config.weights(["dit"]) == {"redness": 2.0, "edge_density": 0.0, "colour_entropy": 0.0}


def test_other_values_change_a_preset_and_leave_the_rest():
    options = {"line": [0, 0, 1, 1]}
    config = parameters(**OWN, reward="text", rewards={"ocr": {"options": options}, "edge_density": {"weight": 0.5}})
    assert entries(config) == {"ocr": (1.0, options), **GUARDS, "edge_density": (0.5, {})}


def test_a_preset_and_ones_own_reward_are_added_and_null_removes():
    config = parameters(**OWN, reward="target", rewards={**REDNESS, **NO_GUARDS})
    assert entries(config) == {"ssim": (1.0, {}), "redness": (1.0, {})}
    without = parameters(**OWN, reward="edit", rewards={"source_ssim": None})
    assert (without.reward, list(without.rewards)) == ("edit", ["ssim", *GUARDS])


def test_a_reward_of_the_same_name_with_another_function_is_another_reward():
    own = {"ocr": {"function": "my_rewards:read", "weight": 0.5}}
    assert entries(parameters(**OWN, reward="text", rewards=own))["ocr"] == (0.5, {})


def test_parameters_with_their_rewards_spelled_out_mean_the_same():
    for config in (parameters(), parameters(reward="edit"), parameters(rewards=REDNESS)):
        assert Parameters.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": "taget"}, "Did you mean 'target'?"),
        (
            {"reward": "pick_score"},
            "should be 'auto', 'pickscore', 'hps', 'clip', 'aesthetic', 'geneval', 'ocr', 'target'",
        ),
        ({"reward": "listed"}, "nothing is rewarded: set reward to auto or one of pickscore"),
        ({"reward": None}, "nothing is rewarded: set reward to auto or one of pickscore, hps, clip"),
        ({"reward": "text", "modules": {"dit": {"rewards": {"pallete": 1}}}}, "names 'pallete', which is not in"),
        ({"reward": 3}, "reward = 3"),
    ],
)
def test_what_is_wrong_is_said(changes, said):
    import yaml

    tree = yaml.safe_load((ROOT / "conf/base/parameters.yml").read_text(encoding="utf-8")) | {"seed": 0} | changes
    with pytest.raises(ParameterError) as refusal:
        validate(with_world(merged(tree, OWN)))
    assert said in str(refusal.value)


def test_every_preset_is_of_built_in_rewards_and_workers():
    for preset in PRESETS.values():
        for name, entry in preset.rewards.items():
            path = entry.get("options", {}).get("worker")
            assert name in BUILT_IN if path is None else (ROOT / path / "worker.py").is_file()
            assert entry.get("function", BUILT_IN["http"]) == BUILT_IN["http"]
