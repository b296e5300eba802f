"""Weights that are missing, damaged, another model's or on a hub that cannot be reached: said before the run."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Dinov2Config, Dinov2Model

from tests.hub import COMMIT, hub, hub_at
from tests.rewards.learned.tiny import picture, record
from visual_grpo.common.errors import UserError
from visual_grpo.config import RewardConfig
from visual_grpo.rewards.build import build_reward
from visual_grpo.rewards.learned.clip import ClipReward, ClipScore, PickScore


@pytest.fixture
def copied(clip_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clip_folder, tmp_path / "clip"))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No model on this machine, and a hub that nobody answers for."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with hub_at("http://127.0.0.1:9"):
        yield


def scored(reward: ClipReward) -> None:
    reward([record("a")], [picture(0)])


def test_a_model_is_named_by_the_address_of_its_page(empty_cache: None) -> None:
    for address in ("hf://acme/clip", "https://huggingface.co/acme/clip/"):
        with pytest.raises(UserError, match="its model is 'acme/clip', which is not on this machine, and http"):
            ClipScore(model=address).check_machine()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_files_that_a_folder_lacks_are_named(copied: Path, file: str) -> None:
    (copied / file).rename(copied / "pytorch_model.bin")  # Pickled weights do not count.
    with pytest.raises(UserError, match=rf"this folder lacks {file}.*Give a folder that holds config.json; model"):
        ClipScore(model=str(copied)).check_machine()


def test_another_models_folder_is_refused_by_name(copied: Path) -> None:
    config = Dinov2Config(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(copied)
    for attempt in (ClipScore(model=str(copied)).check_machine, lambda: scored(ClipScore(model=str(copied)))):
        with pytest.raises(UserError, match=r"of the type 'clip', and .* of the type 'dinov2' \(Dinov2Model\)"):
            attempt()
    for text in ("[]", "{"):
        (copied / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"clip_score: .* has no readable config.json"):
            ClipScore(model=str(copied)).check_machine()


def test_weights_that_are_missing_or_of_other_shapes_are_not_drawn_at_random(copied: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "model.safetensors")
    kept = weights.pop("visual_projection.weight")
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 of its weights, for example visual_projection.weight"):
        scored(ClipScore(model=str(copied)))
    save_file(weights | {"visual_projection.weight": kept[:4].clone()}, copied / "model.safetensors")
    with pytest.raises(UserError, match=r"CLIPModel in .* cannot be loaded"):
        scored(ClipScore(model=str(copied)))


@pytest.mark.usefixtures("empty_cache")
def test_without_a_network_the_command_that_fetches_the_files_is_told() -> None:
    told = r"its model is 'openai/clip-vit-large-patch14', which is not on this machine.*hf download openai/clip-vit"
    told += r"-large-patch14 --include .*--local-dir FOLDER; then set rewards.clip_score.options.model"
    for attempt in (ClipScore().check_machine, lambda: scored(ClipScore())):
        with pytest.raises(UserError, match=told):
            attempt()
    with pytest.raises(UserError, match=r"--revision main2 "):
        ClipScore(revision="main2").check_machine()


@pytest.fixture
def in_the_cache(empty_cache: None, clip_folder: Path, tmp_path: Path) -> Path:
    """The snapshot of someone/clip as the hub's client keeps it: each file is a link to one named by its hash."""
    repository = tmp_path / "cache" / "models--someone--clip"
    snapshot = repository / "snapshots" / COMMIT
    for made in (snapshot, repository / "refs", repository / "blobs"):
        made.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in clip_folder.iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    return snapshot


def test_a_model_in_the_hubs_cache_needs_no_network(in_the_cache: Path) -> None:
    reward = ClipScore(model="someone/clip")
    reward.check_machine()
    scored(reward)
    (in_the_cache / "model.safetensors").unlink()
    with pytest.raises(UserError, match="is not on this machine, and"):
        ClipScore(model="someone/clip").check_machine()


@pytest.mark.usefixtures("empty_cache")
def test_a_download_is_whole_without_the_files_that_it_left_out(copied: Path) -> None:
    for unused in ("README.md", "pytorch_model.bin"):
        (copied / unused).write_text("not read")
    with hub("someone/clip", copied):
        scored(ClipScore(model="someone/clip"))
    ClipScore(model="someone/clip").check_machine()
    scored(ClipScore(model="someone/clip"))
    assert commits("clip_score", model="someone/clip") == {"model": COMMIT}


@pytest.mark.usefixtures("empty_cache")
def test_a_processor_is_downloaded_without_weights(copied: Path, clip_folder: Path) -> None:
    with hub("someone/clip", copied) as downloaded:
        scored(PickScore(model=str(clip_folder), processor="someone/clip"))
    assert "tokenizer.json" in downloaded
    assert "model.safetensors" not in downloaded


def test_every_part_of_a_reward_from_the_hub_is_known_by_its_commit(in_the_cache: Path) -> None:
    other = "c" * 40
    assert commits("clip_score", model="someone/clip") == {"model": COMMIT}
    assert commits("clip_score", model="someone/clip", revision=other) == {"model": other}
    assert commits("clip_score", model=str(in_the_cache)) == {}
    for name in ("pick_score", "hps"):
        found = commits(name, model="someone/clip", processor="someone/clip")
        assert found == {"model": COMMIT, "processor": COMMIT}
    (in_the_cache / "aesthetic-model.pth").touch()
    assert commits("aesthetic", model="someone/clip", head="someone/clip") == {"model": COMMIT, "head": COMMIT}
    for name in ("dino_identity", "dino_structure"):
        assert commits(name, model="no/such", revision=other) == {"model": other}
    assert commits("edge_density") == {}
    with pytest.raises(UserError, match="model is 'no/such', which is not on this machine, and http"):
        commits("dino_identity", model="no/such")


def commits(name: str, **options: str) -> dict[str, str]:
    return build_reward(name, RewardConfig(options=options)).commits()


def test_a_model_and_a_device_that_are_not_there(clip_folder: Path) -> None:
    with pytest.raises(UserError, match="neither a folder on this machine nor a hub id"):
        ClipScore(model="my clip").check_machine()
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="device of the reward clip_score is 'cuda', but torch finds no CUDA"):
            ClipScore(model=str(clip_folder), device="cuda").check_machine()
