"""The presets by the field's names: what each asks for and how it judges, with small stand-ins of the real classes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.defaults import parameters
from tests.hub import hub, hub_at
from tests.rewards.learned.tiny import perceptron, picture, saved_clip
from tests.rewards.remote.processes import WORKERS
from visual_grpo.common.errors import CombinedError, Remedy, UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Parameters
from visual_grpo.config.presets import optimised_rewards
from visual_grpo.operations.preflight.check import check_before_run
from visual_grpo.rewards.build import build_reward
from visual_grpo.rewards.judges import missing_judges
from visual_grpo.rewards.remote import local_worker
from visual_grpo.rewards.remote.local_worker import python_of

TAGS, OUTPUTS = {"training", "rewards"}, {"adapters"}
GUARDS = ["edge_density", "colour_entropy"]
OF_TASTE = [*GUARDS, "fine_noise", "imagereward"]
LARGE, HUGE = "openai/clip-vit-large-patch14", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
PLAIN = PromptRecord(id="plain", prompt="a red cat")
QUOTED = PromptRecord(id="quoted", prompt='a sign that says "OPEN"')
COUNTED = PromptRecord(
    id="counted",
    prompt="a red cat",
    metadata={"tag": "colors", "include": [{"class": "cat", "count": 1, "color": "red"}]},
)
TARGET = PromptRecord(id="target", prompt="a cat", target_image=Path("a.png"))
EDIT = PromptRecord(id="edit", prompt="make it red", target_image=Path("a.png"), source_images=(Path("a.png"),))
SERVES = """
from serve import serve

serve("small {name}", lambda: lambda request: [image.getpixel((0, 0))[0] / 255 for image in request.images])
"""


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[Any, Any]]]:
    """A project whose workers are installed, with stand-ins of their weights; and those that run, for all tests."""
    folder, running = tmp_path_factory.mktemp("workers"), dict[Any, Any]()
    (folder / "workers").mkdir()
    (folder / "workers" / "serve.py").symlink_to(WORKERS / "serve.py")
    for name in ("imagereward", "geneval", "tesseract"):
        (folder / "workers" / name).mkdir()
        (folder / "workers" / name / "worker.py").write_text(SERVES.format(name=name))
        python = folder / python_of(name)
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
    yield folder, running
    for worker in running.values():
        local_worker._end(worker.process, worker.errors)


@pytest.fixture
def installed(workers: tuple[Path, dict[Any, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The project; no model is on this machine yet."""
    folder, running = workers
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(local_worker, "_running", running)
    monkeypatch.chdir(folder)
    with hub_at("http://127.0.0.1:9"):
        yield folder


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ``CLIPModel`` with its processor, and LAION's head for it."""
    folder = saved_clip(tmp_path_factory.mktemp("weights"))
    torch.save(perceptron().state_dict(), folder / "aesthetic-model.pth")
    return folder


def settle(record: PromptRecord, **changes: Any) -> Parameters:
    given = parameters(data={"path": "gone", "task": "i2i" if record.source_images else "t2i"}, **changes)
    return check_before_run(given, OUTPUTS, TAGS, lambda: [record])[0]


@pytest.mark.parametrize(
    ("preset", "record", "hub_ids", "optimised", "beside"),
    [
        ("pickscore", PLAIN, ["yuvalkirstain/PickScore_v1", HUGE], "pick_score", OF_TASTE),
        ("hps", PLAIN, ["adams-story/HPSv2-hf", HUGE], "hps", OF_TASTE),
        ("clip", PLAIN, [LARGE], "clip_score", OF_TASTE),
        ("aesthetic", PLAIN, [LARGE, "trl-lib/ddpo-aesthetic-predictor"], "aesthetic", ["clip_score", *OF_TASTE]),
        ("geneval", COUNTED, [], "geneval", OF_TASTE),
        ("ocr", QUOTED, [], "ocr", [*GUARDS, "tesseract"]),
        ("target", TARGET, [], "ssim", [*GUARDS, "target_layout"]),
        ("edit", EDIT, [], "ssim", ["source_ssim", *GUARDS, "target_layout"]),
    ],
)
def test_one_word_sets_a_reward_its_guards_and_an_independent_judge(
    installed: Path,
    weights: Path,
    preset: str,
    record: PromptRecord,
    hub_ids: list[str],
    optimised: str,
    beside: list[str],
) -> None:
    for name in hub_ids:  # One after the other, as a first run downloads them.
        with hub(name, weights):
            [origin] = {o.path: o for o in origins(preset) if o.path == name}.values()
            origin.folder()
    config = settle(record, reward=preset)
    assert list(config.rewards) == [optimised, *beside]
    assert optimised_rewards(config.public()) == {optimised}
    assert [name for name, reward in config.rewards.items() if reward.judge] == beside[-1:]
    assert missing_judges(config.public()["rewards"], [optimised]) == []
    if record.target_image is None:
        for name, reward in config.rewards.items():
            scores = build_reward(name, reward)([record, record], [picture(0), picture(1)]).values
            assert scores.isfinite().all(), name


def origins(preset: str) -> list[Any]:
    rewards = parameters(data={"path": "gone"}, reward=preset).rewards
    return [o for name, reward in rewards.items() for o in getattr(build_reward(name, reward).function, "origins", ())]


@pytest.mark.parametrize(
    ("preset", "record", "said"),
    [
        ("ocr", PLAIN, "the reward 'ocr' scores text that is quoted in the prompt"),
        (
            "geneval",
            PLAIN,
            "workers/geneval scores records with the metadata tag, include, which none of 1 records has",
        ),
        ("target", PLAIN, "the reward ssim compares with a target image, and 1 record has none: 'plain'"),
        ("edit", PLAIN, "the reward ssim compares with a target image, and 1 record has none: 'plain'"),
    ],
)
def test_what_the_records_lack_is_said_in_one_sentence(
    installed: Path, preset: str, record: PromptRecord, said: str
) -> None:
    with pytest.raises(CombinedError) as refused:
        settle(record, reward=preset)
    assert [said in str(error) for error in refused.value.errors] == [True]


def test_a_judge_that_is_not_installed_is_said_with_what_leaves_it_out(
    installed: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shutil.copytree(installed, tmp_path / "project", symlinks=True))
    python_of("imagereward").unlink()
    with hub(LARGE, weights):
        for origin in origins("clip"):
            origin.folder()
    with pytest.raises(
        UserError, match=r"not installed.* To train without this second opinion: rewards.imagereward=null"
    ) as refused:
        settle(PLAIN, reward="clip")
    assert isinstance(refused.value, CombinedError)
    assert [error.remedy for error in refused.value.errors] == [Remedy(make="install-worker NAME=imagereward")]
    assert "imagereward" not in settle(PLAIN, reward="clip", rewards={"imagereward": None}).rewards
    own = settle(
        PLAIN, reward="clip", rewards={"imagereward": None, "clip_score": {"weight": 2.0}, "exposure": {"weight": 0}}
    )
    assert own.rewards["clip_score"].weight == 2.0
    assert list(own.rewards) == ["clip_score", *GUARDS, "fine_noise", "exposure"]
