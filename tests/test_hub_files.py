"""Downloaded files against the hashes that name them, in a cache laid out as the hub's client does."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from visual_grpo.errors import UserError
from visual_grpo.saved_model import check_downloads

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS, INDEX = b"a large file", b"{}"


def git_hash(content: bytes) -> str:
    """As `git hash-object` gives it: of b"{}" it is 9e26dfeeb6e641a33dae4961196235bdb965b21b."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture
def blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """File -> where its content is."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    repo = tmp_path / "models--owner--name"
    found = {}
    for name, content, digest in (
        ("model_index.json", INDEX, git_hash(INDEX)),
        ("unet/weights.safetensors", WEIGHTS, hashlib.sha256(WEIGHTS).hexdigest()),
    ):
        found[name] = repo / "blobs" / digest
        found[name].parent.mkdir(parents=True, exist_ok=True)
        found[name].write_bytes(content)
        link = repo / "snapshots" / COMMIT / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(found[name])
    return found


def test_files_as_the_hub_published_them_pass(blobs: dict[str, Path]) -> None:
    assert git_hash(b"{}") == "9e26dfeeb6e641a33dae4961196235bdb965b21b"
    check_downloads("owner/name", COMMIT)


@pytest.mark.parametrize("name", ["model_index.json", "unet/weights.safetensors"])
def test_a_changed_file_is_named(blobs: dict[str, Path], name: str) -> None:
    blobs[name].write_bytes(b"something else")
    check_downloads("owner/name", None)
    with pytest.raises(UserError, match=f"{name} of owner/name is not what the hub published .*{blobs[name]}"):
        check_downloads("owner/name", COMMIT)
