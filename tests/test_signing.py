"""Adapters signed with a user's key, by the real tool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from visual_grpo.errors import UserError
from visual_grpo.signing import SIGNATURE, SignatureError, main, sign, verify

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(ROOT)
    for name in ("key", "other"):
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(tmp_path / f"{name}.pem"))
        _openssl("ec", "-in", str(tmp_path / f"{name}.pem"), "-pubout", "-out", str(tmp_path / f"{name}.pub"))
    made = tmp_path / "adapters"
    (made / "ar").mkdir(parents=True)
    (made / "ar/adapter_model.safetensors").write_bytes(b"weights")
    (made / "training.json").write_text("{}")
    return made


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("uv") or (ROOT / ".venv-tools/bin/uv").is_file()), reason="uv is installed by make setup"
)
def test_what_was_signed_is_verified_and_every_change_is_named(folder: Path) -> None:
    key, public = folder.parent / "key.pem", folder.parent / "key.pub"
    assert sign(folder, key) == folder / SIGNATURE
    verify(folder, public)
    with pytest.raises(SignatureError):
        verify(folder, folder.parent / "other.pub")
    weights = folder / "ar/adapter_model.safetensors"
    weights.write_bytes(b"changed")
    with pytest.raises(SignatureError, match=r"ar/adapter_model\.safetensors"):
        verify(folder, public)
    weights.write_bytes(b"weights")
    (folder / "new").write_text("x")
    with pytest.raises(SignatureError, match="new"):
        verify(folder, public)
    assert sign(folder, key).is_file()  # Again, with the first signature in the folder.
    verify(folder, public)
    weights.unlink()
    with pytest.raises(SignatureError, match=r"ar/adapter_model\.safetensors"):
        verify(folder, public)


def test_what_is_no_key_or_no_folder_is_told_before_the_tool_is_called(folder: Path) -> None:
    key, public = folder.parent / "key.pem", folder.parent / "key.pub"
    with pytest.raises(UserError, match="is no folder"):
        sign(folder / "nothing", key)
    with pytest.raises(UserError, match=r"no\.pem does not exist(?s:.)*openssl ecparam"):
        sign(folder, folder / "no.pem")
    with pytest.raises(UserError, match=r"is no private key in PEM"):
        sign(folder, public)
    with pytest.raises(UserError, match=r"is no public key in PEM"):
        verify(folder, key)
    with pytest.raises(UserError, match=r"is not signed: it has no model\.sig"):
        verify(folder, public)


def test_the_command_says_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder), str(folder.parent / "key.pub")]) == 1
    assert "is not signed" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage: python -m visual_grpo.signing" in capsys.readouterr().err
