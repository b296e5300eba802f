"""Reads the frames of a dataset's videos: files, animations, and folders of pictures.

Frames are taken at ``data.fps`` from the beginning; each is the picture that is shown at its time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import cv2
from PIL import Image

from visual_grpo.common.digests import file_digest
from visual_grpo.common.errors import counted
from visual_grpo.common.images import ImageError, opened, read_image, read_size, stretch
from visual_grpo.common.videos import animated
from visual_grpo.config import DataConfig
from visual_grpo.data.media import is_video, is_video_content
from visual_grpo.data.record import LFS_REMEDY, EmbeddedImage, Original, Rejected, is_image_name, is_lfs_pointer

_REMEDY = "Replace the video or remove the record"
_TIMED = ("GIF", "PNG", "WEBP", "AVIF")
"""Formats of animations; those with several pictures without times, such as TIFF, are none."""
_LATE = 0.25
"""Part of a frame by which pictures are taken late: times in files are rounded."""


class Clip(NamedTuple):
    pictures: list[Image.Image]
    goes_on: bool
    """The video is longer than these pictures are shown."""


def read_clip(video: Original, data: DataConfig) -> Clip:
    """Reads ``data.frames`` RGB pictures of a video file, an animation, or a folder of pictures in order of name and
    number.

    A folder's pictures are ``data.fps`` a second. Raises Rejected for a still image, for a video that is damaged, too
    large or too short, and for one that moves too slowly to be seen.
    """
    assert data.frames is not None
    goes_on = has_more = False
    try:
        shown: Iterator[tuple[Image.Image, float]]
        if isinstance(video, Path) and video.is_dir():
            shown = ((_read_frame(file, data), 1 / data.fps) for file in _pictures(video))
        elif is_image_name(video.name) if isinstance(video, Path) else not is_video(video):
            shown = _animation(video, data)
        else:
            shown = _decoded(video, data) if isinstance(video, Path) else _decoded_copy(video, data)
        pictures, end = _at_times(shown, data)
        with suppress(ImageError, Rejected):  # What is not used may be damaged.
            for _, seconds in shown:
                has_more, end = True, end + seconds
                if goes_on := end > (data.frames + _LATE) / data.fps:
                    break
    except ImageError as error:
        raise Rejected("corrupt_video", str(error), _REMEDY) from error
    if len(pictures) < data.frames:
        has = f"{counted(len(pictures), 'frame')} at {data.fps:g} a second"
        message = f"{video.name} has {has}, fewer than data.frames={data.frames}"
        raise Rejected("video_too_short", message, "Lower data.frames, raise data.fps, or remove the record")
    if has_more and len(set(map(id, pictures))) == 1 < data.frames:
        message = f"{video.name} shows one picture for the {data.frames / data.fps:.3g} s that data.frames last"
        raise Rejected("still_video", message, "Lower data.fps, or remove the record")
    return Clip(pictures, goes_on)


def clip_digest(video: Path) -> str:
    """Returns the sha256 of the bytes of a file, or of a folder's pictures, 64 hex digits."""
    if not video.is_dir():
        return file_digest(video)
    return hashlib.sha256("".join(map(file_digest, _pictures(video))).encode()).hexdigest()


def _pictures(folder: Path) -> list[Path]:
    files = sorted((file for file in folder.iterdir() if is_image_name(file.name) and file.is_file()), key=_by_number)
    if not files:
        raise Rejected("video_without_frames", f"the folder {folder.name} has no pictures", _REMEDY)
    return files


def _by_number(file: Path) -> list[tuple[int, str]]:
    """Sorts frame_2 before frame_10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", file.name)]


def _at_times(shown: Iterator[tuple[Image.Image, float]], data: DataConfig) -> tuple[list[Image.Image], float]:
    """Returns ``data.frames`` pictures, or fewer, and the end (seconds) of the last.

    ``shown``: pictures, and how many seconds each is shown.
    """
    pictures: list[Image.Image] = []
    end = 0.0
    for picture, seconds in shown:
        end += seconds
        while len(pictures) < (data.frames or 0) and (len(pictures) + _LATE) / data.fps < end:
            pictures.append(picture)
        if len(pictures) == data.frames:
            break
    return pictures, end


def require_pixels(name: object, size: tuple[int, int], data: DataConfig) -> None:
    """Raises Rejected for more pixels, (width, height), than ``data.max_pixels``."""
    if size[0] * size[1] > data.max_pixels:
        message = f"{name} is {size[0]}x{size[1]} pixels, more than data.max_pixels={data.max_pixels}"
        raise Rejected("too_many_pixels", message, "Scale it down, raise data.max_pixels or remove the record")


def _read_frame(file: Path, data: DataConfig) -> Image.Image:
    require_pixels(file.name, read_size(file), data)
    return read_image(file)


def _animation(file: Original, data: DataConfig) -> Iterator[tuple[Image.Image, float]]:
    """Yields pictures while they are asked for: long ones would fill the memory."""
    content = file if isinstance(file, Path) else file.open()
    require_pixels(file.name, read_size(content), data)
    with opened(content) as image:
        has_times = image.format in _TIMED and getattr(image, "is_animated", False)
    durations = []
    for picture, milliseconds in animated(content):
        if has_times and milliseconds <= 10:
            milliseconds = 100  # As browsers show it, which follow Firefox (WebKit's bug 36082).
        durations.append(milliseconds)
        yield picture, milliseconds / 1000
    if not any(durations) and len(durations) == 1:
        message = f"{file.name} is a still image, and data.frames asks for videos"
        raise Rejected("still_image", message, "Give a video, an animation or a folder of frames, or unset data.frames")
    if not any(durations):
        message = f"the {len(durations)} frames of {file.name} have no times"
        raise Rejected("video_without_times", message, "Write it with times, or give a folder of its frames")


def _decoded_copy(video: EmbeddedImage, data: DataConfig) -> Iterator[tuple[Image.Image, float]]:
    """Decodes a video in a table from a file, which FFmpeg needs."""
    with NamedTemporaryFile() as copy:
        copy.write(video.data)
        copy.flush()
        yield from _decoded(Path(copy.name), data, video.name)


def _decoded(file: Path, data: DataConfig, name: str | None = None) -> Iterator[tuple[Image.Image, float]]:
    """Decodes by OpenCV's FFmpeg. Only files that begin as a container of video are opened: FFmpeg would follow a
    playlist to other files. ``name`` is for messages."""
    name = name or file.name
    with file.open("rb") as start:
        head = start.read(12)
    if not is_video_content(head):
        if is_lfs_pointer(file):
            raise Rejected("lfs_pointer", f"{file} is a Git LFS pointer, not the video", LFS_REMEDY)
        raise Rejected("corrupt_video", f"{name} is not an MP4, MOV, WebM, Matroska or AVI file", _REMEDY)
    capture = cv2.VideoCapture(str(file), cv2.CAP_FFMPEG)
    try:
        fps = capture.get(cv2.CAP_PROP_FPS)
        width, height = (int(capture.get(side)) for side in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
        aspect = _pixel_aspect(capture)
        width, height = max(width, round(width * aspect)), max(height, round(height / aspect))
        require_pixels(name, (width, height), data)
        last: tuple[Image.Image, float] | None = None
        while fps > 0:
            read, frame = capture.read()
            time = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000  # Of this frame: rates vary, as on phones.
            if last is not None:
                yield last[0], time - last[1] if read and time > last[1] else 1 / fps
            if not read:
                break
            picture = Image.fromarray(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB))
            last = picture if aspect == 1 else stretch(picture, height, width), time
    finally:
        capture.release()
    if last is None:
        raise Rejected("video_without_frames", f"{name} has no frames that can be decoded", _REMEDY)


def _pixel_aspect(capture: cv2.VideoCapture) -> float:
    """Returns width / height of a pixel as it is shown, as of DVDs and camcorders; 1 where the file does not say."""
    width, height = (capture.get(side) for side in (cv2.CAP_PROP_SAR_NUM, cv2.CAP_PROP_SAR_DEN))
    if width <= 0 or height <= 0:
        return 1
    # The file's are of a frame before OpenCV turns it.
    return height / width if capture.get(cv2.CAP_PROP_ORIENTATION_META) % 180 else width / height
