"""Checkpoints are written whole or not at all; a damaged one is named, and the newest intact one used."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from visual_grpo.common.errors import UserError
from visual_grpo.grpo import checkpoint
from visual_grpo.grpo.checkpoint import newest_intact, set_later_aside, use_newest

WRITER = """
import sys, torch
from pathlib import Path
from visual_grpo.grpo.checkpoint import save_checkpoint
for step in range(1, 100000):
    tensors = {f"t{i}": torch.full((20000,), float(step)) for i in range(8)}
    save_checkpoint(Path(sys.argv[1]), step, tensors, {"step": step})
"""


def test_a_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.get_rng_state(), "c": torch.randn(2).bfloat16()}
    facts = {"history": [{"x": 0.1 + 0.2}], "mlflow_run_id": "r"}
    loaded, facts = checkpoint.load_checkpoint(checkpoint.save_checkpoint(tmp_path, 7, tensors, facts))
    assert all(torch.equal(loaded[k], v) for k, v in tensors.items())
    assert loaded.keys() == tensors.keys()
    assert facts["history"] == [{"x": 0.1 + 0.2}]


def test_the_sums_are_those_of_sha256sum(tmp_path: Path) -> None:
    path = checkpoint.save_checkpoint(tmp_path, 1, {"a": torch.zeros(9)}, {})
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["facts.json: OK", "state.safetensors: OK"]
    assert sorted(file.name for file in path.iterdir()) == ["SHA256SUMS", "facts.json", "state.safetensors"]


def test_the_newest_are_kept_and_listed_by_their_steps(tmp_path: Path) -> None:
    for step in (1, 9, 10, 1000000):
        path = checkpoint.save_checkpoint(tmp_path, step, {"a": torch.zeros(1)}, {}, keep=3)
        assert checkpoint.step_of(path) == step
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-1000000", "step-000010", "step-000009"]


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save_checkpoint(tmp_path, 1, {"a": torch.zeros(1)}, {})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoint.save_checkpoint(tmp_path, 2, {"a": torch.zeros(1)}, {"history": object()})
    assert sorted(tmp_path.rglob("*")) == before


class Recorder:
    """What is flushed to disk, and what becomes visible, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        open_, fsync, rename = os.open, os.fsync, os.rename
        names: dict[int, str] = {}

        def opened(path: Any, *arguments: Any, **options: Any) -> int:
            descriptor = open_(path, *arguments, **options)
            names[descriptor] = Path(path).name
            return descriptor

        def synced(descriptor: int) -> None:
            self.events.append(("fsync", names[descriptor]))
            fsync(descriptor)

        def renamed(old: Any, new: Any, **options: Any) -> None:
            self.events.append(("rename", Path(new).name))
            rename(old, new, **options)

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "rename", renamed)
        monkeypatch.setattr(os, "replace", renamed)


def test_files_and_folders_are_on_disk_before_they_get_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    checkpoint.save_checkpoint(tmp_path / "new", 3, {"a": torch.zeros(1)}, {})
    events = recorder.events
    begins = events.index(("rename", "step-000003"))
    draft = f".step-000003.draft-{os.getpid()}"
    written = {"SHA256SUMS", "facts.json", "state.safetensors", draft}
    assert written <= {name for kind, name in events[:begins] if kind == "fsync"}
    assert events[begins - 1] == ("fsync", draft), "the folder after its files"
    assert events[begins + 1] == ("fsync", "new")
    assert ("fsync", tmp_path.name) in events[:begins], "the new folder itself"


def test_a_process_killed_while_writing_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("step-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2 + random.random() / 5)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    latest = newest_intact(tmp_path)
    assert latest is not None
    tensors, facts = checkpoint.load_checkpoint(latest)
    assert len(tensors) == 8
    assert all((value == facts["step"]).all() for value in tensors.values())


def test_every_generator_goes_on_where_it_was() -> None:
    tensors, facts = checkpoint.random_states()
    facts = json.loads(json.dumps(facts))
    want = random.random(), np.random.rand(), torch.rand(1).item()
    for _ in range(3):
        random.random(), np.random.rand(), torch.rand(1)
    checkpoint.restore_random_states(tensors, facts)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == want


CORRUPTIONS = 500
FILES = ("state.safetensors", "facts.json", "SHA256SUMS")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With checkpoints of the steps 2, 4 and 6."""
    for step in (2, 4, 6):
        write(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


def write(folder: Path, step: int) -> Path:
    tensors = {"a": torch.full((40,), float(step)), "rng": torch.arange(25, dtype=torch.uint8)}
    facts = {"step": step, "history": [{"reward": 0.1 * step}], "mlflow_run_id": f"run {step}"}
    return checkpoint.save_checkpoint(folder, step, tensors, facts, keep=3)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def used_checkpoint(folder: Path) -> tuple[str | None, list[str]]:
    """The name of the checkpoint that is used, and what is said."""
    notes: list[str] = []
    path = use_newest(folder, notes.append)
    return None if path is None else path.name, notes


def test_the_newest_is_used_without_a_word(folder: Path) -> None:
    before = names(folder)
    assert used_checkpoint(folder) == ("step-000006", [])
    assert names(folder) == before
    assert used_checkpoint(folder.with_name("nothing")) == (None, [])


def corrupt(file: Path, draw: random.Random) -> str:
    """Flips one byte to any other value, or cuts the file off anywhere."""
    content = bytearray(file.read_bytes())
    place = draw.randrange(len(content))
    if draw.random() < 0.5:
        file.write_bytes(content[:place])
        return f"{file.name} cut off at {place}"
    content[place] ^= draw.randrange(1, 256)
    file.write_bytes(content)
    return f"byte {place} of {file.name} flipped"


def test_every_flipped_byte_and_every_truncation_is_noticed_and_an_intact_checkpoint_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # Only for the time that it takes.
    draw = random.Random(0)
    intact = {path.name: path.read_bytes() for path in (folder / "step-000004").iterdir()}
    for number in range(CORRUPTIONS):
        copy = tmp_path / f"{number}"
        shutil.copytree(folder, copy)
        what = corrupt(copy / "step-000006" / draw.choice(FILES), draw)
        used, notes = used_checkpoint(copy)
        assert used == "step-000004", what
        assert [note.split(" is damaged")[0] for note in notes] == [f"The checkpoint {copy / 'step-000006'}"], what
        assert (copy / "damaged-step-000006").is_dir(), what
        assert {path.name: path.read_bytes() for path in (copy / "step-000004").iterdir()} == intact
        with pytest.raises(checkpoint.DamagedCheckpointError):
            checkpoint.load_checkpoint(copy / "damaged-step-000006")
        shutil.rmtree(copy)


def test_what_is_missing_is_named(folder: Path) -> None:
    shutil.rmtree(folder / "step-000006")
    assert used_checkpoint(folder) == ("step-000004", [])
    (folder / "step-000004" / "facts.json").unlink()
    used, notes = used_checkpoint(folder)
    assert used == "step-000002"
    assert len(notes) == 1
    assert "step-000004 is damaged (facts.json is missing): not used, and renamed to damaged-step-000004" in notes[0]


def test_the_second_damaged_one_of_a_name_has_a_number(folder: Path) -> None:
    for name in ("damaged-step-000006", "damaged-step-000006-2"):
        corrupt(folder / "step-000006" / "facts.json", random.Random(1))
        assert used_checkpoint(folder)[0] == "step-000004"
        assert (folder / name).is_dir()
        write(folder, 6)


def test_where_none_is_intact_nothing_is_renamed_and_the_message_says_what_to_do(folder: Path) -> None:
    for step in (2, 4, 6):
        corrupt(folder / f"step-{step:06d}" / "state.safetensors", random.Random(step))
    before = names(folder)
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"(?s)No checkpoint in .* is intact:\n  step-000006: .*resume=FOLDER"
        ) as error:
            use_newest(folder, lambda text: None)
        assert "start at step 1 without resume=auto" in str(error.value)
    assert names(folder) == before


def test_looking_for_the_newest_changes_nothing(folder: Path) -> None:
    corrupt(folder / "step-000006" / "facts.json", random.Random(1))
    before = names(folder)
    assert newest_intact(folder) == folder / "step-000004"
    assert names(folder) == before
    assert newest_intact(folder.with_name("nothing")) is None


def test_going_back_to_an_older_one_sets_the_later_aside(folder: Path) -> None:
    notes: list[str] = []
    set_later_aside(folder / "step-000004", notes.append)
    assert names(folder) == ["later-step-000006", "step-000002", "step-000004"]
    assert len(notes) == 1
