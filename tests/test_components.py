"""What is refused before anything runs."""

from __future__ import annotations

import pytest

from tests.evaluation.defaults import parameters
from visual_grpo.errors import UserError
from visual_grpo.preflight import configuration
from visual_grpo.preflight.configuration import check


def test_a_starter_that_cannot_be_pretrained_is_refused_before_anything_runs():
    check(parameters())
    sd3 = {"family": "sd3"}
    image = {
        "sampling": {"rollout": {"temperature": None, "top_p": None, "top_k": None}},
        "policy": {"train": "dit"},
        "evaluation": {"controls": []},
    }
    check(parameters(model=sd3, **image))
    with pytest.raises(UserError, match=r"pretrains no small sd3 on starter\.world words"):
        check(parameters(model=sd3, starter={"world": "words"}, **image))


def test_a_hub_id_of_a_named_family_is_not_looked_up_before_it_is_loaded(monkeypatch):
    def unreachable(*arguments: object) -> None:
        raise AssertionError("the check asked the hub")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    check(parameters(model={"family": "glm_image", "path": "zai-org/GLM-Image"}))
    with pytest.raises(UserError, match="holds neither model_index"):
        check(parameters(model={"family": "glm_image", "path": "/nowhere/at/all"}))


def test_a_gated_reward_has_weights_of_one_sign():
    """Its worst is another one by each sign, and a joint rollout judges both modules together."""
    gated = {"hard": {"function": "x:y"}, "easy": {"function": "x:y", "clip": [0, 1], "only_where": {"hard": 0.5}}}
    for sign in (0.5, 0.0, -0.5):
        config = parameters(rewards=gated, modules={"dit": {"rewards": {"easy": sign}}})
        configuration._check_gates(config, ["ar"])
        if sign >= 0:
            configuration._check_gates(config, ["ar", "dit"])
            continue
        with pytest.raises(UserError, match=r"rewards.easy.only_where.*ar 1, dit -0.5. Expected weights of one sign"):
            configuration._check_gates(config, ["ar", "dit"])
