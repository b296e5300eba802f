"""What is missing from a saved pipeline is named before anything of it is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import SIZE
from visual_grpo.components import load_model
from visual_grpo.errors import UserError


def without(folder: Path, part: str) -> None:
    """As a pipeline is saved that was made without it."""
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, part: [None, None]}))


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
