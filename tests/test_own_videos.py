"""`kedro run --env=wan`, `wan_i2v` and `ltx` for folders of ten short clips with prompts, with small models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image

from tests.data.clips import GREYS, clip, frames
from tests.models.families.ltx import tiny as ltx
from tests.models.families.wan import tiny
from tests.small_project import paste, small_project
from visual_grpo.config.presets import TARGET_JUDGE
from visual_grpo.evaluation.samples import read_scores

DATA = "data.path=clips,data.held_out_share=0.4"
GUARDS = {"edge_density", "colour_entropy", "exposure", "motion", "flicker"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_project(tmp_path_factory.mktemp("own_videos") / "project")
    tiny.pipeline().save_pretrained(folder / "small_wan")
    tiny.pipeline(i2v=True).save_pretrained(folder / "small_wan_i2v")
    ltx.pipeline().save_pretrained(folder / "small_ltx")
    (folder / "begun/source").mkdir(parents=True)
    for number in range(10):
        greys = [grey + number for grey in GREYS]  # Equal videos are held out together.
        for clips in ("clips", "begun"):
            clip(folder / f"{clips}/{number}.mp4", greys)
            (folder / f"{clips}/{number}.txt").write_text(f"a grey wall in light number {number}", encoding="utf-8")
        frames(greys)[0].save(folder / f"begun/source/{number}.png")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "clips", "home", "compared"),
    [
        ("wan", "clips", "data/wan/clips-*", {"ssim": 1.0}),
        ("ltx", "clips", "data/ltx/clips-*", {"ssim": 1.0}),
        ("wan_i2v", "begun", "data/wan_i2v/i2i/begun-*", {"ssim": 1.0, "source_ssim": 0.0}),
    ],
)
def test_ten_clips_train_are_drawn_scored_and_compared(
    project: Path, environment: str, clips: str, home: Any, compared: dict[str, float]
) -> None:
    data = DATA.replace("clips", clips)
    done = paste(f"kedro run --env={environment} --params={data}", project)
    assert done.returncode == 0, done.stdout + done.stderr
    [home] = project.glob(home)
    facts = json.loads((home / "06_models/adapters/training.json").read_text())
    rewards = {name: reward["weight"] for name, reward in facts["parameters"]["rewards"].items()}
    assert rewards == {**compared, **dict.fromkeys([*GUARDS, TARGET_JUDGE], 0.0)}
    [baseline] = home.rglob("baseline")
    table = read_scores(baseline)
    assert table["reward/ssim"].notna().all()
    for file in table["file"]:
        with Image.open(baseline / file) as video:
            assert (video.format, video.size) == ("WEBP", (96, 64))
    assert "data:image/webp" in next(home.rglob("evaluation.html")).read_text()
    assert next(home.rglob("samples-*.png")).is_file()
    for pipeline in (
        f"generate --params={data},generate.prompts={clips}",
        f"score --params={data},score.path={clips},reward=null,rewards.motion.weight=1",
        f"compare --params={data}",
        f"check_model --params={data}",
    ):
        command = f"kedro run --env={environment} --pipeline={pipeline}"
        done = paste(command, project)
        assert done.returncode == 0, command + done.stdout + done.stderr
    assert ("UniPCMultistepScheduler" in done.stdout) == (environment != "ltx")
    [scores] = home.rglob("scores.csv")
    assert len(pd.read_csv(scores)) == 10
    assert len(list(next(home.rglob("generated")).glob("*.webp"))) == 10


BEGUN = "--env=wan_i2v --params=data.path=begun"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (f"{BEGUN},data.task=t2i", "data.task is t2i, which wan_i2v cannot do; it has i2i."),
        (f"{BEGUN},data.frames=6", "data.frames is 6; wan_i2v generates videos of 5, 9, 13, ... or 81 frames."),
        (f"{BEGUN},model.options.max_sequence_length=64", "model.options.max_sequence_length: Input should be 512"),
        ("--env=wan_i2v --params=data.path=clips", "also needs the image to edit, and nothing says which one that is"),
        ("--env=wan_i2v --params=data.path=two.jsonl", "takes 1 source image, and the record 'both' has 2"),
        ("--env=wan --params=data.path=begun", "have a source_image, so they are edits, and data.task is t2i."),
    ],
)
def test_sources_that_do_not_fit_are_one_sentence_before_any_work(project: Path, arguments: str, said: str) -> None:
    two = {"id": "both", "prompt": "a", "source_image": ["begun/source/0.png"] * 2, "target_image": "begun/0.mp4"}
    (project / "two.jsonl").write_text(json.dumps(two), encoding="utf-8")
    refused(f"kedro run {arguments},data.held_out_share=0.4", project, said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.frames=6", "data.frames is 6; wan generates videos of 5, 9, 13, ... or 81 frames."),
        ("data.frames=85", "data.frames is 85; wan generates videos of 5, 9, 13, ... or 81 frames."),
        ("data.frames=null", "data.frames is null; wan generates videos of 5, 9, 13, ... or 81 frames."),
        ("rewards.jpeg_size.weight=1", "reward 'jpeg_size' judges images, and the samples are videos. Set"),
        (
            "rewards.motion.frames=all",
            "rewards.motion.frames is all, but motion judges whole videos: leave frames out.",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence_before_any_work(project: Path, change: str, said: str) -> None:
    refused(f"kedro run --env=wan --params={DATA},{change}", project, said)


def refused(command: str, project: Path, said: str) -> None:
    before = sorted(project.glob("data/**/*"))
    done = paste(f"export COLUMNS=300; {command}", project)
    assert done.returncode == 1
    assert said in done.stderr.replace("\n", " "), done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(project.glob("data/**/*")) == before
