"""Records cannot leave the data's folder, and files that are no files are never opened."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.records.making import jsonl, picture, prepare
from visual_grpo.config import DataConfig
from visual_grpo.errors import UserError
from visual_grpo.preflight.data import look_at_folder
from visual_grpo.records.guard import Guard


@pytest.fixture
def data(tmp_path):
    """A folder of data beside private pictures."""
    picture(tmp_path / "private/secret.png", colour="blue")
    picture(tmp_path / "data/a.png")
    picture(tmp_path / "data/deep/b.png")
    (tmp_path / "data/link.png").symlink_to(tmp_path / "private/secret.png")
    (tmp_path / "data/inner.png").symlink_to("deep/b.png")
    (tmp_path / "data/folder").symlink_to(tmp_path / "private")
    return tmp_path / "data"


def rejected(tmp_path, **changes):
    """(place, reason) of what was rejected of the records; all have a remedy."""
    listed = prepare(tmp_path, **changes).report["rejected"]["listed"]
    assert all(entry["remedy"] for entry in listed)
    return [(entry["line"] or entry["file"], entry["reason"]) for entry in listed]


OUTSIDE = (
    "../private/secret.png",
    "{private}/secret.png",
    "link.png",
    "folder/secret.png",
    "deep/../../private/secret.png",
)


class TestRecordsFile:
    @pytest.mark.parametrize("key", ["target_image", "source_image"])
    def test_no_record_leaves_the_folder_unless_it_is_allowed(self, tmp_path, data, key):
        names = ["a.png", *(name.format(private=tmp_path / "private") for name in OUTSIDE)]
        jsonl(data / "records.jsonl", [{"prompt": f"p{n}", key: name} for n, name in enumerate(names)])
        listed = prepare(tmp_path, task="mixed").report["rejected"]["listed"]
        assert [(entry["line"], entry["reason"]) for entry in listed] == [(n, "outside_folder") for n in range(2, 7)]
        assert all(f"leads outside the data's folder, {data}" in entry["message"] for entry in listed)
        assert all("data.allow_outside=true" in entry["remedy"] for entry in listed)
        assert len(prepare(tmp_path, task="mixed", allow_outside=True)) == 6

    @pytest.mark.parametrize("name", ["deep/../a.png", "../data/a.png", "{data}/a.png", "inner.png", "./a.png"])
    def test_a_path_that_ends_inside_is_accepted(self, tmp_path, data, name):
        jsonl(data / "records.jsonl", [{"prompt": "a", "target_image": name.format(data=data)}])
        assert len(prepare(tmp_path)) == 1

    def test_the_folder_may_be_a_link_itself(self, tmp_path, data):
        jsonl(
            data / "records.jsonl",
            [{"prompt": "a", "target_image": "a.png"}, {"prompt": "b", "target_image": "link.png"}],
        )
        (tmp_path / "linked").symlink_to(data)
        for path in ("linked", "linked/records.jsonl"):
            assert rejected(tmp_path, path=str(tmp_path / path)) == [(2, "outside_folder")]

    def test_a_folder_whose_name_begins_alike_is_outside(self, tmp_path, data):
        picture(tmp_path / "data2/c.png")
        rows = [{"prompt": "a"}, {"prompt": "b", "target_image": "../data2/c.png"}]
        jsonl(data / "records.jsonl", rows)
        assert rejected(tmp_path) == [(2, "outside_folder")]

    def test_a_records_file_that_leads_outside_is_refused_unless_the_user_has_named_it(self, tmp_path, data):
        jsonl(tmp_path / "private/own.jsonl", [{"prompt": "my diary"}])
        (data / "records.jsonl").symlink_to(tmp_path / "private/own.jsonl")
        with pytest.raises(UserError, match=r"records\.jsonl leads outside .* set data\.allow_outside=true"):
            prepare(tmp_path)
        for changes in ({"path": str(data / "records.jsonl")}, {"allow_outside": True}):
            assert [record.prompt for record in prepare(tmp_path, **changes)] == ["my diary"]

    def test_the_check_before_the_run_says_it(self, data):
        jsonl(data / "records.jsonl", [{"prompt": "a", "target_image": "../private/secret.png"}])
        found = look_at_folder(DataConfig.model_validate({"path": str(data), "height": 32, "width": 32}))
        assert "The only record was rejected" in found.problems[0]
        assert "set data.allow_outside=true if you trust these records" in found.problems[0]


class TestOtherLayouts:
    def test_captions(self, tmp_path, data):
        (tmp_path / "private/secret.txt").write_text("my diary")
        for name in ("a", "deep/b", "link", "inner"):
            (data / name).with_suffix(".txt").write_text("a caption")
        (data / "a.txt").unlink()
        (data / "a.txt").symlink_to(tmp_path / "private/secret.txt")
        with pytest.raises(UserError, match=r"folder leads outside .* set data\.allow_outside=true"):
            prepare(tmp_path)
        (data / "folder").rename(tmp_path / "folder")
        assert rejected(tmp_path) == [(name, "outside_folder") for name in ("a.png", "link.png")]
        (tmp_path / "folder").rename(data / "folder")
        prompts = [record.prompt for record in prepare(tmp_path, allow_outside=True)]
        assert sorted(prompts) == ["a caption", "a caption", "a caption", "my diary", "my diary"]

    @pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
    def test_image_folders(self, tmp_path, data, name):
        def write(folder):
            if name.endswith("csv"):
                (folder / name).write_text("file_name,text\nb.png,a\n../../private/secret.png,b\n")
            else:
                rows = [{"file_name": "b.png", "text": "a"}, {"file_name": "../../private/secret.png", "text": "b"}]
                jsonl(folder / name, rows)
            return folder / name

        line = 2 + name.endswith("csv")
        write(data / "deep")
        picture(tmp_path / "private/b.png")
        (data / "folder").unlink()
        assert rejected(tmp_path) == [(line, "outside_folder")]
        (data / name).symlink_to(write(tmp_path / "private"))
        with pytest.raises(UserError, match=rf"{name} leads outside"):
            prepare(tmp_path)

    def test_numbered_images(self, tmp_path, data):
        (data / "prompts.txt").write_text("zero\none\n")
        picture(data / "target_images/0.png")
        (data / "target_images/1.png").symlink_to(tmp_path / "private/secret.png")
        assert rejected(tmp_path) == [(2, "outside_folder")]

    def test_tables(self, tmp_path, data):
        (data / "folder").unlink()
        good = {"image": "../a.png", "problem": "a", "id": "m", "solution": "<box>(1,1),(9,9)</box>"}
        picture(data / "masks/m.png", colour="white")
        rows = [good, {**good, "id": "../../private/secret"}, {**good, "image": "../../private/secret.png"}]
        (data / "data").mkdir()
        pq.write_table(pa.Table.from_pylist(rows), data / "data/train.parquet")
        for path in (data, data / "data/train.parquet"):
            found = rejected(tmp_path, task="segmentation", path=str(path))
            assert found == [(2, "outside_folder"), (3, "outside_folder")]
        (data / "data/train.parquet").rename(tmp_path / "private/train.parquet")
        (data / "data/train.parquet").symlink_to(tmp_path / "private/train.parquet")
        with pytest.raises(UserError, match=r"train\.parquet leads outside"):
            prepare(tmp_path, task="segmentation")


def test_pipes_sockets_and_devices_are_not_opened(tmp_path, data, monkeypatch):
    """A pipe that is opened blocks for ever."""
    (data / "folder").unlink()
    monkeypatch.chdir(data)  # A socket's address must be short.
    for name in ("pipe.png", "c.txt", "prompts.txt", "deep/metadata.jsonl"):
        os.mkfifo(name)
    picture(data / "c.png")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.png")
    names = ["a.png", "pipe.png", "socket.png", "/dev/zero", "/dev"]
    jsonl(data / "records.jsonl", [{"prompt": f"p{n}", "target_image": name} for n, name in enumerate(names)])
    assert rejected(tmp_path, allow_outside=True) == [(line, "missing_target") for line in range(2, 6)]
    with pytest.raises(UserError, match="no records found"):
        prepare(tmp_path, layout="prompts")
    with pytest.raises(UserError, match="no records found"):
        prepare(tmp_path, layout="image_folder")
    picture(data / "d.png").with_suffix(".txt").write_text("a dog")
    assert ("c.png", "empty_prompt") in rejected(tmp_path, layout="captions")


def test_a_file_of_the_largest_size_is_accepted_and_no_larger_one(tmp_path):
    size = picture(tmp_path / "data/a.png").stat().st_size
    jsonl(tmp_path / "data/records.jsonl", [{"prompt": "a", "target_image": "a.png"}])
    assert len(prepare(tmp_path, max_file_mb=size / 1e6)) == 1
    with pytest.raises(UserError, match=r"more than data\.max_file_mb=.*raise data\.max_file_mb"):
        prepare(tmp_path, max_file_mb=(size - 1) / 1e6)


def test_an_image_of_the_most_pixels_is_accepted_and_none_of_more_even_if_it_was_prepared_before(tmp_path):
    picture(tmp_path / "data/a.png", (64, 40))
    jsonl(tmp_path / "data/records.jsonl", [{"prompt": "a", "target_image": "a.png"}])
    assert len(prepare(tmp_path, max_pixels=64 * 40)) == 1
    with pytest.raises(UserError, match=r"a\.png is 64x40 pixels, more than data\.max_pixels=2559"):
        prepare(tmp_path, max_pixels=64 * 40 - 1)


def test_more_pixels_than_pillow_accepts_can_be_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 500)
    picture(tmp_path / "data/a.png", (64, 40))
    jsonl(tmp_path / "data/records.jsonl", [{"prompt": "a", "target_image": "a.png"}])
    assert len(prepare(tmp_path, max_pixels=3000)) == 1
    with pytest.raises(UserError, match=r"too many pixels.*raise data\.max_pixels"):
        prepare(tmp_path, max_pixels=1024)


def test_a_guard_has_the_limits_of_the_configuration(tmp_path):
    config = {
        "path": str(tmp_path),
        "height": 32,
        "width": 32,
        "max_file_mb": 0.5,
        "max_pixels": 4096,
    }
    guard = Guard.of(DataConfig.model_validate(config), tmp_path)
    assert guard == Guard(folder=Path(tmp_path), max_file_bytes=500_000, max_pixels=4096)
