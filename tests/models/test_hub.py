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
from visual_grpo import provenance
from visual_grpo.common.errors import UserError
from visual_grpo.hooks.inputs_and_outputs import tags_of
from visual_grpo.models.hub import look_up
from visual_grpo.models.run_spec import resolve
from visual_grpo.operations.preflight.check import check_before_run, pinned
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.pipelines.starter import build
from visual_grpo.training.components import check_unchanged

NAME, MOVED = "someone/sd3", "f" * 40
INDEX = {"_class_name": "StableDiffusion3Pipeline", "transformer": ["diffusers", "A"], "vae": ["diffusers", "B"]}
SHARDS = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
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
    assert provenance.record(spec, found, "data")["parameters"]["model"]["revision"] == COMMIT
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


REFUSED: list[tuple[str, dict[str, int], Any, tuple[int, str] | None, str | None, str]] = [
    ("gated", WHOLE, INDEX, (401, "GatedRepo"), None, "is gated, and this machine has no token. .* `hf auth login`"),
    ("no such", WHOLE, INDEX, (401, "RepoNotFound"), None, "the hub has no model someone/sd3; or it is private"),
    ("revision", WHOLE, INDEX, None, "v9", "model.revision is 'v9', which is not a branch, tag or commit of someone"),
    ("busy", WHOLE, INDEX, (429, ""), None, r"the hub answers 429 for someone/sd3 \(too many requests\)"),
    ("no model", WHOLE, None, None, None, "holds neither model_index.json nor config.json.* Single files of weights"),
    (
        "no vae",
        {"transformer/a.safetensors": 1},
        INDEX,
        None,
        None,
        "lacks the folders vae, which its model_index.json",
    ),
    (
        "only bin",
        {"transformer/a.bin": 1, "vae/config.json": 1},
        INDEX,
        None,
        None,
        "of transformer in someone/sd3 are there as .bin only",
    ),
    (
        "only fp16",
        {"vae/m.fp16.safetensors": 1, "transformer/config.json": 1},
        INDEX,
        None,
        None,
        "there as .fp16.safetensors only: expected .saf",
    ),
]


@pytest.mark.parametrize(
    ("files", "index", "refused", "revision", "said"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_what_a_download_would_end_in_is_told_first(
    files: dict[str, int],
    index: Any,
    refused: tuple[int, str] | None,
    revision: str | None,
    said: str,
    tmp_path: Path,
) -> None:
    folder = repository(tmp_path / "repository", files, index)
    with hub(NAME, folder, refused=refused) as asked, pytest.raises(UserError, match=said):
        look_up(NAME, revision)
    assert not any(name.endswith((".bin", ".safetensors")) for name in asked)


def test_a_token_without_access_and_a_missing_shard_and_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_token")
    said = "the account of your token has no access yet. Accept its licence at"
    with (
        hub(NAME, repository(tmp_path / "one", WHOLE), refused=(403, "GatedRepo")),
        pytest.raises(UserError, match=said),
    ):
        look_up(NAME, None)
    folder = repository(tmp_path / "two", {"vae/model-00001-of-00002.safetensors": 4, "transformer/config.json": 1})
    (folder / "vae/model.safetensors.index.json").write_text(json.dumps(SHARDS))
    with hub(NAME, folder), pytest.raises(UserError, match=r"lacks vae/model-00002-of-00002.safetensors, which vae/mo"):
        look_up(NAME, None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    said = "GB of someone/sd3 are to be downloaded into .*, where 0.0 GB are free"
    with hub(NAME, repository(tmp_path / "three", WHOLE), commit=MOVED), pytest.raises(UserError, match=said):
        look_up(NAME, None)


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
