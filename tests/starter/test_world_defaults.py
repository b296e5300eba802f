"""What the starter fills in: folders, the small model and the world's rewards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from kedro.config import OmegaConfigLoader

from tests.evaluation.defaults import parameters
from tests.small_project import ROOT
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.config.validation import validate
from visual_grpo.operations.preflight.check import check_before_run
from visual_grpo.pipelines import starter
from visual_grpo.rewards.remote.local_worker import python_of
from visual_grpo.settings import CONFIG_LOADER_ARGS
from visual_grpo.starter.build import model_recipe, render_dataset
from visual_grpo.starter.world_defaults import with_world
from visual_grpo.starter.worlds import own_functions, require_functions

SHAPES = {"world": "shapes"}
WORDS = {"starter": {"world": "examples.words:WORLD"}}
FLOW_MODELS = {"starter": {"world": "examples.flow_models:WORLD"}}
OWN = {"data": {"path": "my/photos"}}
REDNESS = {"redness": {"function": "my_rewards:redness"}}
GUARDS: dict[str, Any] = {"edge_density": (0.0, {}), "colour_entropy": (0.0, {})}
OF_SIGNS = {"letters_apart": (0.0, {}), **GUARDS}
OF_SHAPES: dict[str, Any] = {"shapes": (1.0, {}), "rendering": (0.0, {}), "outline": (0.0, {}), "delta_e": (0.0, {})}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in which no judge is installed."""
    monkeypatch.chdir(tmp_path)


def folders(tree: dict[str, Any], environment: str | None = None) -> tuple[str, str, str, str, str]:
    """Of the outputs, the records, the rendered dataset, the pretrained model, the checkpoints."""
    filled = with_world({**tree, "starter": SHAPES | tree.get("starter", {})}, environment)
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
    assert folders(WORDS, "text")[:3] == ("data/text", "data/text/01_raw/words", "data/text/01_raw/words")
    assert folders({"data": {"task": "i2i"}})[:2] == ("data/i2i", "data/i2i/01_raw/shapes")
    scenes = {"starter": {"world": "examples.scenes:WORLD"}, "data": {"task": "segmentation"}}
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


def of_environment(name: str, **changes: Any) -> Parameters:
    loader = OmegaConfigLoader(str(ROOT / "conf"), env=name, runtime_params=changes, **CONFIG_LOADER_ARGS)
    return validate(with_world(loader["parameters"], name))


def entries(config: Parameters) -> dict[str, tuple[float, dict[str, object]]]:
    return {name: (reward.weight, reward.options) for name, reward in config.rewards.items()}


@pytest.mark.parametrize(
    ("environment", "module", "expected"),
    [
        ("base", "ar", OF_SHAPES),
        ("base", "dit", OF_SHAPES | {"rendering": (1.0, {})}),
        ("sd3_small", "dit", OF_SHAPES),
        ("flux2_klein_small", "dit", OF_SHAPES),
        ("text", "dit", {"ocr": (1.0, {"line": [0, 0, 1, 1]}), **OF_SIGNS}),
        ("negative_points", "vl", {"negative_points": (1.0, {"cache": 4096})}),
        (
            "wan_small",
            "dit",
            {"moving_shapes": (1.0, {}), "motion": (0.0, {}), "flicker": (0.0, {}), "delta_e": (0.0, {})},
        ),
    ],
)
def test_a_worlds_data_has_its_rewards(environment: str, module: str, expected: dict[str, Any]) -> None:
    config = of_environment(environment)
    assert config.reward == "listed"
    assert list(config.rewards) == list(expected)
    weights = config.weights([module])
    assert {name: (weights[name], reward.options) for name, reward in config.rewards.items()} == expected
    assert Parameters.model_validate(with_world(config.model_dump(mode="json"))) == config, "it is complete"


def test_judges_that_are_installed_judge_what_is_optimised() -> None:
    bare = of_environment("text")
    told = starter.what_is_there(bare.starter, bare.data)
    assert told.endswith("than the reward: make install-worker NAME=tesseract")
    for name in ("tesseract", "easyocr", "hpsv3"):
        python_of(name).parent.mkdir(parents=True)
        python_of(name).touch()
    config = of_environment("text")
    judges = {name: reward for name, reward in config.rewards.items() if reward.judge}
    assert [(name, judge.judge_of, judge.weight) for name, judge in judges.items()] == [
        ("tesseract", "ocr", 0.0),
        ("easyocr", "ocr", 0.0),
    ]
    assert judges["tesseract"].options["environment"] == {"TESSERACT_LAYOUT": "line"}
    assert Parameters.model_validate(with_world(config.model_dump(mode="json"))) == config, "it is complete"
    assert list(of_environment("text", rewards={"tesseract": None}).rewards) == ["ocr", *OF_SIGNS, "easyocr"]
    other = of_environment("text", rewards={"ocr": {"weight": 0.0}, "edge_density": {"weight": 1.0}})
    assert list(other.rewards) == ["ocr", *OF_SIGNS], "nothing is left to judge"
    assert "install" not in starter.what_is_there(bare.starter, bare.data)


def test_that_the_small_model_is_not_made_for_own_data_is_said_before_it_is_pretrained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = of_environment("base", **OWN)
    starter.build(config.starter, config.data, config.model, config.seed)
    warned, _, after = capsys.readouterr().out.partition("This base model comes with the project")
    assert "Warning: the small base model is pretrained on rendered shapes and nothing else" in warned
    assert "Warning" not in after


@pytest.mark.parametrize("environment", ["glm_image", "sd3", "qwen_image", "base", "text"])
def test_other_data_waits_for_its_records(environment: str) -> None:
    config = of_environment(environment, **OWN)
    assert (config.reward, config.rewards) == ("auto", {})
    assert of_environment(environment, **OWN, reward="text").reward == "text"


def test_the_released_language_model_keeps_the_settings_of_its_reward() -> None:
    config = of_environment("qwen2_5_vl")
    assert config.reward is None
    assert config.rewards["negative_points"].options["think"] is True


def test_answers_have_no_guard_of_images_beside_them() -> None:
    own = of_environment("negative_points", reward=None, rewards=REDNESS)
    assert own.reward is None
    assert "edge_density" not in own.rewards


def test_other_values_change_the_worlds_rewards_and_null_removes_one() -> None:
    config = parameters(rewards={"shapes": {"weight": 3.0}, "edge_density": {"weight": 0.0}})
    assert entries(config) == OF_SHAPES | {"shapes": (3.0, {}), "edge_density": (0.0, {})}
    assert config.weights(["dit"])["rendering"] == 1.0
    assert parameters(modules={"dit": {"rewards": {"rendering": 2.0}}}).weights(["dit"])["rendering"] == 2.0
    without = parameters(rewards={"rendering": None})
    assert (list(without.rewards), without.modules["dit"].rewards) == (["shapes", "outline", "delta_e"], {})


def test_a_world_names_rewards_for_other_data_too() -> None:
    config = parameters(**OWN, **WORDS, reward="words", rewards={"ocr": {"options": {"more": 1}}, **REDNESS})
    assert entries(config) == {"ocr": (1.0, {"line": [0, 0, 1, 1], "more": 1}), **OF_SIGNS, "redness": (1.0, {})}
    without_judge = {name: entry for name, entry in OF_SHAPES.items() if name != "delta_e"}
    assert entries(parameters(**OWN, reward="shapes")) == without_judge, "other records may have no targets"


def test_the_rendered_data_and_the_small_model_are_known_by_any_spelling_of_their_paths() -> None:
    for place in (".", str(Path.cwd())):
        config = parameters(
            data={"path": f"{place}/data/01_raw/shapes/"}, model={"path": f"{place}/data/06_models/base"}
        )
        assert config.data_is_rendered
        assert config.model_is_pretrained
        assert "shapes" in config.rewards


def test_the_small_model_is_of_the_worlds_first_family_unless_another_is_named() -> None:
    for changes, family in (({}, "sd3"), ({"model": {"family": "flux"}}, "flux")):
        model = parameters(**FLOW_MODELS, **changes).model
        assert (model.path, model.family) == ("data/06_models/base", family)
    given = parameters(model={"path": "models/a"})
    assert (given.model.path, given.model.family, given.model_is_pretrained) == ("models/a", "auto", False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"starter": {"world": "words"}}, "expected shapes, or package.module:WORLD for any other.*examples.words"),
        ({"starter": {"world": "my_worlds:WORLD"}}, "no module 'my_worlds'"),
        ({"starter": {"world": "tests.small_project:TINY"}}, "which is a dict, not a World"),
        (
            {"data": {"task": "segmentation"}},
            "world shapes is made for data.task t2i, i2i, mixed only.*negative_points",
        ),
        (WORDS | {"data": {"task": "i2i"}}, "words is made for data.task t2i only, got i2i"),
        (WORDS | {"model": {"family": "flux"}}, "pretrains no small flux on starter.world words; it pretrains sd3"),
        ({"model": {"family": "glm_imag"}}, "it pretrains glm_image.*Did you mean 'glm_image'"),
    ],
)
def test_what_no_world_is_made_for_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parameters(**changes)


def test_a_world_that_is_not_needed_need_not_fit() -> None:
    own = {"data": {"path": "my/photos", "task": "segmentation"}, "model": {"path": "someone/model"}}
    assert parameters(**own).data.task == "segmentation"


@pytest.mark.parametrize(
    "environment",
    [folder.parent.name for folder in sorted(ROOT.glob("conf/*/parameters.yml")) if "examples." in folder.read_text()],
)
def test_an_examples_functions_are_there(environment: str) -> None:
    config = of_environment(environment)
    assert own_functions(config)
    require_functions(config)


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        (('render="my_world:render"', 'render="my_world:rendr"'), "'my_world' has no 'rendr'.*Did you mean 'render'"),
        (('"my_world:pretrain"', '"my_world:WORLD"'), "my_world:WORLD .* is a World, not a function"),
        (('"my_world:pretrain"', '"my_pretraining:pretrain"'), "no module 'my_pretraining'"),
        (('("vae", "dit")', '("unet",)'), "SmallModel.pretrain trains unet; expected modules among ar, dit, vae, vl"),
        (("tasks=", "task="), "cannot be imported:(.|\n)*unexpected keyword argument 'task'"),
    ],
)
def test_what_a_world_lacks_is_told_before_any_work(
    lacking: tuple[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_world", raising=False)
    code = MY_WORLD.replace(*lacking) + "\n\ndef pretrain(job, advance): ...\n"
    (tmp_path / "my_world.py").write_text(code, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        check_before_run(parameters(starter={"world": "my_world:WORLD"}), {"base_model"}, set(), list)


def test_a_world_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_world", raising=False)
    Path("my_world.py").write_text(MY_WORLD, encoding="utf-8")
    config = parameters(starter={"world": "my_world:WORLD"})
    assert (config.data.path, config.model.family) == ("data/01_raw/dots", "sd3")
    assert list(config.rewards) == ["dotted"]
    report = starter.build(config.starter, config.data, config.model.model_copy(update={"path": "a/b"}), seed=3)
    records = Path("data/01_raw/dots/records.jsonl")
    assert (report["dataset"], records.read_text()) == ("data/01_raw/dots", '{"prompt": "dotted 3"}\n')
    before = model_recipe(config.starter, config.data, "sd3", 3)
    assert before != model_recipe(parameters(**FLOW_MODELS).starter, config.data, "sd3", 3)
    for name, value in {"task": "i2i", "height": 64, "width": 64}.items():
        assert before != model_recipe(config.starter, config.data.model_copy(update={name: value}), "sd3", 3)
    Path("my_world.py").write_text(MY_WORLD.replace("dotted", "spotted"), encoding="utf-8")
    monkeypatch.delitem(sys.modules, "my_world")
    render_dataset(config.starter, config.data, seed=3)
    assert records.read_text() == '{"prompt": "spotted 3"}\n'
    assert before != model_recipe(config.starter, config.data, "sd3", 3)
    assembled = MY_WORLD.replace('("vae", "dit")}', '("vae", "dit")}, assemble="my_saving:save"')
    Path("my_world.py").write_text(assembled, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "my_world")
    recipes = []
    for code in ("", "# edited"):
        Path("my_saving.py").write_text(code, encoding="utf-8")
        recipes.append(model_recipe(config.starter, config.data, "sd3", 3))
    assert recipes[0] != recipes[1]


MY_WORLD = """
from visual_grpo.config.presets import Preset
from visual_grpo.starter.pretraining import write_dataset
from visual_grpo.starter.worlds import SmallModel, World

WORLD = World(
    name="dots",
    tasks=("t2i",),
    render="my_world:render",
    models={"sd3": SmallModel(pretrain={"my_world:pretrain": ("vae", "dit")})},
    preset=Preset(rewards={"dotted": {"function": "my_world:dotted"}}),
)


def render(folder, records_per_prompt, height, width, seed, task):
    write_dataset(folder, {"seed": seed}, (), lambda fresh: [{"prompt": f"dotted {seed}"}])
"""
