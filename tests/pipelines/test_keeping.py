"""A baseline is kept where it is what would be drawn, and drawn where there is any doubt."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.painted import BRIGHTNESS, SMALL, Project
from visual_grpo import provenance
from visual_grpo.evaluation.samples import read_scores
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.training import made_with

PINNED = {"model": {"revision": "0123456789abcdef0123456789abcdef01234567"}}


def draw(project: Project, **changes: Any) -> bool:
    """Whether a baseline was drawn; without changes the files of its model are known."""
    before = len(project.policies)
    project.run(register_pipelines()["baseline"], **(PINNED | changes))
    return len(project.policies) > before


def test_an_unchanged_baseline_is_kept(painted: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert draw(painted)
    baseline = painted.folder / "baseline"
    before = {file: file.stat().st_mtime_ns for file in baseline.rglob("*")}
    capsys.readouterr()
    assert not draw(painted)
    assert {file: file.stat().st_mtime_ns for file in baseline.rglob("*")} == before
    said = " ".join(capsys.readouterr().out.split())
    assert "Kept the baseline in" in said
    assert "nothing that it depends on has changed (evaluation.redraw)" in said


def test_with_other_parameters_or_an_unknown_model_it_is_drawn(
    painted: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert draw(painted)
    baseline = painted.folder / "baseline"
    kept = shutil.copytree(baseline, painted.folder / "kept")
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"evaluation": SMALL | {"redraw": True}}, "evaluation.redraw is true"),
        ({"evaluation": SMALL | {"images_per_prompt": 1}}, "different evaluation.images_per_prompt (was"),
        ({"evaluation": SMALL | {"batch_size": 2}}, "different evaluation.batch_size (was"),
        ({"rewards_used": {"brightness": BRIGHTNESS["brightness"] | {"clip": [0, 1]}}}, "different rewards.bright"),
        ({"model": {"revision": None}}, "model.revision names no commit"),
        ({"model": {"revision": "main"}}, "model.revision names no commit"),
    )
    for changes, why in cases:
        shutil.rmtree(baseline)
        shutil.copytree(kept, baseline)
        capsys.readouterr()
        assert draw(painted, **changes), why
        assert why in " ".join(capsys.readouterr().out.split())


def test_what_only_training_and_verdict_read_lets_it_be(painted: Project) -> None:
    assert draw(painted)
    lora: dict[str, Any] = {"policy": {"lora": {"rank": 4}}}
    weight = {"rewards_used": {"brightness": BRIGHTNESS["brightness"] | {"weight": 2.0}}}  # Totals are computed again.
    assert not draw(painted, seed=5, grpo={"steps": 9}, tracking={"images_every": 7}, **lora, **weight)


def test_other_code_or_libraries_draw_it_again(painted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    assert draw(painted)
    monkeypatch.setattr(made_with, "source_digest", lambda: "another")
    assert draw(painted)
    assert not draw(painted)
    monkeypatch.setattr(made_with, "_version", lambda library: "another")
    assert draw(painted)


def spoil(folder: Path, how: str) -> None:
    picture = min((folder / "eval").glob("*.png"))
    if how == "changed":
        picture.write_bytes(picture.read_bytes()[:-1] + b"x")
    elif how == "gone":
        picture.unlink()
    elif how == "added":
        (folder / "eval" / "mine.png").write_bytes(b"")
    else:
        (folder / provenance.FILE_NAME).write_text(how)


def test_a_baseline_that_is_not_whole_is_drawn_again(painted: Project) -> None:
    assert draw(painted)
    whole = read_scores(painted.folder / "baseline")
    for how in ("changed", "gone", "added", "[]"):
        spoil(painted.folder / "baseline", how)
        assert draw(painted), how
        assert read_scores(painted.folder / "baseline").equals(whole)
    assert not draw(painted)
