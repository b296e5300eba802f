"""The OCR reward on drawings of known words."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import GlmImagePipeline
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from examples.words.signs import WORDS, draw, prompt_of
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.ocr import OcrReward, asked_text, closeness, quoted_texts

WHOLE = [0, 0, 1, 1]


def record(prompt: str, **metadata: Any) -> PromptRecord:
    return PromptRecord(id="r", prompt=prompt, metadata=metadata)


def sign(word: str, height: int = 64, width: int = 256) -> Tensor:
    return torch.from_numpy(np.array(draw(word, height, width))).permute(2, 0, 1)


def page(text: str, top: int) -> Tensor:
    """256 x 256 pixels, white on black, the text's first line starting ``top`` pixels down."""
    canvas = Image.new("RGB", (256, 256))
    ImageDraw.Draw(canvas).multiline_text((20, top), text, font=ImageFont.load_default(40), spacing=20)
    return torch.from_numpy(np.array(canvas)).permute(2, 0, 1)


@pytest.mark.parametrize(
    "prompt",
    [
        "一块写着「你好」的牌子",
        "a dog",
        'a "b" “c” \'d\' 「e」 "f"',
        "an unclosed “quote",
    ],
)
def test_quoted_texts_equal_those_of_the_pipeline(prompt: str) -> None:
    pipeline = GlmImagePipeline.__new__(GlmImagePipeline)  # the method needs no modules
    assert sorted(quoted_texts(prompt)) == sorted(pipeline.get_glyph_texts(prompt)[0])


@pytest.mark.parametrize(
    ("prompt", "quoted"),
    [
        ("the dog's bone and the cat's", []),
        ("the boys' room and the girls' room", []),
        ("'70s cars and '80s cars", []),
        ("a mechanic's sign \"Oil Change\" next to the driver's door", ["Oil Change"]),
        ("the cafe's sign 'Today's Special' by the cook's cat", ["Today's Special"]),
        ("\"Rock 'n' Roll\" and 'CAB'", ["Rock 'n' Roll", "CAB"]),
        ("“say 'a' or \"b\"”", ["say 'a' or \"b\""]),
        ("'a \"b' c\"", ["b' c"]),
        ("写着'你好'和'再见'的牌子", ["你好", "再见"]),
    ],
)
def test_apostrophes_are_no_quotation_marks(prompt: str, quoted: list[str]) -> None:
    assert quoted_texts(prompt) == quoted


def test_metadata_take_precedence_over_quotes() -> None:
    assert asked_text(record('a sign "CAB"', text="TAXI")) == "TAXI"
    assert asked_text(record('a sign "CAB"', text="")) is None
    assert asked_text(record('a sign "CAB" above "TAXI"')) == "CAB TAXI"
    with pytest.raises(UserError, match=r"record 'r' has metadata text 7; expected a string"):
        asked_text(record("a sign", text=7))


@pytest.mark.parametrize(
    ("read", "asked", "value"),
    [
        ("CAB", "CAB", 1),
        (" c a\nb ", "CAB", 1),
        ("ＣAB", "CAB", 1),  # full width
        *((read, "CAB", 2 / 3) for read in ("CAT", "CA", "CABS")),
        *((read, "CAB", 0) for read in ("", "something else")),
        ("TAXI", "TAXI CAB", 4 / 7),
    ],
)
def test_the_value_is_one_minus_edits_per_asked_character(read: str, asked: str, value: float) -> None:
    assert closeness(read, asked) == pytest.approx(value)


def test_drawn_words_are_read() -> None:
    words = WORDS[::8]
    scores = OcrReward(WHOLE)([record(prompt_of(word)) for word in words], [sign(word) for word in words])
    assert scores.parts["accuracy"].mean() == scores.values.mean() == 1


def test_a_wrong_letter_costs_its_share_and_a_prompt_without_text_is_unscored() -> None:
    prompts = [record('a "KAT"'), record('a "KAN"'), record("a cat"), record('a "HUS"')]
    scores = OcrReward(WHOLE)(prompts, [sign("KAT")] * 4)
    torch.testing.assert_close(scores.values, torch.tensor([1, 2 / 3, torch.nan, 0]), equal_nan=True, check_dtype=False)
    torch.testing.assert_close(scores.parts["accuracy"], torch.tensor([1, 0, torch.nan, 0]), equal_nan=True)


def test_text_is_found_anywhere_offline(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    images = [page("KAT\nPEN", 20), page("KAT", 180), torch.zeros(3, 256, 256, dtype=torch.uint8)]
    asked = [record('"KAT" over "PEN"'), record('"KAT"'), record('"KAT"')]
    assert OcrReward()(asked, images).values.tolist() == [1, 1, 0]
    assert capfd.readouterr() == ("", "")
