"""What a configuration asks of a model's family, and what is refused because it does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.evaluation.defaults import parameters
from visual_grpo.components import make_plan
from visual_grpo.errors import UserError
from visual_grpo.preflight import configuration
from visual_grpo.preflight.configuration import check

LANGUAGE: dict[str, Any] = {
    "data": {"task": "segmentation"},
    "starter": {"world": "scenes"},
    "modules": {"dit": None},
    "evaluation": {"controls": []},
    "sampling": {"rollout": {"steps": None, "guidance_scale": None}, "stock": {"steps": None, "guidance_scale": None}},
}


@pytest.mark.parametrize(
    ("policy", "modules", "joint"),
    [
        ({}, ("ar", "dit"), False),
        ({"train": "all", "stages": "joint"}, ("ar", "dit"), True),
        ({"train": ["dit", "ar"]}, ("ar", "dit"), False),
        ({"train": ["ar"]}, ("ar",), False),
    ],
)
def test_modules_are_trained_in_the_order_in_which_they_generate(policy, modules, joint):
    plan = make_plan(parameters(policy=policy))
    assert (plan.family.name, plan.modules, plan.joint) == ("glm_image", modules, joint)
    assert list(plan.samplers) == ["rollout", "sde", "stock"]


def test_a_language_model_has_one_module_no_stochastic_sampler_and_its_own_options():
    plan = make_plan(parameters(**LANGUAGE, model={"options": {"max_tokens": 7}}))
    assert (plan.family.name, plan.modules, plan.joint) == ("qwen2_5_vl", ("vl",), False)
    assert list(plan.samplers) == ["rollout", "stock"]
    assert plan.options.max_tokens == 7
    assert (plan.rollout.temperature, plan.rollout.top_p, plan.rollout.top_k) == (1, 1, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": {"train": "dti"}}, "policy.train names 'dti'. Did you mean 'dit'?"),
        ({"policy": {"train": []}}, "policy.train is empty"),
        ({"modules": {"vae": {}}}, "modules names 'vae'"),
        ({"model": {"family": "sd33"}}, "Did you mean 'sd3'?"),
        ({"model": {"options": {"max_tokens": 3}}}, "glm_image has no options"),
        (
            {"grpo": {"group_size": 1}},
            "at least 2 samples, got {'ar': 1, 'dit': 1} (grpo.group_size, modules.NAME.group_size)",
        ),
        ({"modules": {"dit": {"group_size": 1}}}, "at least 2 samples, got {'ar': 8, 'dit': 1}"),
        ({"policy": {"train": "dit", "flow": {"window_start": 3}}}, "must end before the last of"),
        ({"policy": {"flow": {"window_steps": 4}}}, "at most 3 steps, 0 to 2"),
        ({"sampling": {"stock": {"steps": None}}}, "sampling.stock needs steps: glm_image has denoising steps"),
        (LANGUAGE | {"sampling": {}}, "sampling.rollout sets steps, guidance_scale, but qwen2_5_vl has no denoising"),
        (LANGUAGE | {"modules": {}}, "modules names 'dit'"),
        (LANGUAGE | {"model": {"family": "glm_image"}}, "data.task is segmentation, which glm_image cannot do"),
        (LANGUAGE | {"model": {"options": {"max_token": 3}}}, "Did you mean 'max_tokens'?"),
    ],
)
def test_what_does_not_fit_the_family_is_refused_with_what_it_has(changes, said):
    with pytest.raises(UserError) as refusal:
        make_plan(parameters(**changes))
    assert said in str(refusal.value)


def test_a_joint_rollout_may_have_one_sample_of_a_stage():
    assert make_plan(parameters(policy={"stages": "joint"}, modules={"dit": {"group_size": 1}})).joint
    # The window matters only to a module that is trained.
    assert make_plan(parameters(policy={"train": "ar", "flow": {"window_start": 3}})).modules == ("ar",)


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
