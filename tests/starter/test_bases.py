"""The base model that comes with the package: it is the one that the default recipe gives, and it is used."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.defaults import parameters
from tests.small_project import ROOT
from visual_grpo.common.device import processor
from visual_grpo.common.digests import content_digest
from visual_grpo.common.errors import UserError
from visual_grpo.config.validation import validate
from visual_grpo.starter import build
from visual_grpo.starter.build import BASES, find_base, model_recipe, pretrain_model
from visual_grpo.starter.pretraining import digest_of, starter_notes
from visual_grpo.starter.world_defaults import with_world

BASE = BASES / "shapes_glm_image"
MAKE_AGAIN = "the shipped base model is not that of conf/base's recipe; make it again: make base"
WEIGHTS = {".bin", ".ckpt", ".gguf", ".npz", ".onnx", ".pt", ".pth", ".safetensors"}
MOST = 8_000_000
"""Bytes of weights that a clone may cost."""


def recipe(**changes: Any) -> dict[str, Any]:
    config = parameters(**changes)
    return model_recipe(config.starter, config.data, config.model.family, config.seed)


def pretrained(folder: Path, **changes: Any) -> dict[str, str | None]:
    config = parameters(**changes)
    starter = config.starter.model_copy(update={"model": str(folder)})
    return pretrain_model(starter, config.data, config.model.family, config.seed)


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_shipped_base_is_that_of_the_default_recipe() -> None:
    assert find_base(recipe()) == BASE, MAKE_AGAIN
    assert [base.name for base in BASES.iterdir()] == [BASE.name]
    assert content_digest(BASE) == starter_notes(BASE)["content"]


@pytest.mark.parametrize(
    "changes",
    [{"seed": 1}, {"starter": {"ar_steps": 5}}, {"data": {"width": 160}}, {"data": {"task": "i2i"}}],
)
def test_another_recipe_is_pretrained(changes: dict[str, Any]) -> None:
    assert find_base(recipe(**changes)) is None


def test_the_weights_in_git_stay_small() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    weights = [ROOT / name for name in listed.split("\0") if Path(name).suffix in WEIGHTS]
    assert 0 < sum(file.stat().st_size for file in weights) <= MOST


def test_it_is_copied_in_place_of_a_pretraining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a checkout whose folders are read-only; and it is pretrained where that is asked for, also once copied."""
    monkeypatch.delattr(build, "progress")
    shipped = shutil.copytree(BASE, tmp_path / "bases" / "read-only")
    for folder in (shipped, *filter(Path.is_dir, shipped.iterdir())):
        folder.chmod(0o555)
    monkeypatch.setattr(build, "BASES", shipped.parent)
    model = tmp_path / "base"
    for said in ("comes with the project", ""):
        assert pretrained(model) == {"digest": digest_of(recipe()), "content": content_digest(BASE)}
        assert said in (printed := capsys.readouterr().out)
        assert bool(printed) == bool(said)
    assert files(model) == files(BASE)
    assert {path.stat().st_mode & 0o200 for path in [model, *model.rglob("*")]} == {0o200}
    with pytest.raises(NameError, match="progress"):
        pretrained(model, starter={"pretrain": True})
    assert files(model) == files(BASE)


def test_a_model_of_ones_own_is_not_pretrained() -> None:
    tree = parameters().model_dump() | {"model": {"path": "my/model", "family": "sd3"}}
    tree["starter"] |= {"pretrain": True}
    with pytest.raises(UserError, match=r"starter\.pretrain is true, but model\.path names my/model"):
        validate(with_world(tree))


@pytest.mark.slow
def test_a_pretraining_gives_the_same_files(tmp_path: Path) -> None:
    pretrained(tmp_path / "base", starter={"pretrain": True})
    fresh, shipped = files(tmp_path / "base"), files(BASE)
    here, there = processor(), json.loads(shipped["starter.json"])["processor"]
    if here != there:
        pytest.skip(f"the shipped base was pretrained on another kind of processor: {there}; on {here} bits differ")
    other = [name for name in shipped | fresh if shipped.get(name) != fresh.get(name)]
    assert other == [], "the shipped base is another: raise _VERSION if the pretraining has changed, then make base"
