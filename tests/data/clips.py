"""Small videos for the tests, whose frames can be told apart by their grey."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

SIZE = (64, 48)
"""(width, height) in pixels."""
GREYS = tuple(range(20, 240, 20))


def frames(greys: Sequence[int] = GREYS) -> list[Image.Image]:
    return [Image.new("RGB", SIZE, (grey, grey, grey)) for grey in greys]


def clip(path: Path, greys: Sequence[int] = GREYS, fps: float = 8.0) -> Path:
    """Writes a video file, an animation or, without a suffix, a folder of frames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *others = frames(greys)
    if not path.suffix:
        path.mkdir()
        for number, frame in enumerate([first, *others]):
            frame.save(path / f"{number}.png")
    elif path.suffix in (".webp", ".gif"):
        first.save(path, save_all=True, append_images=others, duration=round(1000 / fps), loop=0, lossless=True)
    else:
        code = {".webm": "VP80", ".avi": "MJPG"}.get(path.suffix, "mp4v")
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*code), fps, SIZE)
        for frame in [first, *others]:
            writer.write(np.asarray(frame))
        writer.release()
    return path
