"""Videos as targets: files, animations and folders of frames, at the frames a second that the data ask for."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from tests.data.clips import GREYS, SIZE, clip, frames
from tests.data.making import data_config, jsonl, picture, prepare
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import VideoSample
from visual_grpo.common.videos import encoded_video, read_frames, read_sample
from visual_grpo.data.drift import profile_of
from visual_grpo.data.preparation import remove_unused_images
from visual_grpo.data.record import Rejected
from visual_grpo.data.sources import find_records
from visual_grpo.data.video_frames import read_clip

FRAMES: dict[str, Any] = {"frames": 5, "fps": 8.0}


def greys(target: Path | None) -> list[int]:
    assert target is not None
    sample = read_sample(target, 8.0)
    assert sample.frames.shape == (len(sample.frames), 3, 32, 64)
    return [round(float(frame.float().mean())) for frame in sample.frames]


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".avi", ".mov", ".webp", ".gif", ""])
@pytest.mark.parametrize(("fps", "shown"), [(8.0, (0, 1, 2, 3, 4)), (4.0, (0, 2, 4, 6, 8)), (16.0, (0, 0, 1, 1, 2))])
def test_the_frames_are_those_shown_at_the_times_asked_for(
    tmp_path: Path, suffix: str, fps: float, shown: tuple[int, ...]
) -> None:
    clip(tmp_path / f"data/cat{suffix}")
    (tmp_path / "data/cat.txt").write_text("a cat walks", encoding="utf-8")
    [record] = prepare(tmp_path, frames=5, fps=fps)
    assert record.prompt == "a cat walks"
    # The pictures of a folder have no times: they are as many a second as the data ask for.
    expected = range(5) if suffix == "" else shown
    assert greys(record.target_image) == pytest.approx([GREYS[row] for row in expected], abs=4)


def test_a_folder_of_ten_clips_with_prompts_is_read_at_the_first_try(tmp_path: Path) -> None:
    for number in range(10):
        clip(tmp_path / f"data/{number}.mp4", GREYS[number % 3 :])
        (tmp_path / f"data/{number}.txt").write_text(f"clip {number}", encoding="utf-8")
    records = prepare(tmp_path, **FRAMES, held_out_share=0.2)
    assert len(records) == 10
    assert len(list(profile_of(records).values)) > 3
    folder = tmp_path / "out/images"
    before = sorted(folder.glob("*/*.png"))
    assert len(before) == 50
    (folder / "unused").mkdir()
    remove_unused_images(records.path)
    assert sorted(folder.glob("*/*.png")) == before
    assert not (folder / "unused").exists()


def test_records_name_files_and_folders(tmp_path: Path) -> None:
    clip(tmp_path / "data/a.mp4")
    clip(tmp_path / "data/b")
    jsonl(tmp_path / "data/records.jsonl", [{"prompt": name, "target_image": name} for name in ("a.mp4", "b")])
    first, second = (greys(record.target_image) for record in prepare(tmp_path, **FRAMES))
    assert first == pytest.approx(second, abs=4)


def test_of_records_of_one_id_and_video_the_first_is_used(tmp_path: Path) -> None:
    """They are prepared at once, in threads."""
    for name in "abcdefgh":
        clip(tmp_path / f"data/{name}")
    names = [name for name in "abcdefgh" for _ in range(2)]
    jsonl(tmp_path / "data/records.jsonl", [{"id": name, "prompt": name, "target_image": name} for name in names])
    records = prepare(tmp_path, frames=10, fps=8)
    assert [len(greys(record.target_image)) for record in records] == [10] * 8
    assert records.report["rejected"]["by_reason"] == {"duplicate_id": 8}


def test_a_table_names_videos(tmp_path: Path) -> None:
    clip(tmp_path / "data/a.mp4")
    for column in ("file_name", "video"):
        (tmp_path / "data/metadata.csv").write_text(f"{column},text\na.mp4,a cat\n", encoding="utf-8")
        [record] = prepare(tmp_path, **FRAMES)
        assert len(greys(record.target_image)) == 5


@pytest.mark.parametrize("atom", [b"mdat", b"wide", b"free", b"skip"])
def test_a_quicktime_file_need_not_begin_with_its_type(tmp_path: Path, atom: bytes) -> None:
    file = clip(tmp_path / "cat.mov")
    file.write_bytes(file.read_bytes().replace(b"ftyp", atom, 1))
    assert len(read_clip(file, data_config(tmp_path, **FRAMES)).pictures) == 5


@pytest.mark.parametrize(("count", "goes_on"), [(60, False), (62, True)])
def test_a_video_is_longer_where_it_ends_later(tmp_path: Path, count: int, goes_on: bool) -> None:
    """At 30 frames a second, one is left after that of the last of 32 times in 2 s."""
    file = clip(tmp_path / "cat.mp4", range(count), fps=30)
    assert read_clip(file, data_config(tmp_path, frames=32, fps=16)).goes_on == goes_on


def pages(file: Path) -> None:
    first, *others = frames()
    first.save(file, save_all=True, append_images=others)


@pytest.mark.parametrize("suffix", [".gif", ".png", ".webp", ".avif"])
@pytest.mark.parametrize(
    ("milliseconds", "shown"),
    [([100, 0, 10, 20, 100, 100], (0, 1, 2, 4, 5)), ([0] * 11, (0, 1, 2, 3, 4)), ([20] * 11, (1, 6))],
    ids=["mixed", "none", "short"],
)
def test_frames_of_hardly_any_time_are_shown_as_browsers_show_them(
    tmp_path: Path, suffix: str, milliseconds: list[int], shown: tuple[int, ...]
) -> None:
    first, *others = frames(GREYS[: len(milliseconds)])
    file = tmp_path / f"cat{suffix}"
    first.save(file, save_all=True, append_images=others, duration=milliseconds, loop=0)
    found = read_clip(file, data_config(tmp_path, frames=len(shown), fps=10)).pictures
    assert [int(np.asarray(each)[0, 0, 0]) for each in found] == pytest.approx([GREYS[row] for row in shown], abs=4)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a still image": (lambda folder: picture(folder / "cat.png"), "cat.png is a still image, and data.frames asks for"),
    "a short video": (
        lambda folder: clip(folder / "cat.mp4", GREYS[:3]),
        "has 3 frames at 8 a second, fewer than",
    ),
    "a slow video": (lambda folder: clip(folder / "cat.mp4", fps=1), "cat.mp4 shows one picture for the 0.625 s"),
    "frames without times": (
        lambda folder: pages(folder / "cat.tif"),
        "the 11 frames of cat.tif have no times. Write it with times",
    ),
    "one frame": (lambda folder: clip(folder / "cat.mp4", GREYS[:1]), "cat.mp4 has 1 frame at 8 a second"),
    "an empty folder": (
        lambda folder: (folder / "cat").mkdir(),
        "the folder cat has no pictures",
    ),
    "a playlist": (
        lambda folder: (folder / "cat.mp4").write_text("#EXTM3U\n/etc/hostname\n"),
        "cat.mp4 is not an MP4, MOV, WebM, Matroska or AVI file",
    ),
    "a pointer": (
        lambda folder: (folder / "cat.mp4").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "is a Git LFS pointer, not the video",
    ),
    "a damaged file": (
        lambda folder: (folder / "cat.mp4").write_bytes(clip(folder / "whole.mp4").read_bytes()[:300]),
        "cat.mp4 has no frames that can be decoded",
    ),
    "an animation cut off": (
        lambda folder: (folder / "cat.webp").write_bytes(clip(folder / "whole.webp").read_bytes()[:200]),
        "cat.webp: cannot be read as an image",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_video_is_rejected_in_one_sentence(tmp_path: Path, name: str) -> None:
    make, told = BAD[name]
    (tmp_path / "data").mkdir()
    make(tmp_path / "data")
    for whole in (tmp_path / "data").glob("whole.*"):
        whole.unlink()
    [target] = [each.name for each in (tmp_path / "data").iterdir()]
    jsonl(tmp_path / "data/records.jsonl", [{"prompt": "a cat", "target_image": target}])
    with pytest.raises(UserError) as error:
        prepare(tmp_path, **FRAMES)
    assert told in str(error.value)


@pytest.mark.parametrize("suffix", [".mp4", ".gif", ""])
def test_too_many_pixels_are_told_before_they_are_decoded(tmp_path: Path, suffix: str) -> None:
    clip(tmp_path / f"data/cat{suffix}")
    (tmp_path / "data/cat.txt").write_text("a cat", encoding="utf-8")
    with pytest.raises(UserError, match=r"(cat\.\w+|0\.png) is 64x48 pixels, more than data\.max_pixels=2000"):
        prepare(tmp_path, **FRAMES, max_pixels=2000)


UPRIGHT, TURNED = (1, 0, 0, 1), (0, 1, -1, 0)


@pytest.mark.parametrize(
    ("matrix", "shown", "size"),
    [
        (UPRIGHT, (64, 48), (64, 48)),
        (UPRIGHT, (128, 48), (128, 48)),
        (UPRIGHT, (64, 96), (64, 96)),
        (UPRIGHT, (32, 48), (64, 96)),
        (TURNED, (128, 48), (48, 128)),
    ],
    ids=["square", "wide", "tall", "narrow", "turned"],
)
def test_pixels_that_are_not_square_are_shown_so(
    tmp_path: Path, matrix: tuple[int, ...], shown: tuple[int, int], size: tuple[int, int]
) -> None:
    """An MP4's track header ends with a matrix and the shown size, which OpenCV writes as they are in the frames."""

    def ending(matrix: tuple[int, ...], size: tuple[int, int]) -> bytes:
        a, b, c, d = (value << 16 for value in matrix)
        return struct.pack(">9i2I", a, b, 0, c, d, 0, 0, 0, 1 << 30, *(side << 16 for side in size))

    file = clip(tmp_path / "cat.mp4")
    content = file.read_bytes()
    assert content.count(ending(UPRIGHT, SIZE)) == 1
    file.write_bytes(content.replace(ending(UPRIGHT, SIZE), ending(matrix, shown)))
    assert {each.size for each in read_clip(file, data_config(tmp_path, **FRAMES)).pictures} == {size}
    with pytest.raises(Rejected, match=rf"is {size[0]}x{size[1]} pixels, more than"):
        read_clip(file, data_config(tmp_path, **FRAMES, max_pixels=size[0] * size[1] - 1))


@pytest.mark.parametrize("name", ["cat.mp4", "cat"])
def test_videos_without_the_parameter_are_named(tmp_path: Path, name: str) -> None:
    clip(tmp_path / name)
    (tmp_path / "cat.txt").write_text("a cat", encoding="utf-8")
    with pytest.raises(UserError, match=r"1 \.(mp4|txt).* Videos are read where data\.frames says how many frames"):
        find_records(data_config(tmp_path))


def test_videos_beside_pictures_are_named_where_the_parameter_is_not_set(tmp_path: Path) -> None:
    picture(tmp_path / "data/a.png").with_suffix(".txt").write_text("a cat", encoding="utf-8")
    clip(tmp_path / "data/cat.mp4")
    assert prepare(tmp_path).report["files"]["ignored"] == {"videos that no record names (data.frames is not set)": 1}
    jsonl(tmp_path / "data/records.jsonl", [{"prompt": "a cat", "target_image": "cat.mp4"}])
    with pytest.raises(UserError, match=r"cat\.mp4 is a video, and an image is expected\. Set data\.frames"):
        prepare(tmp_path)


def test_a_written_video_reads_back_bit_for_bit_though_frames_are_alike(tmp_path: Path) -> None:
    noise = torch.randint(0, 256, (4, 3, 32, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    for rows in ([0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]):
        frames = noise[torch.tensor(rows)]
        (tmp_path / "video.webp").write_bytes(encoded_video(VideoSample(frames=frames, fps=16.0)))
        assert torch.equal(read_frames(tmp_path / "video.webp", 4), frames)
        assert torch.equal(read_frames(tmp_path / "video.webp", 2), frames[[1, 3]])


@pytest.mark.parametrize("suffix", [".webp", ".mp4"])
def test_a_video_that_stands_still_stays_a_video(tmp_path: Path, suffix: str) -> None:
    """A generated one is scored, for its motion above all."""
    if suffix == ".webp":
        (tmp_path / "data").mkdir()
        still = VideoSample(frames=torch.full((5, 3, 40, 40), 90, dtype=torch.uint8), fps=8.0)
        (tmp_path / "data/cat.webp").write_bytes(encoded_video(still))
    else:
        clip(tmp_path / "data/cat.mp4", [90] * 5)
    (tmp_path / "data/cat.txt").write_text("a cat that sleeps", encoding="utf-8")
    [record] = prepare(tmp_path, **FRAMES)
    assert greys(record.target_image) == pytest.approx([90] * 5, abs=4)


def test_no_more_of_an_animation_is_decoded_than_its_frames(tmp_path: Path) -> None:
    """What is not read may be damaged."""
    whole = clip(tmp_path / "cat.gif")
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size * 7 // 10])
    assert len(read_clip(whole, data_config(tmp_path, **FRAMES)).pictures) == 5
    with pytest.raises(Rejected, match=r"fewer than|cannot be read"):
        read_clip(whole, data_config(tmp_path, frames=11, fps=8))


def test_frames_are_files_that_are_used_and_a_video_of_another_shape_is_named(tmp_path: Path) -> None:
    clip(tmp_path / "data/cat")
    (tmp_path / "data/cat.txt").write_text("a cat", encoding="utf-8")
    (tmp_path / "data/cat/notes.md").touch()
    report = prepare(tmp_path, **FRAMES, width=256).report
    assert (report["files"]["found"], report["files"]["used"], report["files"]["listed"]) == (13, 12, ["cat/notes.md"])
    assert report["warnings"] == [
        "1 video (such as cat) of a different shape: more than a third is cropped away",
        "1 video (such as cat) smaller than the prepared size: enlarged",
        "1 video (such as cat) longer than data.frames=5 at data.fps=8: the rest is not used",
    ]


@pytest.mark.parametrize("fps", [12.0, 15.0, 24.0, 30.0, 60.0])
def test_a_long_written_video_keeps_its_times(tmp_path: Path, fps: float) -> None:
    frames = torch.arange(81, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8) * 3
    (tmp_path / "video.webp").write_bytes(encoded_video(VideoSample(frames=frames, fps=fps)))
    read = read_clip(tmp_path / "video.webp", data_config(tmp_path, frames=81, fps=fps)).pictures
    assert [np.asarray(picture)[0, 0, 0] for picture in read] == [3 * number for number in range(81)]


def test_frames_of_a_varying_rate_are_taken_at_their_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As phones and screen recorders write them: OpenCV cannot, so its reader gives such times here."""
    seconds = [0.0, 0.5, 1.0, 1.5, *(2 + number / 8 for number in range(1, 8))]

    class Varying:
        def __init__(self, *file: object) -> None:
            self.whole, self.number = real(*file), -1

        def read(self) -> object:
            self.number += 1
            return self.whole.read()

        def get(self, name: int) -> float:
            if name == cv2.CAP_PROP_POS_MSEC:
                return 1000 * seconds[min(self.number, len(seconds) - 1)]
            return self.whole.get(name)

        def release(self) -> None:
            self.whole.release()

    real = cv2.VideoCapture
    monkeypatch.setattr(cv2, "VideoCapture", Varying)
    pictures = read_clip(clip(tmp_path / "a.mp4"), data_config(tmp_path, frames=9, fps=8)).pictures
    found = [int(np.asarray(picture)[0, 0, 0]) for picture in pictures]
    assert found == pytest.approx([20, 20, 20, 20, 40, 40, 40, 40, 60], abs=4)
