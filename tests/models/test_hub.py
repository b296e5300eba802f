"""A model on the hub: its commit in every record, and what is told before any work and any download of weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.defaults import parameters
from tests.hub import COMMIT, hub, hub_at
from visual_grpo.common.errors import UserError
from visual_grpo.hooks.inputs_and_outputs import tags_of
from visual_grpo.models.hub import look_up
from visual_grpo.models.run_spec import resolve
from visual_grpo.operations.preflight.check import check_before_run, pinned
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.pipelines.starter import build
from visual_grpo.training import made_with
from visual_grpo.training.components import check_unchanged

NAME, MOVED = "someone/sd3", "f" * 40
INDEX = {"_class_name": "StableDiffusion3Pipeline", "transformer": ["diffusers", "A"], "vae": ["diffusers", "B"]}
WHOLE = {"transformer/diffusion_pytorch_model.safetensors": 700, "vae/diffusion_pytorch_model.safetensors": 300}
TWINS = {
    "transformer/diffusion_pytorch_model.fp16.safetensors": 9,
    "vae/model.bin": 9,
    "sd3_single_file.safetensors": 9,
}
MODEL: dict[str, Any] = {
    "model": {"path": NAME},
    "modules": {"dit": None},
    "evaluation": {"controls": []},
    "sampling": {n: {"temperature": None} for n in ("rollout", "eval")},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, no token, and a hub at which nobody answers."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with hub_at("http://127.0.0.1:9"):
        yield tmp_path / "cache"


def repository(folder: Path, files: dict[str, int], index: dict[str, Any] | None = INDEX) -> Path:
    """A folder with files of so many bytes."""
    for name, size in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"0" * size)
    folder.mkdir(exist_ok=True)
    if index is not None:
        (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def test_a_branch_becomes_its_commit_once_and_every_record_has_it(tmp_path: Path) -> None:
    folder = repository(tmp_path / "repository", WHOLE | TWINS)
    with hub(NAME, folder) as asked:
        config, notes = pinned(parameters(**MODEL))
        found = build(config.starter, config.data, config.model, 0)
    assert config.model.revision == found["commit"] == COMMIT
    assert asked == ["model_index.json"], "no weights"
    assert [note.partition(" into ")[0] for note in notes] == [
        f"Downloads 0.0 MB of weights of {NAME} (commit {COMMIT[:12]})"
    ]
    assert look_up(NAME, None).commit == COMMIT, "from the cache, without a network"
    spec = resolve(config)
    assert made_with.of(spec, found, "data")["parameters"]["model"]["revision"] == COMMIT
    check_unchanged(found, spec)
    with hub(NAME, folder, commit=MOVED):
        moved, _ = pinned(parameters(**MODEL))
    with pytest.raises(UserError, match=f"was at commit {COMMIT}, and is at {MOVED}.*model.revision={COMMIT}") as told:
        check_unchanged(found, resolve(moved))
    assert told.value.remedy is not None
    assert told.value.remedy.pipeline == "starter"


def test_only_what_is_not_in_the_cache_is_to_be_downloaded(tmp_path: Path, cache: Path) -> None:
    folder = repository(tmp_path / "repository", WHOLE | TWINS)
    with hub(NAME, folder):
        assert look_up(NAME, None).to_download == 1000
        snapshot = cache / "models--someone--sd3/snapshots" / COMMIT
        (snapshot / "vae").mkdir()
        shutil.copy(folder / "vae/diffusion_pytorch_model.safetensors", snapshot / "vae")
        assert look_up(NAME, COMMIT).to_download == 700


def test_an_old_name_leads_to_the_new_one_and_is_told(tmp_path: Path) -> None:
    with hub(NAME, repository(tmp_path / "repository", WHOLE), former="earlier/sd3"):
        found = look_up("earlier/sd3", None)
    assert (found.path, found.name, found.commit) == ("earlier/sd3", NAME, COMMIT)
    assert next(iter(found.notes)).startswith(f"model.path: earlier/sd3 is called {NAME} on the hub now")


def test_a_hub_that_refuses_does_not_matter_where_the_model_is_in_the_cache(tmp_path: Path) -> None:
    folder = repository(tmp_path / "repository", WHOLE)
    with hub(NAME, folder):
        look_up(NAME, None)
    with hub(NAME, folder, refused=(429, ""), commit=MOVED):
        assert look_up(NAME, None).commit == COMMIT


def test_weights_need_access_and_a_cache_that_can_be_written(tmp_path: Path, cache: Path) -> None:
    folder = repository(tmp_path / "repository", WHOLE)
    with hub(NAME, folder):
        look_up(NAME, None)
    with hub(NAME, folder, refused=(401, "GatedRepo")), pytest.raises(UserError, match="this machine has no token"):
        look_up(NAME, COMMIT)
    blobs = cache / "models--someone--sd3/blobs"
    shutil.rmtree(blobs)
    blobs.touch()
    with hub(NAME, folder), pytest.raises(UserError, match="cannot be stored in the hub's cache"):
        look_up(NAME, COMMIT)


def test_without_a_network_the_first_reason_is_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "someone/sd3 is not a folder on this machine, it was not downloaded before, and "
    config = parameters(**MODEL, data={"path": str(tmp_path)})
    with pytest.raises(UserError, match=f"{said}http://127.0.0.1:9 does not answer") as told:
        check_before_run(config, {"adapters", "records"}, {"training", "rewards"}, list)
    assert "records" not in str(told.value)
    for name in ("plan", "gpu_check"):  # They need no weights.
        check_before_run(config, set(), tags_of(register_pipelines()[name]), list)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=f"{said}HF_HUB_OFFLINE is set"):
        look_up(NAME, None)
    with pytest.raises(UserError, match="which is neither a folder on this machine nor a hub id"):
        look_up("owner/na me", None)
