"""Digests of files, of base models and of what the options of a reward name: by content, not by place."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.evaluation.defaults import parameters
from visual_grpo.adapter_folder import check_base
from visual_grpo.common.digests import STARTER, content_digest, option_files, tree_digest
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.models.run_spec import RunSpec, resolve
from visual_grpo.training.components import check_unchanged


def test_a_trees_digest_is_that_of_its_paths_and_contents(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub/file").write_text("x")
    digest = tree_digest(tmp_path / "a")
    assert digest == tree_digest(tmp_path / "b")
    (tmp_path / "b/sub/file").write_text("yy")
    (tmp_path / "a/sub/file").rename(tmp_path / "a/file")
    assert len({digest, tree_digest(tmp_path / "a"), tree_digest(tmp_path / "b")}) == 3
    assert tree_digest(tmp_path / "b", []) != digest


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


def test_files_behind_a_link_to_a_folder_count(model: Path, tmp_path: Path) -> None:
    weights = tmp_path / "big disk"
    weights.mkdir()
    (weights / "a.safetensors").write_text("weights")
    (model / "linked").symlink_to(weights)
    (weights / "back").symlink_to(model)
    before = content_digest(model)
    (weights / "a.safetensors").write_text("others")
    assert content_digest(model) != before


def test_what_is_not_loaded_and_where_it_is_do_not_matter(model: Path, tmp_path: Path) -> None:
    before = content_digest(model)
    assert content_digest("owner/name") is None
    for name in ("README.md", ".cache/notes.json", STARTER):
        (model / name).write_text("edited")
    assert content_digest(shutil.move(model, tmp_path / "elsewhere")) == before


def of(model: str) -> RunSpec:
    config = parameters()
    named = config.model_copy(update={"model": config.model.model_copy(update={"path": model})})
    return replace(resolve(config), config=named)


def test_a_model_that_changed_after_the_starter_is_refused(model: Path) -> None:
    report = {"model": str(model), "digest": "x", "content": content_digest(model)}
    shutil.copytree(model, model.with_name("copy"))
    for path in (str(model), str(model.with_name("copy"))):
        check_unchanged(report, of(path))
    check_unchanged({"model": "owner/name", "digest": "x", "content": None}, of("owner/name"))
    for known in (report, {"model": "owner/name", "digest": "x", "content": None}):
        with pytest.raises(UserError, match=r"model\.path is other/model"):
            check_unchanged(known, of("other/model"))
    (model / LOADED[1]).write_text("fine-tuned meanwhile")
    with pytest.raises(UserError, match="has changed since the starter pipeline ran") as refused:
        check_unchanged(report, of(str(model)))
    assert refused.value.remedy == Remedy("starter")


def test_an_adapter_is_refused_on_other_files_than_it_was_trained_on(model: Path, tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    check_base(adapters, str(model))
    (adapters / "training.json").write_text(json.dumps({"model_content": content_digest(model)}))
    check_base(adapters, str(model))
    check_base(adapters, "owner/name")
    (model / LOADED[1]).write_text("edited")
    with pytest.raises(UserError, match="was trained on a base model whose files differ"):
        check_base(adapters, str(model))
    facts = json.loads((adapters / "training.json").read_text())
    (adapters / "training.json").write_text(json.dumps(facts | {"model": "models/sd3"}))
    with pytest.raises(UserError, match=r"models/sd3, the folder of the base model of .*, is gone"):
        check_base(adapters, "models/sd3")


OUTPUT = "data"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_have_digests_of_their_content_wherever_the_option_is(project: Path) -> None:
    (project / "words.txt").write_text("a")
    options = {"words": "words.txt", "judge": {"rubrics": ["words.txt", "?"]}, "mode": "cosine", "count": 3}
    before = option_files(options, OUTPUT)
    assert before == {"words": "ca978112ca1b", "judge.rubrics.0": "ca978112ca1b"}, "12 digits of the sha256 of a"
    (project / "words.txt").write_text("bb")
    after = option_files(options, OUTPUT)
    assert {name for name in before if before[name] != after[name]} == set(before)


def test_texts_that_are_no_paths_have_none() -> None:
    assert option_files({"long": "x" * 10_000, "zero": "a\0b", "none": "", "nobody": "~nobody/x"}, OUTPUT) == {}


@pytest.mark.parametrize("how", ["changed", "added", "renamed"])
def test_a_folder_is_another_if_anything_in_it_is(project: Path, how: str) -> None:
    file = project / "rubrics/deep/one.txt"
    file.parent.mkdir(parents=True)
    file.write_text("a")
    before = option_files({"folder": "rubrics"}, OUTPUT)
    assert option_files({"folder": "rubrics"}, OUTPUT) == before
    if how == "changed":
        file.write_text("bb")
    elif how == "added":
        file.with_name("two.txt").write_text("")
    else:
        file.rename(file.with_name("other.txt"))
    assert option_files({"folder": "rubrics"}, OUTPUT) != before


def test_what_a_run_itself_writes_does_not_count(project: Path) -> None:
    (project / "data/mine").mkdir(parents=True)
    (project / "answers").mkdir()
    options = {"cache": "answers", "parts": [{"cache": "answers"}], "here": ".", "above": "..", "kind": "data"}
    assert option_files(options, OUTPUT) == {}
    assert option_files(options, "data/mine") == {}
    assert list(option_files(options, "elsewhere")) == ["kind"]
