"""Scores text in images: does the image show the text that the prompt asks for?

As in Flow-GRPO (arXiv 2505.05470), the score is one minus the edit distance divided by the requested text's length.
The models are in rapidocr's wheel: they run offline, on one thread, loaded once per process.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord, RewardOutput
from visual_grpo.rewards.target import is_box

if TYPE_CHECKING:
    from onnxruntime import InferenceSession
    from rapidocr import RapidOCR

_DOUBLE = re.compile('(“[^“”]*”|"[^"]*"|「[^「」]*」)')
_LETTER = r"[^\W\u0e00-\u0eff\u2e80-\ud7ff]"
"""A letter or digit, but of no script (Thai, Lao, East Asian) that has neither apostrophes nor spaces around
quotation marks."""
_SINGLE = re.compile(rf"(?<!{_LETTER})'((?:[^']|(?<={_LETTER})'(?={_LETTER}))*)'(?!{_LETTER})")
"""With `_DOUBLE`, the quotation marks that diffusers 0.42 recognises (`GlmImagePipeline.get_glyph_texts`), because only
this text reaches the glyph encoder. Unlike there, an apostrophe is not a quotation mark."""
_LINE_HEIGHT = 48
"""Input height of the recogniser in pixels; the width is free."""
_BATCH = 16
_PAGE_SIDE = 320
"""Minimum pixels of the shorter side of the detector's input: enough for text of a tenth of the image's height."""
_BLANK = 0
"""The recogniser's CTC blank class."""


class OcrReward:
    """Scores how closely the text in the image matches the requested text: 1 = exactly, 0 = not at all.

    The value is 1 - min(distance, n) / n with the Levenshtein distance to the requested text of n characters. Part
    ``accuracy`` is 1 if the two are equal, else 0. Case, white space and character width are ignored. The requested
    text is ``record.metadata["text"]``, else the quoted text in the prompt; a record with neither is unscored.

    Args:
        line: the region of the image's single line of text, [top, left, bottom, right] as shares of height and
            width. Without it, text is detected in the whole image, which takes much longer.
    """

    measure = ("accuracy", "read without a mistake")

    def __init__(self, line: Sequence[float] | None = None) -> None:
        if line is not None and not is_box(line):
            raise UserError(f"ocr: line must be [top, left, bottom, right] in shares from 0 to 1, got {line!r}")
        self.line = line

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        if records and not any(map(asked_text, records)):
            raise UserError(
                f"the reward 'ocr' scores text that is quoted in the prompt (\"...\", '...', “...” or 「...」) or given"
                f" as metadata text, and none of {len(records)} records has any; the first is"
                f" {records[0].id!r}: {records[0].prompt!r}. Quote the text in the prompts or remove the reward"
            )

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> RewardOutput:
        requested = [asked_text(record) for record in prompts]
        rows = [row for row, text in enumerate(requested) if text]
        images = [samples[row] for row in rows]
        read = [read_page(image) for image in images] if self.line is None else read_line(images, self.line)
        values, accuracy = torch.full((len(samples),), torch.nan), torch.full((len(samples),), torch.nan)
        for row, text in zip(rows, read, strict=True):
            values[row] = closeness(text, requested[row] or "")
            accuracy[row] = float(values[row] == 1)
        return RewardOutput(values=values, parts={"accuracy": accuracy})


def closeness(read: str, requested: str) -> float:
    """1 - min(distance, n) / n, where n is the length of ``requested``; both texts are normalised first."""
    wanted = normalised(requested)
    distance = Levenshtein.distance(normalised(read), wanted)
    return 1 - min(distance, len(wanted)) / len(wanted)


def normalised(text: str) -> str:
    """Removes white space, case and full-width forms (which the recogniser sometimes returns for Latin letters)."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def quoted_texts(prompt: str) -> list[str]:
    """The quoted texts in the prompt's order, without empty ones, and each once: the outer double marks count."""
    texts: list[str] = []
    for number, part in enumerate(_DOUBLE.split(prompt)):
        texts += [part[1:-1]] if number % 2 else _SINGLE.findall(part)
    return [text for text in texts if text.strip()]


def asked_text(record: PromptRecord) -> str | None:
    """The text that the record's image should show, its metadata ``text`` or the prompt's quotes; None if it has none.

    Raises UserError for a text that is not a string.
    """
    if "text" not in record.metadata:
        return " ".join(quoted_texts(record.prompt)) or None
    text = record.metadata["text"]
    if not isinstance(text, str):
        raise UserError(f"reward 'ocr': record {record.id!r} has metadata text {text!r}; expected a string")
    return text if text.strip() else None


def read_line(images: Sequence[Tensor], line: Sequence[float]) -> list[str]:
    """Reads the box ``line`` of each image, uint8 [3, height, width], as one line of text."""
    by_size: dict[torch.Size, list[int]] = defaultdict(list)
    for row, image in enumerate(images):
        by_size[image.shape].append(row)
    texts: dict[int, str] = {}
    for rows in by_size.values():
        for start in range(0, len(rows), _BATCH):
            part = rows[start : start + _BATCH]
            read = _recognise(_cut(torch.stack([images[row] for row in part]), line))
            texts.update(zip(part, read, strict=True))
    return [texts[row] for row in range(len(images))]


def read_page(image: Tensor) -> str:
    """All text found in an image, uint8 [3, height, width]: the lines joined by spaces."""
    result = _page_reader()(np.ascontiguousarray(image.flip(0).permute(1, 2, 0).cpu().numpy()))  # expects BGR
    return " ".join(getattr(result, "txts", None) or ())  # a result without text has a different class, without txts


def _cut(images: Tensor, line: Sequence[float]) -> Tensor:
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
    models = sorted(folder.glob(f"*_{task}_*.onnx"))
    if not models:
        raise UserError(f"rapidocr has no {task} model in {folder}; the models are part of its wheel: reinstall it")
    return models[0]
