"""A base model is known by what its files hold, not by where they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from visual_grpo.common.digests import content_digest, record_content, recorded_content
from visual_grpo.common.errors import UserError
from visual_grpo.config.adapter_folder import check_base
from visual_grpo.training.components import check_unchanged

LOADED = ("model_index.json", "transformer/weights.safetensors", "tokenizer/merges.txt", "processor/chat.jinja")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in (*LOADED, "README.md", ".cache/notes.json"):
        file = tmp_path / "model" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"content of {name}")
    return tmp_path / "model"


@pytest.mark.parametrize("name", LOADED)
def test_a_changed_an_added_and_a_removed_file_make_another_model(model: Path, name: str) -> None:
    before = content_digest(model)
    text = (model / name).read_text()
    (model / name).write_text(text.swapcase())
    assert content_digest(model) != before
    (model / name).write_text(text)
    assert content_digest(model) == before
    (model / name).rename(model / f"another{Path(name).suffix}")
    assert content_digest(model) != before
    (model / f"another{Path(name).suffix}").unlink()
    assert content_digest(model) != before


def test_what_is_not_loaded_and_where_it_is_do_not_matter(model: Path, tmp_path: Path) -> None:
    before = content_digest(model)
    for name in ("README.md", ".cache/notes.json"):
        (model / name).write_text("edited")
    record_content(model)
    assert content_digest(shutil.move(model, tmp_path / "elsewhere")) == before


def test_a_model_on_the_hub_has_no_files_here() -> None:
    assert content_digest("owner/name") is None


def test_a_model_that_changed_after_the_starter_is_refused(model: Path) -> None:
    report = {"model": str(model), "digest": "x", "content": content_digest(model)}
    check_unchanged(report)
    check_unchanged({"model": "owner/name", "digest": "x", "content": None})
    (model / LOADED[1]).write_text("fine-tuned meanwhile")
    with pytest.raises(UserError, match=r"is not what it was when the starter pipeline ran.*--pipeline=starter"):
        check_unchanged(report)


def test_the_starters_model_is_held_to_what_its_maker_noted(model: Path) -> None:
    record_content(model)
    noted = content_digest(model)
    (model / LOADED[1]).write_text("edited")
    assert recorded_content(model) == noted != content_digest(model)


def test_an_adapter_is_refused_on_other_files_than_it_was_trained_on(model: Path, tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    check_base(adapters, str(model), content_digest(model))
    (adapters / "training.json").write_text(json.dumps({"model_content": content_digest(model)}))
    check_base(adapters, str(model), content_digest(model))
    check_base(adapters, "owner/name", None)
    (model / LOADED[1]).write_text("edited")
    with pytest.raises(UserError, match="was trained on a base model with other files"):
        check_base(adapters, str(model), content_digest(model))
