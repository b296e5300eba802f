"""Records cannot leave the data's folder, and files that are no files are never opened."""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.data.making import data_config, embedded, jsonl, parquet, picture, prepare
from visual_grpo.common.errors import UserError
from visual_grpo.data import archives
from visual_grpo.operations.preflight.findings import OF_A_RECORD, look_at_folder


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
    "../data2/c.png",
)
INSIDE = ("deep/../a.png", "../data/a.png", "{data}/a.png", "inner.png", "./a.png")


class TestRecordsFile:
    @pytest.mark.parametrize("key", ["target_image", "source_image"])
    def test_no_record_leaves_the_folder_unless_it_is_allowed(self, tmp_path, data, key):
        picture(tmp_path / "data2/c.png")
        names = [name.format(private=tmp_path / "private", data=data) for name in (*INSIDE, *OUTSIDE)]
        jsonl(data / "records.jsonl", [{"prompt": f"p{n}", key: name} for n, name in enumerate(names)])
        listed = prepare(tmp_path, task="mixed").report["rejected"]["listed"]
        assert [(entry["line"], entry["reason"]) for entry in listed] == [(n, "outside_folder") for n in range(6, 12)]
        assert all(f"leads outside the data's folder, {data}" in entry["message"] for entry in listed)
        assert all("data.allow_outside=true" in entry["remedy"] for entry in listed)
        assert len(prepare(tmp_path, task="mixed", allow_outside=True)) == 11

    def test_the_folder_may_be_a_link_itself(self, tmp_path, data):
        rows = [{"prompt": name, "target_image": f"{name}.png"} for name in ("a", "link")]
        jsonl(data / "records.jsonl", rows)
        (tmp_path / "linked").symlink_to(data)
        for path in ("linked", "linked/records.jsonl"):
            assert rejected(tmp_path, path=str(tmp_path / path)) == [(2, "outside_folder")]

    @pytest.mark.parametrize(
        ("entry", "link", "is_inside"),
        [
            ("datasets--a--b", "../../blobs/1", True),
            ("models--a--b", "../../blobs/1", True),
            ("models--a--b", "../../refs/1", False),
            ("models--a--b", "../0/1", False),
            ("models--a--b", "../../../datasets--a--b/blobs/1", False),
            ("models--a--b", "../../blobs/secret.png", False),
            ("of no hub", "../../blobs/1", False),
        ],
    )
    @pytest.mark.parametrize("below", ["", "train"])
    def test_files_of_a_snapshot_may_be_links_to_the_blobs_beside_it(
        self, tmp_path, data, entry, link, is_inside, below
    ):
        for place in (f"{entry}/blobs", f"{entry}/refs", f"{entry}/snapshots/0", "datasets--a--b/blobs"):
            picture(tmp_path / f"hub/{place}/1.png").rename(tmp_path / f"hub/{place}/1")
        (tmp_path / f"hub/{entry}/blobs/secret.png").symlink_to(tmp_path / "private/secret.png")
        folder = picture(tmp_path / f"hub/{entry}/snapshots/abc/{below}/own.png").parent
        (folder / "1.png").symlink_to(("../" if below else "") + link)
        jsonl(folder / "records.jsonl", [{"prompt": name, "target_image": f"{name}.png"} for name in ("own", "1")])
        assert rejected(tmp_path, path=str(folder)) == ([] if is_inside else [(2, "outside_folder")])

    def test_no_frame_of_a_clip_leaves_the_folder(self, tmp_path, data):
        for number in range(5):
            picture(data / f"inside/{number}.png")
            link = data / f"clip/{number}.png"
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(tmp_path / "private/secret.png")
        jsonl(data / "records.jsonl", [{"prompt": name, "target_image": name} for name in ("clip", "inside")])
        assert rejected(tmp_path, frames=5)[0] == (1, "outside_folder")

    def test_a_records_file_that_leads_outside_is_refused_unless_the_user_has_named_it(self, tmp_path, data):
        jsonl(tmp_path / "private/own.jsonl", [{"prompt": "my diary"}])
        (data / "records.jsonl").symlink_to(tmp_path / "private/own.jsonl")
        with pytest.raises(UserError, match=r"records\.jsonl leads outside .* set data\.allow_outside=true"):
            prepare(tmp_path)
        for changes in ({"path": str(data / "records.jsonl")}, {"allow_outside": True}):
            assert [record.prompt for record in prepare(tmp_path, **changes)] == ["my diary"]

    def test_the_check_before_the_run_says_it(self, data):
        jsonl(data / "records.jsonl", [{"prompt": "a", "target_image": "../private/secret.png"}])
        [problem] = look_at_folder(data_config(data), OF_A_RECORD).problems
        message = str(problem)
        assert "No record can be used. 1 record rejected:" in message
        assert "set data.allow_outside=true if you trust these records" in message


class TestOtherLayouts:
    def test_captions(self, tmp_path, data):
        (tmp_path / "private/secret.txt").write_text("my diary")
        for name in ("deep/b", "link", "inner"):
            (data / name).with_suffix(".txt").write_text("a caption")
        (data / "a.txt").symlink_to(tmp_path / "private/secret.txt")
        with pytest.raises(UserError, match=r"folder leads outside .* set data\.allow_outside=true"):
            prepare(tmp_path)
        prompts = [record.prompt for record in prepare(tmp_path, allow_outside=True)]
        assert sorted(prompts) == ["a caption", "a caption", "a caption", "my diary", "my diary"]
        (data / "folder").unlink()
        assert rejected(tmp_path) == [(name, "outside_folder") for name in ("a.png", "link.png")]

    @pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
    def test_image_folders(self, tmp_path, data, name):
        rows = [{"file_name": "b.png", "text": "a"}, {"file_name": "../../private/secret.png", "text": "b"}]
        for folder in ("data/deep", "private"):
            jsonl(tmp_path / folder / name, rows)
            if name.endswith("csv"):
                lines = ["file_name,text", *(",".join(row.values()) for row in rows)]
                (tmp_path / folder / name).write_text("\n".join(lines))
        (data / "folder").unlink()
        assert rejected(tmp_path) == [(2 + name.endswith("csv"), "outside_folder")]
        (data / name).symlink_to(tmp_path / "private" / name)
        with pytest.raises(UserError, match=rf"{name} leads outside"):
            prepare(tmp_path)

    def test_tables(self, tmp_path, data):
        (data / "folder").unlink()
        good = {"image": "../a.png", "problem": "a", "id": "m", "solution": "<box>(0,0),(39,39)</box>"}
        picture(data / "masks/m.png", colour="white")
        rows = [good, {**good, "id": "../../private/secret"}, {**good, "image": "../../private/secret.png"}]
        file = parquet(data / "data/train.parquet", rows)
        for path in (data, file):
            outside = rejected(tmp_path, task="segmentation", path=str(path))
            assert outside == [(2, "outside_folder"), (3, "outside_folder")]
        file.rename(tmp_path / "private/train.parquet")
        file.symlink_to(tmp_path / "private/train.parquet")
        with pytest.raises(UserError, match=r"train\.parquet leads outside"):
            prepare(tmp_path, task="segmentation")

    def test_the_library_opens_no_file_whose_name_begins_that_of_a_table(self, tmp_path):
        parquet(tmp_path / "private/train.parquet", [{"text": "my diary"}])
        parquet(tmp_path / "data/a::b.parquet", [{"text": "a"}])
        (tmp_path / "data/a").symlink_to(tmp_path / "private/train.parquet")
        with pytest.raises(UserError, match="has :: in its name"):
            prepare(tmp_path)


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
    for layout in ("prompts", "image_folder"):
        with pytest.raises(UserError, match="no records found"):
            prepare(tmp_path, layout=layout)
    picture(data / "d.png").with_suffix(".txt").write_text("a dog")
    assert ("c.png", "empty_prompt") in rejected(tmp_path, layout="captions")


def test_the_limits_of_size_and_pixels_are_the_last_that_are_accepted(tmp_path, monkeypatch):
    size = picture(tmp_path / "data/a.png", (64, 40)).stat().st_size
    jsonl(tmp_path / "data/records.jsonl", [{"prompt": "a", "target_image": "a.png"}])
    assert len(prepare(tmp_path, max_file_mb=size / 1e6, max_pixels=64 * 40)) == 1
    with pytest.raises(UserError, match=r"more than data\.max_file_mb=.*raise data\.max_file_mb"):
        prepare(tmp_path, max_file_mb=(size - 1) / 1e6)
    with pytest.raises(UserError, match=r"a\.png is 64x40 pixels, more than data\.max_pixels=2559"):
        prepare(tmp_path, max_pixels=64 * 40 - 1)  # Also of an image that was prepared before.
    table = parquet(tmp_path / "table.parquet", [{"image": embedded(), "text": "a"}])
    with pytest.raises(UserError, match=r"table\.parquet, row 1, column image has .* MB, more than data\.max_file_mb="):
        prepare(tmp_path, path=table, max_file_mb=1e-5)
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 500)
    assert len(prepare(tmp_path, max_pixels=3000)) == 1
    with pytest.raises(UserError, match=r"too many pixels.*raise data\.max_pixels"):
        prepare(tmp_path, max_pixels=1024)


def zipped(file: Path, files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file


def says_another_size(file: Path, size: int) -> Path:
    """Changes what the directory of a zip says of the size of its last file."""
    content = bytearray(file.read_bytes())
    at = content.rindex(b"PK\1\2") + 24
    content[at : at + 4] = size.to_bytes(4, "little")
    file.write_bytes(content)
    return file


PROMPTS = {"prompts.txt": b"a cup\na jug\n"}
FULL = shutil.disk_usage("/")._replace(free=1000)


def damaged(file: Path) -> Path:
    """Breaks the packed data of the first file, whose name ``x`` ends at byte 31."""
    content = bytearray(file.read_bytes())
    content[31:35] = b"\xff" * 4
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    ("make", "limits", "said"),
    [
        (
            lambda file: zipped(file, {**PROMPTS, "x": bytes(20_000)}),
            {},
            r"times its own size, more than data\.max_zip_ratio=10",
        ),
        (lambda file: zipped(file, {**PROMPTS, "x": b"", "y": b""}), {"max_zip_files": 2}, "3 files, more than .*=2"),
        (lambda file: zipped(file, {**PROMPTS, "x": os.urandom(2000)}), {}, "has 0 MB left"),
        (lambda file: zipped(file, PROMPTS, zipfile.ZIP_BZIP2), {}, "a method other than deflate"),
        (lambda file: zipped(file, PROMPTS, zipfile.ZIP_LZMA), {}, "a method other than deflate"),
        (lambda file: says_another_size(zipped(file, {**PROMPTS, "x": bytes(20_000)}), 5), {}, "cannot be unpacked"),
        (lambda file: damaged(zipped(file, {"x": bytes(500)})), {}, "cannot be unpacked"),
    ],
    ids=["ratio", "files", "disk", "bzip2", "lzma", "lie", "damaged"],
)
def test_a_zip_that_unpacks_to_too_much_is_refused_and_leaves_nothing(tmp_path, monkeypatch, make, limits, said):
    monkeypatch.setattr("datasets.config.EXTRACTED_DATASETS_PATH", str(tmp_path / "cache"))
    monkeypatch.setattr(archives, "_ALWAYS", 1000)
    remedy = "[uU]npack it yourself"
    if "left" in said:
        monkeypatch.setattr("shutil.disk_usage", lambda folder: FULL)
        remedy = "HF_HOME names a different disk"
    with pytest.raises(UserError, match=f"{said}.*{remedy}"):
        prepare(tmp_path, path=make(tmp_path / "a.zip"), **{"max_zip_ratio": 10, **limits})
    assert not [path for path in tmp_path.rglob("cache/**/*") if path.is_file() and path.suffix != ".lock"]


def test_of_commands_that_share_a_cache_one_unpacks_and_none_reads_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.EXTRACTED_DATASETS_PATH", str(tmp_path / "cache"))
    file = zipped(tmp_path / "a.zip", {f"{number}.txt": b"a cup" for number in range(10)})
    extract, unpacked = zipfile.ZipFile.extract, []

    def slowly(*arguments):
        unpacked.append(arguments[1].filename)
        time.sleep(0.01)
        return extract(*arguments)

    monkeypatch.setattr(zipfile.ZipFile, "extract", slowly)
    with ThreadPoolExecutor(2) as commands:
        folders = commands.map(lambda _: archives.unzipped(file, data_config(file)), range(2))
        assert [len([*folder.iterdir()]) for folder in folders] == [10, 10]
    assert len(unpacked) == 10


@pytest.mark.slow
def test_unpacked_zips_are_removed_by_make_clean(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.EXTRACTED_DATASETS_PATH", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/of datasets").touch()
    file = zipped(tmp_path / "a.zip", {"prompts.txt": b"a cup\n" * 10_000})  # Much more than its own size, and small.
    assert len(prepare(tmp_path, path=file)) == 10_000
    environment = {**os.environ, "HF_DATASETS_EXTRACTED_DATASETS_PATH": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-m", "visual_grpo.data.archives"], env=environment, check=True)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["of datasets"]


@pytest.mark.parametrize("kind", ["compressed", "sparse", "large"])
def test_what_a_tar_holds_is_no_more_than_a_file_may_have(tmp_path, kind):
    """Each has one good record and one of 20 MB."""
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data/a.tar", "w:gz" if kind == "compressed" else "w") as archive:
        for name, content in (("1.txt", b"a cup"), ("2.txt", b"a jug"), ("2.png", bytes(20_000_000))):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if kind == "sparse" and name == "2.png":
                member.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.size": "20000000", "GNU.sparse.map": "0,1"}
                member.size, content = 1, b"a"
            archive.addfile(member, io.BytesIO(content))
    if kind == "compressed":
        with pytest.raises(UserError, match=r"a\.tar cannot be read .*not an uncompressed tar"):
            prepare(tmp_path, max_file_mb=1)
    else:
        assert rejected(tmp_path, max_file_mb=1) == [(2, "file_too_large")]


def test_a_tar_whose_member_has_a_negative_size_ends(tmp_path):
    """Python's reader comes back to such a member for ever."""
    (tmp_path / "data").mkdir()
    first, second = tarfile.TarInfo("1.txt"), tarfile.TarInfo("2.txt")
    second.size = -tarfile.BLOCKSIZE
    headers = b"".join(member.tobuf(tarfile.GNU_FORMAT) for member in (first, second))
    (tmp_path / "data/a.tar").write_bytes(headers + bytes(tarfile.RECORDSIZE))
    with pytest.raises(UserError, match=r"a\.tar cannot be read .*2\.txt has a negative size"):
        prepare(tmp_path)
