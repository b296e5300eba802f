"""Checkpoints are written whole or not at all; a damaged one is named, and the newest intact one used."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from visual_grpo.common.errors import UserError
from visual_grpo.grpo import checkpoint
from visual_grpo.grpo.checkpoint import DamagedCheckpointError, newest_intact, skip_newer


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
    written = {"SHA256SUMS", "facts.json", "state.safetensors"}
    assert written <= {name for kind, name in events[:begins] if kind == "fsync"}
    kind, last = events[begins - 1]
    assert (kind, last.partition("draft")[0]) == ("fsync", ".step-000003."), "the folder after its files"
    assert events[begins + 1] == ("fsync", "new")
    assert ("fsync", tmp_path.name) in events[:begins], "the new folder itself"


def test_every_generator_goes_on_where_it_was() -> None:
    tensors, facts = checkpoint.random_states()
    facts = json.loads(json.dumps(facts))
    want = random.random(), np.random.rand(), torch.rand(1).item()
    for _ in range(3):
        random.random(), np.random.rand(), torch.rand(1)
    checkpoint.restore_random_states(tensors, facts)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == want


CORRUPTIONS = 300
FILES = ("state.safetensors", "facts.json", "SHA256SUMS")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With checkpoints of the steps 2, 4 and 6."""
    for step in (2, 4, 6):
        tensors = {"a": torch.full((40,), float(step)), "rng": torch.arange(25, dtype=torch.uint8)}
        checkpoint.save_checkpoint(tmp_path / "checkpoints", step, tensors, {"step": step}, keep=3)
    return tmp_path / "checkpoints"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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


def test_every_flipped_byte_and_every_truncation_is_noticed(folder: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    assert newest_intact(folder) == folder / "step-000006"
    for number in range(CORRUPTIONS):
        copy = tmp_path / f"{number}"
        shutil.copytree(folder, copy)
        what = corrupt(copy / "step-000006" / draw.choice(FILES), draw)
        assert newest_intact(copy) == copy / "step-000004", what
        with pytest.raises(DamagedCheckpointError):
            checkpoint.load_checkpoint(copy / "step-000006")
        shutil.rmtree(copy)


def test_newer_ones_are_named_and_set_aside(folder: Path) -> None:
    (folder / "step-000004" / "facts.json").unlink()
    assert newest_intact(folder) == folder / "step-000006"
    for rename, left in ((False, "step-000006"), (True, "later-step-000006")):
        notes: list[str] = []
        skip_newer(folder / "step-000002", notes.append, rename=rename)
        assert left in names(folder)
        assert notes[0].startswith(f"{folder / 'step-000006'} is newer and not used")
        assert "step-000004 is damaged (facts.json is missing) and not used" in notes[1]
    assert notes[1].endswith("; it is now damaged-step-000004")
    assert names(folder) == ["damaged-step-000004", "later-step-000006", "step-000002"]


def test_where_none_is_intact_the_message_says_what_to_do(folder: Path) -> None:
    for step in (2, 4, 6):
        corrupt(folder / f"step-{step:06d}" / "state.safetensors", random.Random(step))
    with pytest.raises(UserError, match=r"(?s)No checkpoint in .* is intact:\n  step-000006: .*without resume=auto"):
        newest_intact(folder)
    assert newest_intact(folder.with_name("nothing")) is None
