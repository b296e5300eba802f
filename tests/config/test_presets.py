"""Which folder a run writes to, and which rewards a configuration stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kedro.config import OmegaConfigLoader

from tests.evaluation.defaults import parameters
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.config.presets import PRESETS, pinned, with_output_folders
from visual_grpo.config.schema import ParameterError, validate
from visual_grpo.rewards.catalogue import BUILT_IN


def folders(tree: dict[str, Any], environment: str | None = None) -> tuple[str, str, str, str, str]:
    """Of the outputs, the records, the drawn dataset, the pretrained model, the checkpoints."""
    filled = with_output_folders(tree, environment)
    starter = filled["starter"]
    return (
        filled["output"],
        filled["data"]["path"],
        starter["dataset"],
        starter["model"],
        filled["tracking"]["checkpoints"],
    )


DEFAULT = ("data", "data/01_raw/shapes", "data/01_raw/shapes", "data/06_models/base", "data/06_models/checkpoints")


@pytest.mark.parametrize("environment", [None, "base", "local"])
def test_the_default_writes_into_data(environment: str | None) -> None:
    assert folders({}, environment) == DEFAULT
    assert folders({"output": None, "data": {"path": None, "task": "t2i"}}, environment) == DEFAULT


def test_an_environment_and_another_task_have_folders() -> None:
    words = {"starter": {"world": "words"}}
    assert folders(words, "text")[:3] == ("data/text", "data/text/01_raw/words", "data/text/01_raw/words")
    assert folders({"data": {"task": "i2i"}})[:2] == ("data/i2i", "data/i2i/01_raw/shapes")
    scenes = {"starter": {"world": "scenes"}, "data": {"task": "segmentation"}}
    assert folders(scenes, "negative_points")[3] == "data/negative_points/06_models/base"


def test_own_data_has_a_folder_and_shares_the_pretrained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output, path, dataset, model, checkpoints = folders({"data": {"path": "a/my photos"}})
    assert output.startswith("data/my_photos-")
    assert checkpoints == f"{output}/06_models/checkpoints"
    assert (path, dataset, model) == ("a/my photos", *DEFAULT[2:4])


def test_spellings_of_one_folder_are_one_and_folders_of_one_name_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spellings = ["a/photos", "./a/photos/", "a/../a/photos", str(tmp_path / "a/photos")]
    assert len({folders({"data": {"path": path}})[0] for path in spellings}) == 1
    assert len({folders({"data": {"path": path}})[0] for path in ["a/photos", "b/photos"]}) == 2
    models = [None, "models/a", "./models/a", "models/b", "someone/model"]
    assert len({folders({"data": {"path": "a/photos"}, "model": {"path": model}})[0] for model in models}) == 4


def test_a_folder_that_is_given_stays() -> None:
    assert folders({"output": "data/try"}, "text")[0] == "data/try"
    given = {"output": "data/try", "tracking": {"checkpoints": "elsewhere"}, "starter": {"model": "m", "dataset": "d"}}
    assert folders(given) == ("data/try", "d", "d", "m", "elsewhere")


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
        Parameters.model_validate(changes)


ROOT = Path(__file__).parents[2]
OWN = {"data": {"path": "my/photos"}}
GUARDS: dict[str, Any] = {"edge_density": (0.0, {}), "colour_entropy": (0.0, {})}
NO_GUARDS = dict.fromkeys(GUARDS)
REDNESS = {"redness": {"function": "my_rewards:redness"}}


def of_environment(name: str, **changes: Any) -> Parameters:
    from visual_grpo.settings import CONFIG_LOADER_ARGS

    loader = OmegaConfigLoader(str(ROOT / "conf"), env=name, runtime_params=changes, **CONFIG_LOADER_ARGS)
    return validate(with_output_folders(loader["parameters"], name))


def entries(config: Parameters) -> dict[str, tuple[float, dict[str, object]]]:
    return {name: (reward.weight, reward.options) for name, reward in config.rewards.items()}


@pytest.mark.parametrize(
    ("environment", "module", "preset", "expected"),
    [
        ("base", "ar", "shapes", {"shapes": (1.0, {}), "palette": (0.0, {})}),
        ("base", "dit", "shapes", {"shapes": (1.0, {}), "palette": (1.0, {})}),
        ("sd3_small", "dit", "shapes", {"shapes": (1.0, {}), "palette": (0.0, {})}),
        ("text", "dit", "words", {"ocr": (1.0, {"line": [0, 0, 1, 1]}), **GUARDS}),
        ("negative_points", "vl", "negative_points", {"negative_points": (1.0, {"cache": 4096})}),
    ],
)
def test_what_the_starter_draws_has_its_rewards(environment, module, preset, expected):
    config = of_environment(environment)
    assert config.reward == preset
    assert list(config.rewards) == list(expected)
    weights = config.weights([module])
    assert {name: (weights[name], reward.options) for name, reward in config.rewards.items()} == expected


@pytest.mark.parametrize("environment", ["glm_image", "sd3", "qwen_image", "base", "text"])
def test_other_data_waits_for_its_records(environment):
    config = of_environment(environment, data={"path": "my/photos"})
    assert (config.reward, config.rewards) == ("auto", {})
    assert of_environment(environment, data={"path": "my/photos"}, reward="text").reward == "text"


def test_the_released_language_model_keeps_the_settings_of_its_reward():
    config = of_environment("qwen2_5_vl")
    assert config.reward is None
    assert config.rewards["negative_points"].options["think"] is True


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
    stored = parameters(rewards={**REDNESS, **NO_GUARDS}).model_dump(mode="json")
    assert entries(parameters(**pinned(stored))) == {"redness": (1.0, {})}


def test_answers_have_no_guard_of_images_beside_them():
    own = of_environment("negative_points", reward=None, rewards=REDNESS)
    assert own.reward is None
    assert "edge_density" not in own.rewards


def test_a_reward_that_only_one_module_optimises_is_ones_own_too():
    rewards = {"redness": {**REDNESS["redness"], "weight": 0.0}}
    config = parameters(rewards=rewards, modules={"dit": {"rewards": {"redness": 2.0}}})
    assert config.reward is None
    assert config.weights(["dit"]) == {"redness": 2.0, "edge_density": 0.0, "colour_entropy": 0.0}


def test_other_values_change_a_preset_and_leave_the_rest():
    config = parameters(rewards={"shapes": {"weight": 3.0}, "edge_density": {"weight": 0.0}})
    assert config.reward == "shapes"
    assert entries(config) == {"shapes": (3.0, {}), "palette": (0.0, {}), "edge_density": (0.0, {})}
    assert config.weights(["dit"])["palette"] == 1.0
    assert parameters(modules={"dit": {"rewards": {"palette": 2.0}}}).weights(["dit"])["palette"] == 2.0
    assert entries(parameters(reward="text", rewards={"ocr": {"options": {"line": [0, 0, 1, 1]}}}))["ocr"] == (
        1.0,
        {"line": [0, 0, 1, 1]},
    )
    more = parameters(reward="words", rewards={"ocr": {"options": {"more": 1}}})
    assert more.rewards["ocr"].options == {"line": [0, 0, 1, 1], "more": 1}


def test_a_preset_and_ones_own_reward_are_added_and_null_removes():
    config = parameters(**OWN, reward="target", rewards={**REDNESS, **NO_GUARDS})
    assert entries(config) == {"ssim": (1.0, {}), "redness": (1.0, {})}
    without = parameters(rewards={"palette": None})
    assert (without.reward, list(without.rewards), without.modules["dit"].rewards) == ("shapes", ["shapes"], {})


def test_a_reward_of_the_same_name_with_another_function_is_another_reward():
    own = {"ocr": {"function": "my_rewards:read", "weight": 0.5}}
    assert entries(parameters(**OWN, reward="words", rewards=own))["ocr"] == (0.5, {})


def test_the_drawn_data_is_known_by_any_spelling_of_its_path():
    for path in ("./data/01_raw/shapes/", str(Path("data/01_raw/shapes").resolve())):
        assert parameters(data={"path": path}).reward == "shapes"


def test_parameters_with_their_rewards_spelled_out_mean_the_same():
    for config in (parameters(), parameters(reward="edit"), parameters(rewards=REDNESS), of_environment("text")):
        assert Parameters.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": "taget"}, "Did you mean 'target'?"),
        ({"reward": None}, "nothing is rewarded: set reward to one of shapes, words, text, target, edit"),
        ({"reward": "text", "modules": {"dit": {"rewards": {"pallete": 1}}}}, "names 'pallete', which is not in"),
        ({"reward": 3}, "reward = 3"),
    ],
)
def test_what_is_wrong_is_said(changes, said):
    import yaml

    tree = yaml.safe_load((ROOT / "conf/base/parameters.yml").read_text(encoding="utf-8")) | {"seed": 0} | changes
    with pytest.raises(ParameterError) as refusal:
        validate(tree)
    assert said in str(refusal.value)


def test_every_preset_is_of_built_in_rewards():
    assert {name for preset in PRESETS.values() for name in preset.rewards} <= BUILT_IN.keys()
