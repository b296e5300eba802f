"""The parameter check: what is refused, and what the message says."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from visual_grpo.common.errors import UserError
from visual_grpo.config import GRPOConfig, ModuleConfig, PromotionConfig, flatten
from visual_grpo.config.credentials import with_variables
from visual_grpo.config.validation import ParameterError, validate
from visual_grpo.starter.world_defaults import with_world

ROOT = Path(__file__).parents[2]
WEIGHTS = {"shapes": 1.0, "rendering": 0.0, "outline": 0.0, "delta_e": 0.0}


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    tree = yaml.safe_load((ROOT / "conf/base/parameters.yml").read_text(encoding="utf-8"))
    return with_world({**tree, "seed": 3})


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
        ("grpo.learning_rat", 1, "rat = 1: this parameter does not exist. Did you mean 'grpo.learning_rate'?"),
        ("learning_rate", 1, "Did you mean 'grpo.learning_rate'?"),
        ("rewards.shapes.wieght", 2, "Did you mean 'rewards.shapes.weight'?"),
        ("policy.lora.rnk", 2, "Did you mean 'policy.lora.rank'?"),
        ("sampling.eval.zzzz", 2, "Allowed here: temperature, top_p"),
        ("modules.dit.learning_rat", 1, "Did you mean 'modules.dit.learning_rate'?"),
        (
            "modules.dit.rewards",
            {"renderng": 1.0},
            "modules.dit.rewards names 'renderng', which is not in rewards: shapes, rendering",
        ),
        (
            "rewards.judge",
            {"judge": True, "weight": 0.5},
            "a judge is never optimised, and this has the weight 0.5",
        ),
        ("rewards.judge", {"judge_of": "shapes", "weight": 0.0}, "judge_of is shapes, and judge is not true"),
        (
            "rewards.judge",
            {"judge": True, "judge_of": "shape"},
            "rewards.judge.judge_of names 'shape'; expected a reward that is optimised, with no weight below 0: shapes,"
            " rendering, or null for the total. Did you mean 'shapes'?",
        ),
        ("rewards.judge", {"judge": True, "judge_of": "judge"}, "judge_of names 'judge'; expected a reward that is"),
        ("rewards.rendering", {"judge": True}, "rewards.rendering is a judge, and a module has a weight for it"),
        (
            "rewards",
            {"shapes": {"only_where": {"judge": 0.5}, "clip": [0, 1]}, "rendering": {}, "judge": {"judge": True}},
            "rewards.shapes.only_where names 'judge', a judge, and judges do not score rollouts",
        ),
        ("policy.decode_guidance_scale", True, "decode_guidance_scale = True: should be a number, not true or false"),
        ("rewards.shapes.clip", [True, None], "shapes.clip = [True, None]: should be a number, not true or false"),
        ("modules.dit.rewards", {"rendering": False}, "should be a number, not true or false"),
        ("policy.train", None, "policy.train = None: should be a valid string"),
        ("data.path", "", "data.path = '': "),
        ("plan.gpu", True, "plan.gpu = True: should be a valid string"),
        ("grpo.clip_low", 0, "grpo.clip_low = 0: should be greater than 0"),
        ("data.height", 100, "data.height = 100: should be a multiple of 32"),
        ("grpo.loss", "ppo", "grpo.loss = 'ppo': should be 'grpo', "),
        ("grpo.divergence_limit", 0.1, "divergence_limit is for the loss dppo, not for grpo"),
        ("grpo.nft_beta", 0.1, "nft_beta is for the loss nft, not for grpo"),
        ("grpo.average_decay", 0.1, "average_decay is for the loss nft or awm, not for grpo"),
        ("grpo.steps", "many", "grpo.steps = 'many': should be a valid integer"),
        ("policy.flow.noise", 0, "policy.flow.noise = 0: should be greater than 0"),
        ("policy.flow", {"sampler": "cps", "noise": 1.2}, "noise of the cps sampler is at most 1"),
        ("policy.signal_check.rollouts", 2, "at least 3, since fewer have no standard error"),
        ("sampling.eval.guidance_scale", 0.5, "should be greater than or equal to 1 (classifier-free guidance"),
        ("sampling.rollout.top_p", 0.9, "sampling.rollout can have no top_p below 1"),
        ("sampling.rollout.top_k", 50, "no top_k above 0: a truncated distribution biases the importance ratio"),
        ("sampling.eval.stochastic", True, "leave stochastic out"),
        ("model.device", "meta", "(auto, cpu, cuda or cuda:N)"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(defaults, name, value, said):
    with pytest.raises(ParameterError) as refusal:
        validate(changed(defaults, name, value))
    assert said in str(refusal.value)
    assert str(refusal.value).startswith("A parameter is wrong:")


def test_a_module_that_is_set_to_null_has_the_settings_of_all(defaults):
    parameters = validate(changed(defaults, "modules.dit", None))
    assert parameters.modules == {}
    assert parameters.grpo_of("dit") == parameters.grpo
    assert parameters.weights(["dit"]) == parameters.weights(["ar"]) == WEIGHTS


def test_a_module_has_its_own_settings_and_shares_the_others(defaults):
    tree = changed(changed(defaults, "modules.dit.lora", {"rank": 4}), "policy.lora.alpha", 20)
    parameters = validate(tree)
    own, shared = parameters.grpo_of("dit"), parameters.grpo_of("ar")
    assert shared == parameters.grpo
    assert (own.learning_rate, own.kl_weight) == (6.0e-4, 0.3)
    assert own.model_copy(update={k: getattr(shared, k) for k in parameters.modules["dit"].grpo()}) == shared
    assert [(of.rank, of.alpha) for of in map(parameters.lora_of, ("dit", "ar"))] == [(4, 20), (8, 20)]
    assert validate(changed(parameters.public(), "policy.lora.alpha", 5)).lora_of("dit").alpha == 20, "as it was stored"
    # Each module is trained for its own weights; what trains both is judged by their mean.
    assert parameters.weights(["ar"]) == WEIGHTS
    assert parameters.weights(["dit"]) == WEIGHTS | {"rendering": 1.0}
    assert parameters.weights(["ar", "dit"]) == WEIGHTS | {"rendering": 0.5}
    without = validate(changed(tree, "modules.ar.rewards", {"shapes": 0.0}))
    assert without.weights(["ar"]) == WEIGHTS | {"shapes": 0.0}


def test_a_modules_own_setting_has_the_limits_and_the_consequences_of_the_shared_one():
    own, shared = ModuleConfig.model_fields, GRPOConfig.model_fields
    for name in own.keys() - {"lora", "rewards"}:
        assert own[name].metadata == shared[name].metadata, name


def test_every_problem_is_listed(defaults):
    tree = changed(changed(defaults, "grpo.group_size", 0), "data.hight", 64)
    del tree["grpo"]["steps"]
    with pytest.raises(ParameterError) as refusal:
        validate(tree)
    message = str(refusal.value)
    assert message.startswith("3 parameters are wrong:")
    assert "grpo.group_size = 0" in message
    assert "Did you mean 'data.height'?" in message
    assert "grpo.steps is missing" in message


def test_a_long_value_is_cut(defaults):
    with pytest.raises(ParameterError) as refusal:
        validate(changed(defaults, "grpo.steps", "x" * 500))
    assert "x" * 79 + "..." in str(refusal.value)
    assert "x" * 81 not in str(refusal.value)


def test_flatten_joins_keys_with_dots_and_keeps_empty_sections():
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": {}}) == {"a.b": 1, "a.c.d": [2], "e": {}}


SWORDFISH = "sw0rdf1shSw0rdf1sh"
NAMES = (
    *(
        "api_key",
        "apikey",
        "HF_TOKEN",
        "db_passwd",
        "my-secret",
        "auth.bearer",
        "openai_key",
        "openaiKey",
        "api_keys",
        "DB_PASS",
    ),
    *(
        "dbpassword",
        "PGPASSWORD",
        "token",
        "access_tokens",
        "credentials",
        "Authorization",
        "session-cookie",
        "judge_key",
    ),
)
ADDRESSES = (
    *("https://me:swordfish@there", "https://swordfish@there/x", "s3://swordfish@bucket", "see https://me:x@there."),
    *("https://there/x?n=2&token=swordfish", "https://there/x?key=swordfish", "https://there/x;sig=swordfish"),
    *(f"https://there/x?t={SWORDFISH}", f"https://there#{SWORDFISH}", "https://there/#access_token=swordfish"),
    f"wss://there/?subscription-key={SWORDFISH}",
)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(({name: "abc"}, name) for name in NAMES),
        *(({"server": address}, "server") for address in ADDRESSES),
        *(
            ({"x": text}, "x")
            for text in (
                f"sk-{SWORDFISH}",
                f"--token=hf_{SWORDFISH}",
                "curl -H 'X: Bearer swordfishswordfish'",
                "a --password=fish",
                "-----BEGIN RSA PRIVATE KEY",
            )
        ),
        ({"row_key": SWORDFISH}, "row_key"),
        ({"password": 12345678}, "password"),
        ({"headers": {"X-Whatever": "swordfish"}}, "headers.X-Whatever"),
        ({"headers": [["X-Whatever", "swordfish"]]}, "headers.0.0"),
        ({"nested": {"password": "swordfish"}}, "nested.password"),
        ({"servers": ["http://a", {"api_key": "swordfish"}]}, "servers.1.api_key"),
        ({"passwords": [["swordfish"]]}, "passwords.0.0"),
        ({"servers": [["https://me:swordfish@there"]]}, "servers.0.0"),
    ],
)
@pytest.mark.parametrize("section", ["rewards.judge.options", "model.options"])
def test_what_looks_like_a_secret_is_refused_and_not_shown(
    defaults: dict[str, Any], section: str, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ParameterError, match=f"{re.escape(f'{section}.{named}')} looks like a secret") as caught:
        validate(changed(changed(defaults, "rewards.judge", {"weight": 0.0}), section, options))
    assert "rdf" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("tracking.tensorboard", "s3://me:swordfish@bucket/logs", "tracking.tensorboard looks like a secret"),
        ("generate", {"prompt": f"hf_{SWORDFISH}"}, "generate.prompt looks like a secret"),
        (
            "model.options",
            {"keys": {f"hf_{SWORDFISH}": 1}},
            "options.keys, in the name of an entry, looks like a",
        ),
        ("rewards.judge", {"api_key": "swordfish"}, "rewards.judge.api_key: this parameter does not exist"),
    ],
)
def test_secrets_in_other_sections_are_refused_too(defaults: dict[str, Any], name: str, value: Any, said: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(said)) as caught:
        validate(changed(defaults, name, value))
    assert "rdf" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"api_key": "$KEY", "headers": {"X-Key": "$KEY", "Authorization": "Bearer $KEY", "Accept": "text/plain"}},
        {"api_keys": ["$KEY", "$OTHER"], "servers": [{"token": "$KEY"}]},
        {"session_tokens": 512, "judge_key": 1},
        {"max_token": 5, "max_tokens": "5", "tokens": "a", "tokenizer": "b", "eos_token": "</s>", "token_id": "7"},
        {"key": "value", "keys": ["a", "b"], "keypoints": "c", "monkey": "d", "sort_key": "e", "column_key": "image_2"},
        {"author": "a", "secretary": "b", "password_file": "c", "api_key_env": "KEY", "api_key": None, "auth": ""},
        {"columns": ["token", "password", "api_key"], "text": "key: value, token=5, a password: 1", "size": "512x512"},
        {"url": "http://a:80/b@c?size=3", "ip": "http://[::1]:80/v1", "bad": "http://[a", "page": "http://a/b#part-2"},
        {
            "git": "ssh://git@there/x",
            "hub": "hf://datasets/a/b@main",
            "model": "models:/a@champion",
            "mail": "me@there",
        },
        {"at": f"https://there/x?revision={SWORDFISH}", "sha": "0123456789abcdef0123", "id": "http://a/?uuid=a1-b2"},
    ],
)
def test_variables_and_other_names_are_not(defaults: dict[str, Any], options: dict[str, Any]) -> None:
    parameters = validate(changed(defaults, "rewards.judge", {"weight": 0.0, "options": options}))
    assert parameters.rewards["judge"].options == options


def test_a_variable_is_looked_up_when_the_reward_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "swordfish")
    options = {"key": "$KEY", "keys": [["$KEY"]], "headers": {"A": "Bearer $KEY"}, "rubric": "costs $KEY"}
    assert with_variables(options, "judge") == {
        "key": "swordfish",
        "keys": [["swordfish"]],
        "headers": {"A": "Bearer swordfish"},
        "rubric": "costs $KEY",
    }
    with pytest.raises(
        UserError, match=r"reward 'judge': an option names the environment variable NO_KEY.*export NO_KEY"
    ):
        with_variables({"key": "$NO_KEY"}, "judge")


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("data", "visual_grpo"),
        ("data/text", "visual_grpo-text"),
        ("data/sd3_small/photos-0a1b2c", "visual_grpo-sd3_small-photos-0a1b2c"),
        ("/big disk/out", "visual_grpo-big_disk-out"),
    ],
)
def test_each_output_folder_has_a_registered_model(output: str, name: str) -> None:
    assert PromotionConfig().name(output) == name
    assert PromotionConfig(model="shapes").name(output) == "shapes"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        *(({"model": name}, "should match pattern") for name in ("a/b", "a:b", " ")),
        ({"alias": "a b"}, "should match pattern"),
        *(({"alias": name}, "MLflow reserves latest") for name in ("latest", "Latest", "v1", "V12")),
        *(({name: value}, name) for name, value in {"error": 0.5, "gates_per_year": 0, "margin": float("nan")}.items()),
    ],
)
def test_what_mlflow_could_not_store_or_reserves_and_an_impossible_rule_are_refused(
    wrong: dict[str, object], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        PromotionConfig.model_validate(wrong)


def test_a_judge_has_no_weight_and_leaves_the_reward_to_be_chosen(defaults):
    config = validate(changed(defaults, "rewards.second", {"judge": True, "judge_of": "shapes"}))
    assert config.weights(["ar"]) == WEIGHTS | {"second": 0.0}
    rewards = {**defaults["rewards"], "lower": {"weight": -1.0}, "second": {"judge": True, "judge_of": "lower"}}
    with pytest.raises(ParameterError, match="judge_of names 'lower'"):
        validate(changed(defaults, "rewards", rewards))
    own_data = with_world({**defaults, "reward": "auto", "rewards": {"second": {"judge": True}}, "data": {"path": "x"}})
    assert own_data["reward"] == "auto", "a judge is no reward of one's own"
