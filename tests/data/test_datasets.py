"""Folders and manifests as Kedro datasets, replaced whole or not at all."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kedro.io import DataCatalog, DatasetError
from kedro.pipeline import node, pipeline
from kedro.runner import SequentialRunner
from PIL import Image

from visual_grpo.common.digests import content_digest
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.common.files import new_folder, settled
from visual_grpo.config import DataConfig
from visual_grpo.data.datasets import FolderDataset, RecordsDataset, path_of
from visual_grpo.data.manifest import write_manifest
from visual_grpo.data.sources import find_records
from visual_grpo.grpo.checkpoint import save_checkpoint
from visual_grpo.tracking.adapter_lookup import find_adapters
from visual_grpo.training.resuming import find_run

KILLED_BETWEEN_THE_RENAMES = """
import os, signal, sys
from pathlib import Path
from visual_grpo.common.files import new_folder
from visual_grpo.data.datasets import FolderDataset

def rename(self, target, real=Path.rename):
    if self.name.startswith(".out.draft"):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, target)

draft = new_folder(Path(sys.argv[1]))
(draft / "b").write_text("2")
Path.rename = rename
FolderDataset(filepath=sys.argv[1], metadata={"made_by": "baseline"}).save(draft)
"""


@pytest.fixture
def dataset(tmp_path):
    return FolderDataset(filepath=str(tmp_path / "data" / "out"), metadata={"made_by": "baseline"})


@pytest.fixture
def records(tmp_path):
    return RecordsDataset(filepath=str(tmp_path / "records.parquet"), metadata={"made_by": "data_preparation"})


@pytest.fixture
def new(tmp_path):
    return lambda: new_folder(tmp_path / "data" / "out")


@pytest.fixture
def save(dataset, new):
    def save(**files: str) -> None:
        folder = new()
        for name, text in files.items():
            (folder / name).write_text(text)
        dataset.save(folder)

    return save


def content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_what_is_missing_names_its_pipeline(dataset, records):
    for missing, made_by in ((dataset, "baseline"), (records, "data_preparation")):
        assert not missing.exists()
        with pytest.raises(UserError, match="does not exist yet") as error:
            missing.load()
        assert error.value.remedy == Remedy(made_by)


def test_what_was_written_replaces_the_old_folder_whole(dataset, save):
    save(a="1", b="2")
    assert content(dataset.load()) == {"a": "1", "b": "2"}
    save(c="3")
    assert content(dataset.load()) == {"c": "3"}
    assert [path.name for path in dataset.load().parent.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("full")])
def test_a_node_that_fails_halfway_leaves_the_old_folder(dataset, new, save, error):
    def fill() -> Path:
        folder = new()
        (folder / "a").write_text("half")
        raise error

    save(a="1")
    catalog = DataCatalog({"out": dataset})
    with pytest.raises(type(error)):
        SequentialRunner().run(pipeline([node(fill, None, "out", name="fill")]), catalog)
    assert content(dataset.load()) == {"a": "1"}
    assert content(new()) == {}, "the next folder does not begin with the half-written one"


def test_a_rename_that_fails_puts_the_old_folder_back(dataset, save, monkeypatch):
    save(a="1")
    rename = Path.rename

    def failing(self, target):
        if Path(target).name == "out" and not self.name.endswith(".previous"):
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(DatasetError, match="no"):
        save(b="2")
    assert content(dataset.load()) == {"a": "1"}


def test_a_kill_between_the_two_renames_is_healed(dataset, new, save):
    save(a="1")
    folder = dataset.load()
    command = [sys.executable, "-c", KILLED_BETWEEN_THE_RENAMES, str(folder)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not folder.exists()
    assert dataset.exists()
    assert content(dataset.load()) == {"a": "1"}
    (left,) = folder.parent.glob(".out.*")
    new()
    assert not left.exists(), "the folder of a process that was killed is removed by the next one"


def test_a_kill_before_the_old_folder_was_removed_is_healed(dataset, save):
    save(a="1")
    previous = dataset.load().with_name(".out.previous")
    previous.mkdir()
    assert content(dataset.load()) == {"a": "1"}
    save(b="2")
    assert content(dataset.load()) == {"b": "2"}
    assert not previous.exists()


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a dataset of the catalog": (
        "06_models/adapters",
        lambda folder: path_of(DataCatalog({"a": FolderDataset(filepath=str(folder))}), "a"),
    ),
    "the parameter adapter": ("06_models/adapters", lambda folder: find_adapters(str(folder), Path("none"))),
    "its best step": ("06_models/adapters", lambda folder: find_adapters(f"{folder}/best", Path("none"))),
    "the digest of a base model": ("06_models/base", content_digest),
    "the parameter resume": ("06_models/checkpoints.previous", lambda folder: find_run(str(folder), Path("none"))),
    "the parameter score.path": (
        "07_model_output/generated",
        lambda folder: find_records(DataConfig(path=str(folder), height=64, width=64)),
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_finds_what_a_kill_between_the_two_renames_has_hidden(tmp_path, reader):
    name, read = READERS[reader]
    folder = tmp_path / name
    save_checkpoint(folder, 1, {}, {})
    (folder / "best").mkdir()
    (folder / "prompts.txt").write_text("a cat")
    folder.rename(folder.with_name(f".{folder.name}.previous"))
    assert read(folder) is not None
    assert (folder / "prompts.txt").is_file()


def test_a_reader_between_the_two_renames_does_not_stop_the_replacement(dataset, save, monkeypatch):
    save(a="1")
    rename, folder = Path.rename, dataset.load()

    def read_between(self, target):
        renamed = rename(self, target)
        if self == folder:
            assert content(settled(folder)) == {"a": "1"}
            monkeypatch.setattr(Path, "rename", rename)
        return renamed

    monkeypatch.setattr(Path, "rename", read_between)
    save(b="2")
    assert content(dataset.load()) == {"b": "2"}
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_the_new_folder_of_a_living_process_is_left_alone_and_has_a_name_of_its_own(new):
    """Also where it has the number of this process, as in another container."""
    other = new()
    assert new() != other
    assert other.is_dir()


def test_an_unsaved_folder_goes_when_the_process_ends(tmp_path):
    code = "from pathlib import Path; from visual_grpo.common.files import new_folder; print(new_folder(Path('out')))"
    folder = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    assert Path(folder.strip()).parent == Path()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_open_to_whom_the_umask_lets_in(dataset, save):
    save()
    usual = dataset.load().parent / "usual"
    usual.mkdir()
    assert dataset.load().stat().st_mode == usual.stat().st_mode


@pytest.mark.parametrize(
    ("data", "got"), [(print, "function print"), ("a/folder", "'a/folder'"), (Path("no/such"), "no/such")]
)
def test_anything_but_a_folder_is_refused(dataset, save, data, got):
    save(a="1")
    with pytest.raises(UserError, match=f"expected the path of the folder that the node filled, .*{got}"):
        dataset.save(data)
    dataset.save(dataset.load())
    assert content(dataset.load()) == {"a": "1"}, "a folder may be saved in its own place"


def test_the_preview_is_the_first_picture_that_matches(dataset, new):
    folder = new()
    for name, colour in (("b", "blue"), ("a", "red")):
        Image.new("RGB", (4, 4), colour).save(folder / f"{name}.png")
    first = (folder / "a.png").read_bytes()
    dataset.save(folder)
    assert base64.b64decode(dataset.preview("*.png")) == first
    with pytest.raises(UserError, match=r"has no other\.png"):
        dataset.preview("other.png")


def test_rows_are_loaded_as_records_and_previewed_as_a_table(records, tmp_path):
    row = {"prompt": "a cat", "split": "eval", "target_image": "images/a.png", "source_images": ["images/b.png"]}
    write_manifest(tmp_path / "records.parquet", (row | {"id": name, "metadata": '{"k": 1}'} for name in "abc"))
    _, record, _ = records.load()
    assert record.target_image == tmp_path / "images/a.png"
    assert record.source_images == (tmp_path / "images/b.png",)
    assert record.metadata == {"k": 1}
    assert records.exists()
    preview = records.preview(nrows=2)
    assert json.loads(json.dumps(preview)) == preview
    assert [dict(zip(preview["columns"], row, strict=True))["id"] for row in preview["data"]] == ["a", "b"]
