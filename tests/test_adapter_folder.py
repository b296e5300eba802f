"""The folder that a training leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from visual_grpo.adapter_folder import check_weights, read_facts, weight_sums
from visual_grpo.common.errors import UserError


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
    with pytest.raises(UserError, match=r"dit/weights\.safetensors has changed since the training"):
        check_weights(tmp_path)
    (tmp_path / "dit/weights.safetensors").unlink()
    with pytest.raises(UserError, match=r"dit/weights\.safetensors is gone"):
        check_weights(tmp_path)
    shutil.rmtree(tmp_path / "best")
    (tmp_path / "dit/weights.safetensors").write_bytes(b"0123456789")
    check_weights(tmp_path)  # As MLflow's copy is, without `best` and `last`.
