"""A folder that is replaced whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from kedro.io import DatasetError

from visual_grpo.datasets import FolderDataset
from visual_grpo.errors import UserError


@pytest.fixture
def dataset(tmp_path):
    return FolderDataset(filepath=str(tmp_path / "data" / "out"), made_by="baseline")


def fill(**files):
    def write(folder: Path) -> None:
        for name, text in files.items():
            (folder / name).write_text(text)

    return write


def content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_missing_folder_names_the_command(dataset):
    assert not dataset.exists()
    with pytest.raises(UserError, match=r"out does not exist yet. Make it with: kedro run --pipeline=baseline"):
        dataset.load()


def test_what_was_written_replaces_the_old_folder_whole(dataset):
    dataset.save(fill(a="1", b="2"))
    assert content(dataset.load()) == {"a": "1", "b": "2"}
    dataset.save(fill(c="3"))
    assert content(dataset.load()) == {"c": "3"}
    assert [path.name for path in dataset.load().parent.iterdir()] == ["out"]


def test_an_error_or_ctrl_c_leaves_the_old_folder(dataset):
    dataset.save(fill(a="1"))

    def interrupted(folder):
        (folder / "a").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dataset.save(interrupted)
    assert content(dataset.load()) == {"a": "1"}
    assert [path.name for path in dataset.load().parent.iterdir()] == ["out"]


def test_a_rename_that_fails_puts_the_old_folder_back(dataset, monkeypatch):
    dataset.save(fill(a="1"))
    rename = Path.rename

    def failing(self, target):
        if Path(target).name == "out" and not self.name.endswith(".previous"):
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(DatasetError, match="no"):
        dataset.save(fill(b="2"))
    assert content(dataset.load()) == {"a": "1"}


def test_a_kill_between_the_two_renames_is_mended(dataset):
    dataset.save(fill(a="1"))
    folder = dataset.load()
    folder.rename(folder.with_name(".out.previous"))
    assert dataset.exists()
    assert content(dataset.load()) == {"a": "1"}


def test_a_kill_before_the_old_folder_was_removed_is_mended(dataset):
    dataset.save(fill(a="1"))
    folder = dataset.load()
    folder.with_name(".out.previous").mkdir()
    assert content(dataset.load()) == {"a": "1"}
    assert not folder.with_name(".out.previous").exists()


def test_the_folder_is_open_to_whom_the_umask_lets_in(dataset):
    dataset.save(fill())
    usual = dataset.load().parent / "usual"
    usual.mkdir()
    assert dataset.load().stat().st_mode == usual.stat().st_mode


def test_anything_but_a_function_is_refused(dataset):
    with pytest.raises(UserError, match="expected a function that writes into a folder, got str"):
        dataset.save("a/folder")


def test_a_users_error_while_writing_is_passed_on_as_it_is(dataset):
    def fail(folder: Path) -> None:
        raise UserError("lower the learning rate")

    with pytest.raises(UserError, match=r"^lower the learning rate$"):
        dataset.save(fail)
    assert not dataset.exists()
