"""Videos as files: a lossless, looping WebP of every frame.

The encoder merges equal neighbouring frames into a longer one, so frames are read by time, not by number.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO

import torch
from PIL import Image, ImageSequence
from torch import Tensor

from visual_grpo.common.images import is_image, opened, read_image, to_pil, to_rgb, to_tensor
from visual_grpo.common.types import Sample, VideoSample

SUFFIX = ".webp"


def frames_of(sample: Sample) -> Tensor | None:
    """[F, 3, height, width] uint8: the frames of a video, or an image as the only one; None for a text."""
    if isinstance(sample, VideoSample):
        return sample.frames
    return sample[None] if is_image(sample) else None


def frame_name(video: Path, frame: int) -> Path:
    """Returns the file of a frame of a video that is stored as a folder of frames."""
    return video / f"{frame:04d}.png"


def read_sample(prepared: Path, fps: float) -> Sample:
    """Reads a prepared target as a sample: an image, or a video of ``fps`` from its folder of frames."""
    if not prepared.is_dir():
        return to_tensor(read_image(prepared))
    frames = torch.stack([to_tensor(read_image(file)) for file in sorted(prepared.iterdir())])
    return VideoSample(frames=frames, fps=fps)


def encoded_video(video: VideoSample) -> bytes:
    """Returns the content of a lossless WebP that plays in a loop, also where its frames are one picture."""
    file = io.BytesIO()
    ends = [int(1000 * end / video.fps) for end in range(len(video.frames) + 1)]  # Rounded durations would add up.
    first, *others = map(to_pil, video.frames)
    first.save(
        file,
        "WEBP",
        save_all=True,
        append_images=others,
        duration=[end - start for start, end in pairwise(ends)],
        loop=0,
        lossless=True,
        quality=0,  # Of a lossless file: how hard it is made smaller.
        method=0,
    )
    content = file.getvalue()
    is_still = content[12:16] == b"VP8L"  # Of an animation, an extended header comes first.
    return _one_frame(content, first.size, ends[-1]) if is_still else content


def _one_frame(still: bytes, size: tuple[int, int], milliseconds: int) -> bytes:
    """Makes an animation of one frame of a still WebP, as its container (RFC 9649) has it: libwebp's encoder, as in
    Pillow and OpenCV, writes none."""

    def number(value: int) -> bytes:
        return value.to_bytes(3, "little")

    def chunk(name: bytes, content: bytes) -> bytes:
        return name + len(content).to_bytes(4, "little") + content

    sides = b"".join(number(side - 1) for side in size)
    frame = bytes(6) + sides + number(milliseconds) + b"\2" + still[12:]  # At (0, 0), not blended.
    header = chunk(b"VP8X", b"\2" + bytes(3) + sides)  # With an animation.
    return chunk(b"RIFF", b"WEBP" + header + chunk(b"ANIM", bytes(6)) + chunk(b"ANMF", frame))


def read_frames(file: Path, count: int) -> Tensor:
    """[count, 3, height, width] uint8: the pictures at ``count`` times that divide the length of an animation evenly;
    a still image is the same at all of them. Raises ImageError for a file that cannot be read."""
    pictures, durations = read_animation(file)
    ends = torch.tensor(durations).cumsum(0)
    times = (torch.arange(count) + 0.5) * (ends[-1] / count)
    rows = torch.searchsorted(ends.to(times), times, right=True).clamp(max=len(pictures) - 1)
    shown = torch.stack([to_tensor(picture) for picture in pictures])
    return shown[rows]


def read_animation(file: Path) -> tuple[list[Image.Image], list[int]]:
    """Returns the pictures of an animation (RGB), and the milliseconds that each is shown; 0 of a still image."""
    pictures, durations = zip(*animated(file), strict=True)
    return list(pictures), list(durations)


def animated(file: Path | IO[bytes]) -> Iterator[tuple[Image.Image, int]]:
    """Yields what `read_animation` returns, a picture at a time."""
    with opened(file) as image:
        for frame in ImageSequence.Iterator(image):
            yield to_rgb(frame.copy()), int(frame.info.get("duration", 0))
