"""What is written whole or not at all, by one command at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from visual_grpo.common import files
from visual_grpo.common.errors import UserError

HOLDER = "import sys; from pathlib import Path; from visual_grpo.common import files; files.hold(Path(sys.argv[1]))"


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    files.release()


def test_a_second_holder_is_refused_until_the_first_has_ended_however_that_is(tmp_path: Path) -> None:
    lock = tmp_path / "output/.lock"
    code = f"{HOLDER}; print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(lock)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        first.stdout.readline()
        with pytest.raises(UserError, match=f"output is in use by another command, process {first.pid}.*output=FOLDER"):
            files.hold(lock)
        files.hold(tmp_path / "another/.lock")
        first.kill()
    files.hold(lock)
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        files.hold(lock)
    files.release()
    assert not lock.exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/\.lock cannot be written: .* Write elsewhere with output=FOLDER"):
        files.hold(tmp_path / "file/.lock")


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "new/file"
    files.write_atomically(file, "ü")
    assert file.read_bytes() == "ü".encode()

    def full(path: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(files, "flush", full)
    with pytest.raises(OSError, match="No space"):
        files.write_atomically(file, b"other")
    assert [path.name for path in file.parent.iterdir()] == ["file"]
    assert file.read_bytes() == "ü".encode()
