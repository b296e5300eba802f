"""Reads text off images with the models in rapidocr's wheel: offline, on one thread, loaded once per process."""

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
"""Pixels; the recogniser takes lines of any width."""
_BATCH = 16
_PAGE_SIDE = 320
"""The detector sees the image with its shorter side at least this long: enough for text that is a tenth of it."""
_BLANK = 0
"""The class of the recogniser that stands for no character (CTC)."""


def read_line(images: Sequence[Tensor], line: tuple[float, float, float, float]) -> list[str]:
    """Reads the part ``line`` (top, left, bottom, right, shares) of each uint8 [3, height, width] as one line."""
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
    """All text that is found in a uint8 [3, height, width], line by line, with spaces between."""
    found = _page_reader()(np.ascontiguousarray(image.flip(0).permute(1, 2, 0).cpu().numpy()))  # it wants BGR
    return " ".join(getattr(found, "txts", None) or ())  # another class where nothing was found


def _cut(images: Tensor, line: tuple[float, float, float, float]) -> Tensor:
    """uint8 [B, 3, height, width] -> float32 [B, 3, 48, w] in -1..1, BGR, in the part's own proportions."""
    height, width = images.shape[-2:]
    top, left = round(line[0] * height), round(line[1] * width)
    bottom, right = max(round(line[2] * height), top + 1), max(round(line[3] * width), left + 1)
    part = images[:, :, top:bottom, left:right].float()
    size = (_LINE_HEIGHT, max(1, round(_LINE_HEIGHT * part.shape[3] / part.shape[2])))
    return F.interpolate(part, size, mode="bilinear", antialias=True).flip(1) / 127.5 - 1


def _recognise(lines: Tensor) -> list[str]:
    """CTC: the likeliest class of every column, repetitions merged, blanks left out."""
    session, characters = _line_reader()
    scores = session.run(None, {session.get_inputs()[0].name: lines.cpu().numpy()})[0]  # [B, columns, classes]
    texts = []
    for row in scores.argmax(-1):
        starts = np.flatnonzero(np.diff(row, prepend=_BLANK))
        texts.append("".join(characters[row[i]] for i in starts if row[i] != _BLANK))
    return texts


@cache
def _line_reader() -> tuple[InferenceSession, list[str]]:
    """The recogniser and its classes: blank, what the model's metadata lists, space."""
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
        "Global.use_cls": False,  # whether a line stands on its head
        "Det.model_path": str(_model("det")),  # paths keep it from looking for downloads
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
        raise UserError(f"rapidocr has no {task} model in {folder}; its wheel brings them: install it again")
    return found[0]
