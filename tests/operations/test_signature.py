"""A signed folder is refused after any change of it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.small_project import ROOT
from visual_grpo.operations.signature import SignatureError, sign, verify

SIGNED = ("changes.diff", "last/SHA256SUMS", "last/model.safetensors", "model.safetensors", "\xe9 'a' \\ b.json")


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the folder ``adapters`` with its signature, and the keys."""
    place = tmp_path_factory.mktemp("signed")
    (place / "adapters/last").mkdir(parents=True)
    for name in SIGNED:
        (place / "adapters" / name).write_text(name)
    openssl(place, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "key.pem")
    openssl(place, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "other.pem")
    openssl(place, "ec", "-in", "key.pem", "-pubout", "-out", "public.pem")
    done = make("sign", place / "adapters", place / "key.pem")
    assert done.returncode == 0, done.stderr
    return place


def openssl(place: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=place, capture_output=True, check=True)


def make(target: str, folder: Path, key: Path) -> subprocess.CompletedProcess[str]:
    words = ["make", "--no-print-directory", target, f"FOLDER={folder}", f"KEY={key}"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def resigned(folder: Path) -> None:
    """By a key that is not the owner's."""
    sign(folder, folder.parent / "other.pem")


def behind_a_link(folder: Path) -> None:
    """The signed content is there, and can be replaced later."""
    (folder / "changes.diff").rename(folder.parent / "elsewhere")
    (folder / "changes.diff").symlink_to(folder.parent / "elsewhere")


def in_a_linked_folder(folder: Path) -> None:
    (folder / "last").rename(folder.parent / "last")
    (folder / "last").symlink_to(folder.parent / "last")


def bound(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s"))


TAMPERINGS: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "model.safetensors").write_text("other"), "changed: 'model.safetensors'"),
    (lambda folder: (folder / "last/SHA256SUMS").write_text("other"), "changed: 'last/SHA256SUMS'"),
    (lambda folder: (folder / "new").touch(), "added: 'new'"),
    (lambda folder: (folder / "SHA256SUMS.diff").touch(), "added: 'SHA256SUMS.diff'"),
    (lambda folder: (folder / "last/SHA256SUMS.sig").touch(), "added: 'last/SHA256SUMS.sig'"),
    (lambda folder: (folder / "a\nb\x1b[2J").touch(), r"added: 'a\nb\x1b[2J'"),
    (lambda folder: (folder / "changes.diff").unlink(), "removed: 'changes.diff'"),
    (
        lambda folder: (folder / "changes.diff").rename(folder / "change.diff"),
        "added: 'change.diff'; removed: 'changes",
    ),
    (lambda folder: (folder / "new").symlink_to("model.safetensors"), "no links, pipes or devices: 'new'"),
    (
        lambda folder: (folder / "SHA256SUMS.sig2").symlink_to("nowhere"),
        "no links, pipes or devices: 'SHA256SUMS.sig2'",
    ),
    (behind_a_link, "no links, pipes or devices: 'changes.diff'"),
    (in_a_linked_folder, "no links, pipes or devices: 'last'"),
    (lambda folder: os.mkfifo(folder / "last/pipe"), "no links, pipes or devices: 'last/pipe'"),
    (bound, "no links, pipes or devices: 's'"),
    (lambda folder: (folder / "SHA256SUMS").write_text(""), "openssl: "),
    (lambda folder: (folder / "SHA256SUMS").unlink(), "There is no SHA256SUMS"),
    (lambda folder: (folder / "SHA256SUMS.sig").unlink(), "openssl: "),
    (resigned, "openssl: "),
    (shutil.rmtree, "is not a folder"),
]


@pytest.mark.parametrize(("tamper", "told"), TAMPERINGS, ids=[told for _, told in TAMPERINGS])
def test_a_folder_that_is_not_what_was_signed_is_refused(
    tamper: Callable[[Path], object], told: str, signed: Path, tmp_path: Path
) -> None:
    shutil.copytree(signed, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "adapters"
    verify(folder, tmp_path / "public.pem")
    tamper(folder)
    with pytest.raises(SignatureError, match=re.escape(told)):
        verify(folder, tmp_path / "public.pem")


def test_the_command_fails_with_the_reason(signed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(signed / "adapters", tmp_path / "adapters")
    (folder / "new").touch()
    done = make("verify", folder, signed / "public.pem")
    assert done.returncode != 0
    assert "added: 'new'" in done.stderr
    assert "Verified" not in done.stdout


@pytest.mark.parametrize("name", ["$(shell touch PWNED)", "`touch PWNED`", "$(touch PWNED)", '"; touch PWNED; "'])
def test_the_name_of_a_strangers_folder_is_not_run(name: str, signed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(signed / "adapters", tmp_path / name)
    done = make("verify", folder, signed / "public.pem")
    assert (done.returncode, done.stdout) == (0, "Verified\n"), done.stderr
    assert not (ROOT / "PWNED").exists()


def test_the_list_is_sha256sums_own(signed: Path) -> None:
    subprocess.run(["sha256sum", "--strict", "--check", "SHA256SUMS"], cwd=signed / "adapters", check=True)
    names = [line[68:] for line in (signed / "adapters/SHA256SUMS").read_text().splitlines()]
    assert names == sorted(SIGNED)


@pytest.mark.parametrize(
    ("spoil", "told"), [(lambda folder: (folder / "a\nb").touch(), "line break"), (behind_a_link, "no links")]
)
def test_what_cannot_be_verified_is_not_signed(
    spoil: Callable[[Path], object], told: str, signed: Path, tmp_path: Path
) -> None:
    shutil.copytree(signed, tmp_path, dirs_exist_ok=True)
    before = (tmp_path / "adapters/SHA256SUMS").read_bytes()
    spoil(tmp_path / "adapters")
    with pytest.raises(SignatureError, match=told):
        sign(tmp_path / "adapters", tmp_path / "key.pem")
    assert (tmp_path / "adapters/SHA256SUMS").read_bytes() == before
