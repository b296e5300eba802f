"""The facts of a training, and the parameters that its adapter is judged with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.defaults import parameters
from visual_grpo.common.errors import UserError
from visual_grpo.config.adapter_folder import (
    check_weights,
    judged_by_other_code,
    parameters_to_judge,
    read_facts,
    weight_sums,
)


def tree(**changes: Any) -> dict[str, Any]:
    return parameters(**changes).model_dump(mode="json")


def test_an_adapter_is_judged_with_its_own_parameters_on_the_present_ones_terms() -> None:
    own = tree(
        grpo={"loss": "dapo"}, seed=3, evaluation={"max_prompts": 7}, model={"device": "cuda", "dtype": "bfloat16"}
    )
    present = tree(evaluation={"max_prompts": 9}, policy={"denoise_batch": 5}, adapter="a run")
    judged = parameters_to_judge(present, own, {"sampling": {"eval": {"steps": 3}}})
    assert (judged["grpo"]["loss"], judged["seed"]) == ("dapo", 3)
    assert judged["model"] == {**own["model"], "device": "auto"}
    assert judged["evaluation"]["max_prompts"] == 9
    assert judged["policy"]["denoise_batch"] == 5
    assert judged["adapter"] == "a run"
    assert judged["sampling"]["eval"] == {**own["sampling"]["eval"], "steps": 3}


def test_a_folder_without_facts_and_damaged_facts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it has no training\.json"):
        read_facts(tmp_path)
    (tmp_path / "training.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        read_facts(tmp_path)


@pytest.mark.parametrize("text", ["[]", '{"parameters": "x"}'])
def test_facts_of_another_shape_are_called_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "training.json").write_text(text)
    with pytest.raises(UserError, match="damaged: expected an object with the parameters"):
        read_facts(tmp_path)


def test_other_code_of_a_reward_than_the_trainings_is_told() -> None:
    training = {"code of reward warm": "abc", "code of reward sharp": "def"}
    assert judged_by_other_code(training, {"warm": "abc", "new": "xyz"}) == []
    [note] = judged_by_other_code(training, {"warm": "xyz", "sharp": "def"})
    assert note.startswith("Judged by other code of warm than it was trained with")


def test_weights_that_are_not_those_of_the_training_are_refused(tmp_path: Path) -> None:
    for name in ("dit", "best/dit"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "weights.safetensors").write_bytes(b"0123456789")
    check_weights(tmp_path)  # Of an older version, or of no training.
    facts = {"parameters": {}, "sums": weight_sums(tmp_path)}
    assert sorted(facts["sums"]) == ["best/dit/weights.safetensors", "dit/weights.safetensors"]
    (tmp_path / "training.json").write_text(json.dumps(facts))
    check_weights(tmp_path)
    (tmp_path / "dit/weights.safetensors").write_bytes(b"0123456780")
    with pytest.raises(UserError, match=r"dit/weights\.safetensors is not the file that the training left"):
        check_weights(tmp_path)
    shutil.rmtree(tmp_path / "best")
    (tmp_path / "dit/weights.safetensors").write_bytes(b"0123456789")
    check_weights(tmp_path)  # As MLflow's copy is, without `best` and `last`.
