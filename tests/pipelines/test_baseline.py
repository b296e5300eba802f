from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from kedro.io import DatasetError

from tests.evaluation.defaults import parameters, samples_record
from tests.pipelines.painted import SMALL, Project
from visual_grpo.common.errors import UserError
from visual_grpo.evaluation.comparison import controls_of
from visual_grpo.evaluation.samples import read_scores
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.training import components, made_with


def test_every_eval_and_held_out_prompt_is_drawn_without_an_adapter(painted: Project) -> None:
    painted.run(register_pipelines()["baseline"])
    scores = read_scores(painted.folder / "baseline")
    assert painted.policies == [("the model", None)]
    drawn = scores.groupby(["sampler", "split"])["id"].agg(["nunique", "size"])
    everywhere = {
        (sampler, split): {"nunique": prompts, "size": 2 * prompts}
        for sampler in ("rollout", "sde", "eval")
        for split, prompts in (("eval", 2), ("held_out", 3))
    }
    controls = ["eval guidance_scale=1", "eval guidance_scale=3", "eval temperature=0.5"]
    held_out_only = {(control, "held_out"): {"nunique": 3, "size": 6} for control in controls}
    assert drawn.to_dict("index") == everywhere | held_out_only
    assert controls_of(scores) == controls
    assert all((painted.folder / "baseline" / file).is_file() for file in scores["file"])


def test_same_parameters_same_images_and_scores(painted: Project) -> None:
    first = read_scores(painted.run(register_pipelines()["baseline"]).load("baseline"))
    second = read_scores(painted.run(register_pipelines()["baseline"]).load("baseline"))
    pd.testing.assert_frame_equal(first, second)
    trained_otherwise = read_scores(painted.run(register_pipelines()["baseline"], seed=5).load("baseline"))
    pd.testing.assert_frame_equal(first, trained_otherwise)
    assert trained_otherwise.attrs == first.attrs
    other = read_scores(painted.run(register_pipelines()["baseline"], evaluation=SMALL | {"seed": 5}).load("baseline"))
    assert (other["total"] != first["total"]).all()


def test_a_model_that_cannot_be_loaded_is_told(painted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_scores(painted.run(register_pipelines()["baseline"]).load("baseline"))

    def refuse(*arguments: object) -> None:
        raise UserError("the weights are damaged")

    monkeypatch.setattr(components, "build_model", refuse)
    failed: list[str] = []
    with pytest.raises(UserError, match=r"^the weights are damaged$") as error:
        painted.run(register_pipelines()["baseline"], failed=failed)
    assert failed == ["baseline.generate_baseline"]
    assert not isinstance(error.value, DatasetError), "nothing was being saved"
    pd.testing.assert_frame_equal(read_scores(painted.folder / "baseline"), before)


LANGUAGE: dict[str, Any] = {
    "data": {"task": "segmentation"},
    "starter": {"world": "examples.scenes:WORLD"},
    "modules": {"dit": None},
    "evaluation": {"controls": []},
    "sampling": {name: {"steps": None, "guidance_scale": None} for name in ("rollout", "eval")},
}


@pytest.mark.parametrize(
    ("changes", "pairs"),
    [
        ({"grpo": {"learning_rate": 1.0}}, True),
        ({"seed": 5}, True),
        ({"evaluation": {"batch_size": 3}}, True),
        ({"model": {"device": "cpu"}}, True),
        # One baseline serves every module: totals are computed again, and all three samplers are always judged.
        ({"policy": {"train": "ar"}}, True),
        ({"rewards": {"shapes": {"weight": 2.0}}}, True),
        ({"modules": {"dit": {"rewards": {"rendering": 2.0}}}}, True),
        ({"evaluation": {"seed": 5}}, False),
        ({"evaluation": {"controls": []}}, False),
        ({"evaluation": {"images_per_prompt": 2}}, False),
        ({"data": {"height": 64}}, False),
        ({"sampling": {"eval": {"steps": 3}}}, False),
        ({"rewards": {"shapes": {"options": {"strict": True}}}}, False),
        ({"rewards": {"shapes": {"clip": [0.0, 0.5]}}}, False),
        ({"rewards": {"shapes": {"only_where": {"rendering": 0.5}}}}, False),
        ({"policy": {"flow": {"noise": 0.5}}}, False),
        ({"model": {"dtype": "bfloat16"}}, False),
        ({"model": {"base_weights": "4bit"}}, False),
        ({"model": {"device": "cuda:1"}}, False),
    ],
)
def test_exactly_what_images_and_scores_depend_on_is_recorded(changes: dict[str, Any], pairs: bool) -> None:
    assert (samples_record(parameters(**changes)) == samples_record(parameters())) is pairs


def test_the_models_options_and_files_are_recorded() -> None:
    base = samples_record(parameters(**LANGUAGE))
    assert samples_record(parameters(**LANGUAGE, model={"options": {"max_tokens": 5}})) != base
    assert samples_record(parameters(**LANGUAGE, policy={"flow": {"noise": 0.5}})) == base
    assert samples_record(parameters(**LANGUAGE), content="a") != base


def test_a_rewards_files_and_code_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code, file = tmp_path / "an_edited_reward.py", tmp_path / "head.json"
    mine: dict[str, Any] = {"function": "an_edited_reward:score", "options": {"head": str(file)}}
    config = parameters(rewards={"mine": mine, "clip_score": {}})
    other = parameters(rewards={"mine": mine | {"function": "an_edited_reward:other"}, "clip_score": {}})
    found = []
    for value, content, commit in ((1.0, "1", "a"), (5.0, "1", "a"), (5.0, "2", "a"), (5.0, "2", "b")):
        code.write_text(f"def score(prompts, images): return [{value}] * len(images)\nother = None")
        file.write_text(content)
        made = [samples_record(config, {"clip_score": {"model": commit * 40}}) for _ in range(2)]
        assert made[0] == made[1]
        assert "code of reward clip_score" not in made[0]
        found.append(made[0])
    assert all(before != after for before, after in pairwise(found))
    assert samples_record(config) != samples_record(other), "of the same file"


def test_conditions_and_records_contain_the_code_of_an_own_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    config = parameters(model={"path": "a/model", "family": "an_edited_family:FAMILY"})
    found = []
    for edit in ("", "# edited"):
        (tmp_path / "an_edited_family.py").write_text(f"from visual_grpo.models.families.glm_image import FAMILY{edit}")
        inputs = made_with.inputs(config, {"model": "a/model", "digest": "d", "content": None}, "data")
        found.append((samples_record(config), inputs))
    assert all(before != after for before, after in zip(*found, strict=True))
