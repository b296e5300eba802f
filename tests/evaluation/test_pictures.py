from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import font_manager
from PIL import Image

from visual_grpo.common.images import to_tensor
from visual_grpo.common.types import PromptRecord, TextSample
from visual_grpo.evaluation import pictures
from visual_grpo.evaluation.pictures import GAP, INK, TEXT_SIZE, WIDTH, caption, grid, of_sample, printable, wrap
from visual_grpo.rewards.combine import RewardSet

ANSWER = TextSample(text="on the left", finished=True, frame=(64, 64))
OTHER_FONT = pictures.DEFAULT_FONT.with_name("STIXGeneral.ttf")


def flat(colour: str, width: int = 64, height: int = 64) -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def where(picture: Image.Image, colour: str) -> np.ndarray:
    """[height, width]: the pixels that have exactly this ``colour``."""
    return np.asarray((np.asarray(picture) == np.asarray(flat(colour, 1, 1))[0, 0]).all(-1))


def test_grid_places_images_in_reading_order() -> None:
    shown = grid([flat(c) for c in ("red", "lime", "blue")], ["a", "b", "c"], columns=2)
    assert shown.width == 2 * WIDTH + 3 * GAP
    assert shown.getpixel((0, 0)) == (255, 255, 255)
    middle = WIDTH // 2 + GAP
    assert shown.getpixel((middle, middle)) == (255, 0, 0)
    assert shown.getpixel((middle + WIDTH + GAP, middle)) == (0, 255, 0)
    assert where(shown, "blue")[:, middle].argmax() > WIDTH, "in the second row"


def test_grid_takes_tensors_and_keeps_proportions() -> None:
    red = where(grid([to_tensor(flat("red", 64, 32))], ["wide"]), "red")
    assert (red.any(0).sum(), red.any(1).sum()) == (WIDTH, WIDTH // 2)


def test_what_was_edited_is_once_in_each_row_before_its_edits(tmp_path: Path) -> None:
    blue, lime = ((tmp_path / f"{colour}.png",) for colour in ("blue", "lime"))
    for [file] in (blue, lime):
        flat(file.stem).save(file)
    shown = grid([flat("red")] * 7, ["a"] * 7, columns=3, sources=[blue, blue, lime, lime, lime, lime, ()])
    cells = (np.asarray(shown)[:, GAP + WIDTH // 2 :: WIDTH + GAP] / 255).astype(int) @ [1, 2, 4]
    seen = [row for row, _ in groupby(map(tuple, cells.tolist())) if 1 in row]  # 1 red, 2 lime, 4 blue, 7 paper
    assert seen == [(4, 1, 1, 2, 1), (2, 1, 1, 1, 7), (1, 7, 7, 7, 7)]


@pytest.mark.parametrize(
    ("text", "count"),
    [("a long prompt with incomprehensibilitiesandmanyotherletters in it", 3), ("word " * 100, pictures.MAX_LINES)],
)
def test_lines_fit_and_lose_nothing_or_end_in_an_ellipsis(text: str, count: int) -> None:
    shown, font = printable(text, TEXT_SIZE)
    lines = wrap(shown, font, WIDTH)
    assert len(lines) == count
    assert all(font.getlength(line) <= WIDTH for line in lines)
    if text.startswith("word"):
        assert lines[-1].endswith("…")
    else:
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")


@pytest.fixture
def system_fonts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The fonts of the system; none at first."""
    found: list[str] = []
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: found)
    for cached in (pictures._font_for, pictures._say_what_to_install):
        cached.cache_clear()
    yield found
    for cached in (pictures._font_for, pictures._say_what_to_install):
        cached.cache_clear()


def test_a_prompt_without_a_font_is_named(system_fonts: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert printable("café  Привет\n!", 16)[0] == "café Привет !"
    assert caption("a red 圆", "7") == "a red 圆"
    assert printable("a red 圆", 16)[0] == "a red □"
    assert not caplog.records
    for record in ("7", "8"):
        assert caption("红色的 circle", record) == "红色的 circle"
        assert caption("红色的圆", record) == f"{record}\nprompt: see report"
    assert [record.getMessage().count("fonts-noto-cjk") for record in caplog.records] == [1]


def test_a_system_font_is_used_where_it_has_more_of_the_glyphs(system_fonts: list[str]) -> None:
    only_there = sorted(pictures._glyphs(OTHER_FONT) - pictures._glyphs(pictures.DEFAULT_FONT))[-3:]
    broken = pictures.DEFAULT_FONT.parent.parent / "afm" / "cmr10.afm"
    system_fonts += [str(broken), str(OTHER_FONT)]
    text = f"x{''.join(only_there)}"
    for shown, expected in ((text, text), (f"{text}红", f"{text}□")):
        line, font = printable(shown, 16)
        assert (line, font.getname()[0]) == (expected, "STIXGeneral")


def unused(prompts, samples):
    raise AssertionError("painting a sample must not score it")


class Painting:
    """A reward that paints every sample as the given picture."""

    def __init__(self, painted: torch.Tensor) -> None:
        self.painted = painted

    def __call__(self, prompts, samples):
        unused(prompts, samples)

    def picture(self, record, sample):
        return self.painted


def judge(painted: torch.Tensor | None) -> RewardSet:
    return RewardSet({"paints": (unused if painted is None else Painting(painted), 1.0)})


def test_a_text_is_shown_as_it_is_painted_or_below_its_image(tmp_path: Path) -> None:
    flat("blue").save(tmp_path / "source.png")
    record = PromptRecord(id="a", prompt="where?", source_images=(tmp_path / "source.png",))
    painted = of_sample(record, ANSWER, judge(to_tensor(flat("red", 40, 20))))
    assert (painted.size, painted.getpixel((0, 0))) == ((40, 20), (255, 0, 0))
    shown = of_sample(record, ANSWER, judge(None))
    blue, ink = (np.flatnonzero(where(shown, colour).any(1)) for colour in ("blue", INK))
    assert blue.max() < ink.min()
    assert of_sample(record, replace(ANSWER, text="many more words " * 6), judge(None)).height > shown.height
    assert where(of_sample(replace(record, source_images=()), ANSWER, judge(None)), INK).any()
