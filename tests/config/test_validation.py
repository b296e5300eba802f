"""The parameter check: what is refused, and what the message says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from visual_grpo.config import flatten
from visual_grpo.config.validation import ParameterError, validate
from visual_grpo.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    tree = yaml.safe_load((ROOT / "conf/base/parameters.yml").read_text(encoding="utf-8"))
    return {**tree, "seed": 3}


def changed(defaults: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    tree = copy.deepcopy(defaults)
    *sections, key = name.split(".")
    section = tree
    for part in sections:
        section = section.setdefault(part, {})
    section[key] = value
    return tree


def test_the_defaults_are_typed(defaults):
    parameters = validate(defaults)
    assert parameters.seed == 3
    assert parameters.grpo.learning_rate == defaults["grpo"]["learning_rate"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "grpo.learning_rat",
            1,
            "rat = 1: there is no such parameter. Nearest: grpo.learning_rate",
        ),
        ("learning_rate", 1, "Nearest: grpo.learning_rate"),
        ("rewards.shapes.wieght", 2, "Nearest: rewards.shapes.weight"),
        ("policy.lora.rnk", 2, "Nearest: policy.lora.rank"),
        ("sampling.stock.zzzz", 2, "Allowed here: temperature, top_p"),
        (
            "grpo.group_size",
            1,
            "a group needs at least 2 samples, got {'ar': 1, 'dit': 1} (grpo.group_size, grpo.dit.group_size)",
        ),
        ("grpo.clip_low", 0, "grpo.clip_low = 0: should be greater than 0"),
        ("data.height", 100, "data.height = 100: should be a multiple of 32"),
        ("grpo.loss", "ppo", "grpo.loss = 'ppo': should be 'grpo', 'dr_grpo', 'dapo' or 'gspo'"),
        ("grpo.steps", "many", "grpo.steps = 'many': should be a valid integer"),
        ("policy.flow.noise", 0, "policy.flow.noise = 0: should be greater than 0"),
        ("policy.flow", {"sampler": "cps", "noise": 1.2}, "noise of the cps sampler is at most 1"),
        ("policy", {"component": "dit", "flow": {"window_start": 3}}, "must end before the last of"),
        ("policy", {"component": "both", "flow": {"window_steps": 4}}, "at most 3 steps, 0 to 2"),
        ("policy.signal_check.rollouts", 2, "at least 3, since fewer have no standard error"),
        ("sampling.stock.guidance_scale", 0.5, "should be greater than or equal to 1 (classifier-free guidance"),
        ("sampling.rollout.top_p", 0.9, "sampling.rollout must set temperature, top_p: 1"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(defaults, name, value, said):
    with pytest.raises(ParameterError) as refusal:
        validate(changed(defaults, name, value))
    assert said in str(refusal.value)
    assert str(refusal.value).startswith("A parameter is wrong:")


def test_every_problem_is_listed(defaults):
    tree = changed(changed(defaults, "grpo.group_size", 0), "data.hight", 64)
    del tree["grpo"]["steps"]
    with pytest.raises(ParameterError) as refusal:
        validate(tree)
    message = str(refusal.value)
    assert message.startswith("3 parameters are wrong:")
    assert "grpo.group_size = 0" in message
    assert "Nearest: data.height" in message
    assert "grpo.steps is missing" in message


def test_a_long_value_is_cut(defaults):
    with pytest.raises(ParameterError) as refusal:
        validate(changed(defaults, "grpo.steps", "x" * 500))
    assert "x" * 79 + "..." in str(refusal.value)
    assert "x" * 81 not in str(refusal.value)


def test_the_refusal_is_a_users_error():
    assert issubclass(ParameterError, UserError)


def test_flatten_joins_keys_with_dots_and_keeps_empty_sections():
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": {}}) == {"a.b": 1, "a.c.d": [2], "e": {}}
