"""`kedro run --env=wan` for a folder of ten short clips with prompts, with a small model and few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from tests.data.clips import GREYS, clip
from tests.models.families.wan import tiny
from tests.small_project import paste, small_project
from visual_grpo.evaluation.samples import read_scores

DATA = "data.path=clips,data.held_out_share=0.4"
GUARDS = {"edge_density", "colour_entropy", "exposure", "motion", "flicker"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_project(tmp_path_factory.mktemp("own_videos") / "project")
    tiny.pipeline().save_pretrained(folder / "small_wan")
    for number in range(10):
        clip(folder / f"clips/{number}.mp4", GREYS[number % 4 :])
        (folder / f"clips/{number}.txt").write_text(f"a grey wall in light number {number}", encoding="utf-8")
    return folder


@pytest.mark.slow
def test_ten_clips_train_are_drawn_scored_and_compared(project: Path) -> None:
    done = paste(f"kedro run --env=wan --params={DATA}", project)
    assert done.returncode == 0, done.stdout + done.stderr
    [home] = project.glob("data/wan/clips-*")
    facts = json.loads((home / "06_models/adapters/training.json").read_text())
    rewards = {name: reward["weight"] for name, reward in facts["parameters"]["rewards"].items()}
    assert rewards == {"ssim": 1.0, **dict.fromkeys(GUARDS, 0.0)}
    [baseline] = home.rglob("baseline")
    table = read_scores(baseline)
    assert table["reward/ssim"].notna().all()
    for file in table["file"]:
        with Image.open(baseline / file) as video:
            assert (video.format, video.size) == ("WEBP", (96, 64))
    assert "data:image/webp" in next(home.rglob("evaluation.html")).read_text()
    assert next(home.rglob("samples-*.png")).is_file()
    for pipeline in (
        f"generate --params={DATA},generate.prompts=clips",
        f"score --params={DATA},score.path=clips,reward=null,rewards.motion.weight=1",
        f"compare --params={DATA}",
        f"check_model --params={DATA}",
    ):
        command = f"kedro run --env=wan --pipeline={pipeline}"
        done = paste(command, project)
        assert done.returncode == 0, command + done.stdout + done.stderr
    assert "UniPCMultistepScheduler" in done.stdout
    [scores] = home.rglob("scores.csv")
    assert len(pd.read_csv(scores)) == 10
    assert len(list(next(home.rglob("generated")).glob("*.webp"))) == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.frames=6", "data.frames is 6; wan draws videos of 5, 9, 13, ... or 81 frames."),
        ("data.frames=85", "data.frames is 85; wan draws videos of 5, 9, 13, ... or 81 frames."),
        ("data.frames=null", "data.frames is null; wan draws videos of 5, 9, 13, ... or 81 frames."),
        ("rewards.jpeg_size.weight=1", "reward 'jpeg_size' judges images, and the samples are videos. Set"),
        (
            "rewards.motion.frames=all",
            "rewards.motion.frames is all, but motion judges whole videos: leave frames out.",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence_before_any_work(project: Path, change: str, said: str) -> None:
    before = sorted(project.glob("data/**/*"))
    done = paste(f"export COLUMNS=300; kedro run --env=wan --params={DATA},{change}", project)
    assert done.returncode == 1
    assert said in done.stderr.replace("\n", " "), done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(project.glob("data/**/*")) == before
