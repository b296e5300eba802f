"""Parameters that a family cannot do: refused, and the message says what it has."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.training.few_steps import parameters
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.models.family import find_family
from visual_grpo.models.run_spec import resolve

STEPS = {"steps": 4, "guidance_scale": 1.5}
TOKENS = {"temperature": 1.3, "top_p": 1.0, "top_k": 0}


def asked(folder: Path, **changes: Any) -> Parameters:
    """Of a saved model; without a family's own mistakes."""
    sampling = {"rollout": {**TOKENS, **STEPS}, "eval": STEPS}
    changes["policy"] = {"train": "all", **changes.get("policy", {})}
    return parameters(folder, **{"model": {"path": "saved/model"}, "sampling": sampling, **changes})


def of_vl(folder: Path, **changes: Any) -> Parameters:
    sampling = {"rollout": TOKENS, "eval": {}}
    return asked(folder, **{"data": {"task": "segmentation"}, "sampling": sampling, **changes})


def of_sd3(folder: Path, **changes: Any) -> Parameters:
    return asked(folder, **{"sampling": {"rollout": STEPS, "eval": STEPS}, **changes})


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2_5_vl", {"data": {"task": "t2i"}}, "data.task is t2i, which qwen2_5_vl cannot do; it has segmenta"),
    ("sd3", {"data": {"task": "i2i"}}, "data.task is i2i, which sd3 cannot do; it has t2i"),
    ("glm_image", {"policy": {"train": "vl"}}, r"policy\.train names 'vl'\. The family glm_image has the modules:"),
    (
        "sd3",
        {"sampling": {"rollout": {**STEPS, "frames": 9}, "eval": STEPS}},
        r"sampling\.rollout\.frames is 9, but sd3 does not generate videos",
    ),
    (
        "qwen2_5_vl",
        {"sampling": {"rollout": {**TOKENS, "height": 64, "width": 96}, "eval": {}}},
        r"sampling\.rollout\.height is 64, but qwen2_5_vl generates no pictures",
    ),
    ("glm_image", {"grpo": {"loss": "dppo"}}, "dppo, which needs exact divergences .*, and ar has none"),
    *(
        (
            "sd3",
            {"grpo": {"loss": "gspo"}, "policy": {"flow": flow}},
            r"gspo, which .* but the 2 trained steps of dit are",
        )
        for flow in ({"window_steps": 2}, {"window_start": 1, "window_steps": None})
    ),
    (
        "sd3",
        {"grpo": {"loss": "nft"}, "policy": {"flow": {"noise": 0.5, "sampler": "cps"}}},
        r"nft, which has no sampler, noise of policy\.flow\. Set policy\.flow\.sampler=sde, policy\.flow\.noise=0\.7",
    ),
    ("sd3", {"grpo": {"loss": "nft", "target_kl": 0.1}}, r"grpo\.target_kl compares dit .*Set grpo\.average_decay=0"),
    ("sd3", {"grpo": {"loss": "nft"}, "modules": {"dit": {"target_kl": 0.1}}}, r"nft samples with an average of them"),
    (
        "sd3",
        {"grpo": {"loss": "awm", "sampler_correction": 2, "old_log_probs": "replay"}},
        "by their log-probs, but awm takes a sample without any",
    ),
    (
        "sd3",
        {"grpo": {"sampler_correction": 2}},
        r"so grpo\.old_log_probs has to be replay; it is auto with .* float32",
    ),
    ("sd3", {"policy": {"flow": {"draws": 2}}}, r"grpo, which has no draws of policy\.flow\. Set .*draws=1"),
    ("sd3", {"grpo": {"loss": "awm"}, "policy": {"share_start_noise": True}}, "with .* they are one picture"),
    *(
        (family, {"policy": {"decode_guidance_scale": 2, **policy}}, "guidance_scale is 2, which changes nothing")
        for family, policy in (
            ("sd3", {}),
            ("qwen2_5_vl", {}),
            ("glm_image", {"train": "dit"}),
            ("glm_image", {"train": "all", "stages": "joint"}),
        )
    ),
    ("glm_image", {"policy": {"train": ["ar", "dti"]}}, r"policy\.train names 'dti'\. Did you mean 'dit'\?"),
    ("glm_image", {"policy": {"train": []}}, r"policy\.train is empty\. The family glm_image has the modules"),
    (
        "glm_image",
        {"policy": {"train": "all", "stages": "joint"}, "grpo": {"max_refills": 2}},
        r"policy\.stages is joint, which generates one rollout of all prompts a step: it has neither grpo\.max_refills",
    ),
    (
        "glm_image",
        {"policy": {"train": "all", "stages": "joint"}, "grpo": {"rollout_prompts": 1}},
        "nor grpo.rollout_p",
    ),
    (
        "glm_image",
        {"policy": {"train": "all", "stages": "joint"}, "modules": {"dit": {"prompts_per_step": 3}}},
        r"modules\.dit\.prompts_per_step is 3 and grpo\.prompts_per_step \d+\. Leave the first out",
    ),
    *(
        (
            "sd3",
            {"model": {"path": "saved/model", **model}, "distributed": {"processes": 2, "sharded": True}},
            complaint,
        )
        for model, complaint in (
            ({"offload": "phases"}, "no network is whole on a GPU, .* Set model.offload to none"),
            ({"base_weights": "4bit"}, "only weights of full precision are sharded. Set model.base_weights to full"),
            ({"compile": True}, r"sharded is true, and model\.compile is true: .* Set model\.compile to false"),
        )
    ),
    (
        "sd3",
        {"model": {"path": "saved/model", "compile": True, "base_weights": "8bit"}},
        r"model\.compile is true, and model\.base_weights is 8bit: .* Set model\.base_weights to full",
    ),
    ("glm_image", {"policy": {"train": "dit", "stages": "joint"}}, r"policy\.stages is joint, .* but only dit is"),
    ("glm_image", {"modules": {"foo": {}}}, r"modules names 'foo'\. The family glm_image has the modules: ar, d"),
    ("sd3", {"modules": {"ar": {}}}, r"modules names 'ar'\. The family sd3 has the modules: dit"),
    (
        "sd3",
        {"sampling": {"rollout": {"temperature": 0.9, **STEPS}, "eval": STEPS}},
        r"sampling\.rollout sets temperature, but sd3 has no tokens; remove it",
    ),
    (
        "sd3",
        {"sampling": {"rollout": STEPS, "eval": {"top_k": 5, **STEPS}}},
        r"sampling\.eval sets top_k, but sd3 has no tokens",
    ),
    (
        "qwen2_5_vl",
        {"sampling": {"rollout": {**TOKENS, **STEPS}, "eval": {}}},
        r"sampling\.rollout sets steps, guidance_scale, but qwen2_5_vl has no denoising steps",
    ),
    (
        "glm_image",
        {"sampling": {"rollout": STEPS, "eval": {"steps": 4}}},
        r"sampling\.eval needs guidance_scale: glm_image has denoising steps",
    ),
    ("glm_image", {"policy": {"flow": {"window_steps": 4}}}, r"the window \(window_start 0, window_steps 4\) must"),
    (
        "glm_image",
        {"sampling": {"rollout": {"steps": 1, "guidance_scale": 1.0}}},
        r"sampling\.rollout\.steps is 1: .*at least 2",
    ),
    (
        "glm_image",
        {"model": {"path": "saved/model", "options": {"max_tokens": 3}}},
        r"family glm_image has no options \(null leaves an option out\):\n  model\.options\.max_tokens: Extra inputs",
    ),
    (
        "qwen2_5_vl",
        {"model": {"path": "saved/model", "options": {"max_token": 3}}},
        r"has the options instruction, max_tokens \(.*\):\n  model\.options\.max_token: .* Did you mean 'max_tokens'\?",
    ),
    (
        "qwen2_5_vl",
        {"model": {"path": "saved/model", "options": {"instruction": "Where?", "max_tokens": 0}}},
        r"model\.options\.instruction: it must contain \{query\}.*\n.*options\.max_tokens: .*greater than or eq",
    ),
]


@pytest.mark.parametrize(("family", "changes", "complaint"), CASES)
def test_what_a_family_lacks_is_refused(tmp_path: Path, family: str, changes: dict[str, Any], complaint: str) -> None:
    found, base = find_family(family), {"glm_image": asked, "sd3": of_sd3, "qwen2_5_vl": of_vl}[family]
    resolve(base(tmp_path), family=found)
    with pytest.raises(UserError, match=complaint):
        resolve(base(tmp_path, **changes), family=found)


def test_a_loss_is_refused_where_the_replay_lacks_what_it_needs(tmp_path: Path) -> None:
    for loss in ("dppo", "nft", "awm"):
        resolve(of_sd3(tmp_path, grpo={"loss": loss}), family=find_family("sd3"))
    with pytest.raises(UserError, match=r"needs velocities \(flow modules have them\), and vl has none"):
        resolve(of_vl(tmp_path, grpo={"loss": "nft"}), family=find_family("qwen2_5_vl"))


@pytest.mark.parametrize(
    ("grpo", "draws", "complaint"),
    [
        (
            {"loss": "nft", "clip_low": 0.1, "clip_high": 0.1},
            1,
            "nft, which has no clip_low and no clip_high: dit would",
        ),
        ({"loss": "awm", "clip_high": 0.1, "updates_per_rollout": 2}, 2, None),
        (
            {"loss": "awm", "updates_per_rollout": 2},
            3,
            r"draws is 3, but the updates .* one draw each, and dit has only 2",
        ),
        ({"loss": "nft", "updates_per_rollout": 1}, 2, "draws is 2, .* and dit has only 1"),
    ],
)
def test_settings_that_a_loss_would_not_use_are_refused(
    tmp_path: Path, grpo: dict[str, Any], draws: int, complaint: str | None
) -> None:
    policy = {"flow": {"draws": draws}}
    with nullcontext() if complaint is None else pytest.raises(UserError, match=complaint):
        resolve(of_sd3(tmp_path, grpo=grpo, policy=policy), family=find_family("sd3"))


def test_a_window_does_not_matter_where_no_flow_module_is_trained(tmp_path: Path) -> None:
    config = asked(tmp_path, policy={"train": "ar", "flow": {"window_steps": 4}})
    spec = resolve(config, family=find_family("glm_image"))
    assert spec.modules == ("ar",)
    assert list(spec.samplers) == ["rollout", "eval"]  # No way to draw with that window.


def test_a_plan_says_what_is_trained_and_drawn(tmp_path: Path) -> None:
    spec = resolve(asked(tmp_path, policy={"train": ["dit", "ar"]}), family=find_family("glm_image"))
    assert spec.modules == ("ar", "dit")
    assert not spec.joint
    assert (spec.rollout.temperature, spec.rollout.top_p, spec.rollout.top_k) == (1.3, 1.0, 0)
    assert {name: sampler.stochastic for name, sampler in spec.samplers.items()} == {
        "rollout": False,
        "sde": True,
        "eval": False,
    }
    assert spec.samplers["eval"].temperature is None
    flow_only = resolve(of_sd3(tmp_path), family=find_family("sd3"))
    assert list(flow_only.samplers) == ["sde", "eval"]
    assert flow_only.rollout.temperature is None
    assert list(resolve(of_sd3(tmp_path, grpo={"loss": "nft"}), family=find_family("sd3")).samplers) == ["eval"]
    vl = resolve(of_vl(tmp_path, sampling={"rollout": {}, "eval": {}}), family=find_family("qwen2_5_vl"))
    assert list(vl.samplers) == ["rollout", "eval"]
    assert (vl.rollout.temperature, vl.rollout.top_p, vl.rollout.top_k) == (1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("family", "asks", "changes", "expected"),
    [
        ("glm_image", asked, {}, {"temperature": 1.3, "top_p": 1.0, "top_k": 0, "stochastic": False}),
        ("glm_image", asked, {"sampling": {"rollout": STEPS, "eval": STEPS}}, {"temperature": 1.0, "top_p": 1.0}),
        ("sd3", of_sd3, {}, {"steps": 4, "stochastic": True}),
        ("sd3", of_sd3, {"grpo": {"loss": "nft"}}, {"steps": 4, "stochastic": False}),
    ],
)
def test_samples_by_the_rollout_are_those_of_a_training(
    family: str, asks: Any, changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    sampler = resolve(asks(tmp_path, **changes), family=find_family(family)).sampler("rollout")
    assert sampler.model_dump(include=set(expected)) == expected


def test_a_control_is_the_eval_sampler_with_its_changes(tmp_path: Path) -> None:
    controls = [{"guidance_scale": 3.0}, {"guidance_scale": 1.5}, {"top_k": 5, "steps": 8}, {"guidance_scale": 3.0}]
    spec = resolve(asked(tmp_path, evaluation={"controls": controls}), family=find_family("glm_image", None))
    sampler = spec.samplers["eval"]
    assert spec.controls == {  # Without the one that changes nothing, and each once.
        "eval guidance_scale=3": sampler.model_copy(update={"guidance_scale": 3.0}),
        "eval top_k=5 steps=8": sampler.model_copy(update={"top_k": 5, "steps": 8}),
    }


def test_an_empty_control_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a control sets at least one of temperature, top_p, top_k, steps, guidance"):
        asked(tmp_path, evaluation={"controls": [{}]})


def test_controls_of_what_a_family_lacks_are_left_out(tmp_path: Path) -> None:
    controls = {"evaluation": {"controls": [{"guidance_scale": 3.0}, {"temperature": 0.5, "top_p": 0.9}]}}
    sd3 = resolve(of_sd3(tmp_path, **controls), family=find_family("sd3", None))
    assert list(sd3.controls) == ["eval guidance_scale=3"]
    language = resolve(of_vl(tmp_path, **controls), family=find_family("qwen2_5_vl", None))
    assert list(language.controls) == ["eval temperature=0.5 top_p=0.9"]
