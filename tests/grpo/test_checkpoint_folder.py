"""Damaged checkpoints: each is noticed and named, and the newest intact one is used."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from visual_grpo.common.errors import UserError
from visual_grpo.grpo import checkpoint
from visual_grpo.grpo.checkpoint import newest_intact, set_later_aside, use_newest

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


def found(folder: Path) -> tuple[str | None, list[str]]:
    """The name of the checkpoint that is used, and what is said."""
    notes: list[str] = []
    path = use_newest(folder, notes.append)
    return None if path is None else path.name, notes


def test_the_newest_is_used_without_a_word(folder: Path) -> None:
    before = names(folder)
    assert found(folder) == ("step-000006", [])
    assert names(folder) == before
    assert found(folder.with_name("nothing")) == (None, [])


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
        used, notes = found(copy)
        assert used == "step-000004", what
        assert [note.split(" is damaged")[0] for note in notes] == [f"The checkpoint {copy / 'step-000006'}"], what
        assert (copy / "damaged-step-000006").is_dir(), what
        assert {path.name: path.read_bytes() for path in (copy / "step-000004").iterdir()} == intact
        with pytest.raises(checkpoint.DamagedCheckpointError):
            checkpoint.load_checkpoint(copy / "damaged-step-000006")
        shutil.rmtree(copy)


def test_what_is_missing_is_named(folder: Path) -> None:
    shutil.rmtree(folder / "step-000006")
    assert found(folder) == ("step-000004", [])
    (folder / "step-000004" / "facts.json").unlink()
    used, notes = found(folder)
    assert used == "step-000002"
    assert len(notes) == 1
    assert "step-000004 is damaged (facts.json is missing): not used, and renamed to damaged-step-000004" in notes[0]


def test_the_second_damaged_one_of_a_name_has_a_number(folder: Path) -> None:
    for name in ("damaged-step-000006", "damaged-step-000006-2"):
        corrupt(folder / "step-000006" / "facts.json", random.Random(1))
        assert found(folder)[0] == "step-000004"
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
