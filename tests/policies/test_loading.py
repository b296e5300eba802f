"""What is missing from a saved pipeline is named before anything of it is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import SIZE
from visual_grpo.components import load_model
from visual_grpo.errors import UserError
from visual_grpo.policies.loading import check_parts

PARTS = ("tokenizer", "text_encoder", "vae")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Only what `check_parts` looks at."""
    index = {"_class_name": "SomePipeline", "_diffusers_version": "0.42", **{part: ["library", "C"] for part in PARTS}}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    for part in PARTS:
        (tmp_path / part).mkdir()
    return tmp_path


def without(folder: Path, part: str) -> None:
    """As a pipeline is saved that was made without it."""
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, part: [None, None]}))


def test_a_whole_folder_is_none_of_its_business(folder: Path) -> None:
    check_parts(str(folder), PARTS)
    check_parts("some/hub-id", PARTS)
    (folder / "scheduler").mkdir()
    check_parts(str(folder), PARTS)


def test_a_missing_folder_and_a_part_that_is_null_are_named(folder: Path) -> None:
    (folder / "text_encoder").rmdir()
    with pytest.raises(UserError, match=r"lacks text_encoder\. Save it whole"):
        check_parts(str(folder), PARTS)
    without(folder, "tokenizer")
    with pytest.raises(UserError, match=r"lacks tokenizer, text_encoder\. Save it whole"):
        check_parts(str(folder), PARTS)
    with pytest.raises(UserError, match=r"lacks transformer\."):
        check_parts(str(folder), ("vae", "transformer"))


@pytest.mark.parametrize("part", ["text_encoder", "tokenizer", "scheduler"])
def test_a_pipeline_without_a_part_is_refused(pipeline_folder: Path, tmp_path: Path, part: str) -> None:
    damaged = tmp_path / "pipeline"
    shutil.copytree(pipeline_folder, damaged)
    shutil.rmtree(damaged / part)
    with pytest.raises(UserError, match=rf"lacks {part}\."):
        load_model(str(damaged), size=SIZE, device="cpu")
    shutil.copytree(pipeline_folder / part, damaged / part)
    without(damaged, part)
    with pytest.raises(UserError, match=rf"lacks {part}\."):
        load_model(str(damaged), size=SIZE, device="cpu")
