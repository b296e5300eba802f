"""Reads text in images with the models in rapidocr's wheel: offline, on one thread, loaded once per process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visual_grpo.errors import UserError

if TYPE_CHECKING:
    from onnxruntime import InferenceSession
    from rapidocr import RapidOCR

_LINE_HEIGHT = 48
"""Input height of the recogniser in pixels; the width is free."""
_BATCH = 16
_PAGE_SIDE = 320
"""Minimum pixels of the shorter side of the detector's input: enough for text of a tenth of the image's height."""
_BLANK = 0
"""The recogniser's CTC blank class."""


def read_line(images: Sequence[Tensor], line: tuple[float, float, float, float]) -> list[str]:
    """Reads the region ``line`` (top, left, bottom, right as shares) of each image, uint8 [3, height, width], as one
    line of text."""
    texts = [""] * len(images)
    by_size: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, image in enumerate(images):
        by_size[tuple(image.shape)].append(row)
    for rows in by_size.values():
        for start in range(0, len(rows), _BATCH):
            part = rows[start : start + _BATCH]
            read = _recognise(_cut(torch.stack([images[row] for row in part]), line))
            for row, text in zip(part, read, strict=True):
                texts[row] = text
    return texts


def read_page(image: Tensor) -> str:
    """All text found in an image, uint8 [3, height, width]: the lines joined by spaces."""
    found = _page_reader()(np.ascontiguousarray(image.flip(0).permute(1, 2, 0).cpu().numpy()))  # expects BGR
    return " ".join(getattr(found, "txts", None) or ())  # a result without text has another class, without txts


def _cut(images: Tensor, line: tuple[float, float, float, float]) -> Tensor:
    """Crops and scales uint8 [B, 3, height, width] to float32 [B, 3, 48, w] in -1..1, BGR; keeps the aspect ratio."""
    height, width = images.shape[-2:]
    top, left = round(line[0] * height), round(line[1] * width)
    bottom, right = max(round(line[2] * height), top + 1), max(round(line[3] * width), left + 1)
    part = images[:, :, top:bottom, left:right].float()
    size = (_LINE_HEIGHT, max(1, round(_LINE_HEIGHT * part.shape[3] / part.shape[2])))
    return F.interpolate(part, size, mode="bilinear", antialias=True).flip(1) / 127.5 - 1


def _recognise(lines: Tensor) -> list[str]:
    """Greedy CTC decoding: the most likely class of every column, repetitions merged, blanks removed."""
    session, characters = _line_reader()
    scores = session.run(None, {session.get_inputs()[0].name: lines.cpu().numpy()})[0]  # [B, columns, classes]
    texts = []
    for row in scores.argmax(-1):
        starts = np.flatnonzero(np.diff(row, prepend=_BLANK))
        texts.append("".join(characters[row[i]] for i in starts if row[i] != _BLANK))
    return texts


@cache
def _line_reader() -> tuple[InferenceSession, list[str]]:
    """The recogniser and its classes: blank, the characters in the model's metadata, space."""
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = InferenceSession(str(_model("rec")), options, providers=["CPUExecutionProvider"])
    characters = session.get_modelmeta().custom_metadata_map["character"].splitlines()
    return session, ["", *characters, " "]


@cache
def _page_reader() -> RapidOCR:
    from rapidocr import RapidOCR

    options = {
        "Global.log_level": "critical",
        "Global.use_cls": False,  # the classifier of upside-down lines
        "Det.model_path": str(_model("det")),  # explicit paths prevent downloads
        "Rec.model_path": str(_model("rec")),
        "Det.limit_side_len": _PAGE_SIDE,
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
    }
    return RapidOCR(params=options)


def _model(task: str) -> Path:
    folder = Path(str(files("rapidocr"))) / "models"
    found = sorted(folder.glob(f"*_{task}_*.onnx"))
    if not found:
        raise UserError(f"rapidocr has no {task} model in {folder}; the models are part of its wheel: reinstall it")
    return found[0]
