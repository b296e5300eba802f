from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib import font_manager
from PIL import Image

from visual_grpo.evaluation import fonts, pictures
from visual_grpo.evaluation.pictures import (
    BETTER,
    GAP,
    INK,
    MUTED,
    PAPER,
    WIDTH,
    WORSE,
    Pair,
    beside,
    caption,
    grid,
    of_sample,
    pairs,
    wrap,
)
from visual_grpo.images import to_tensor
from visual_grpo.types import PromptRecord, TextSample

ANSWER = TextSample(text="on the left", finished=True, frame=(64, 64))


def flat(colour: str, width: int = 64, height: int = 64) -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def has(picture: Image.Image, colour: str) -> bool:
    """Whether some pixel has exactly this ``colour``."""
    wanted = np.asarray(flat(colour, 1, 1))[0, 0]
    return bool((np.asarray(picture) == wanted).all(-1).any())


def pair(before: float, after: float, prompt: str = "a prompt") -> Pair:
    return Pair(
        prompt=prompt,
        baseline=flat("blue"),
        trained=flat("orange"),
        baseline_reward=before,
        trained_reward=after,
    )


def test_grid_places_images_in_reading_order() -> None:
    shown = grid([flat(c) for c in ("red", "lime", "blue")], ["a", "b", "c"], columns=2)
    assert shown.width == 2 * WIDTH + 3 * GAP
    middle = WIDTH // 2 + GAP
    assert shown.getpixel((middle, middle)) == (255, 0, 0)
    assert shown.getpixel((middle + WIDTH + GAP, middle)) == (0, 255, 0)
    below = np.asarray(shown)[:, middle]
    assert (below == (0, 0, 255)).all(-1).argmax() > WIDTH  # in the second row


def test_grid_takes_tensors_and_keeps_proportions() -> None:
    red = torch.zeros(3, 32, 64, dtype=torch.uint8)
    red[0] = 255
    shown = np.asarray(grid([red], ["wide"]))
    rows = (shown == (255, 0, 0)).all(-1).any(1).sum()
    columns = (shown == (255, 0, 0)).all(-1).any(0).sum()
    assert (columns, rows) == (WIDTH, WIDTH // 2)


@pytest.mark.parametrize(("count", "captions", "columns"), [(0, 0, 2), (2, 1, 2), (1, 1, 0)])
def test_grid_refuses_invalid_arguments(count: int, captions: int, columns: int) -> None:
    with pytest.raises(ValueError, match=f"{count} images, {captions} captions, {columns} columns"):
        grid([flat("red")] * count, ["x"] * captions, columns)


def test_longer_captions_make_the_grid_higher() -> None:
    short, long = (grid([flat("red")], [text]) for text in ("word", "many words " * 6))
    assert long.height > short.height
    assert long.width == short.width


def test_a_change_that_rounds_to_zero_has_no_minus() -> None:
    assert pictures._gain(pair(0.004, 0.001)) == "reward 0.00 (+0.00)"
    assert pictures._gain(pair(0.0, -0.001)) == "reward 0.00 (+0.00)"


def test_baseline_is_above_trained() -> None:
    column = np.asarray(pairs([pair(0, 1)]))
    blue = np.flatnonzero((column == (0, 0, 255)).all(-1).any(1))
    orange = np.flatnonzero((column == (255, 165, 0)).all(-1).any(1))
    assert blue.max() < orange.min()


@pytest.mark.parametrize(("before", "after", "colour"), [(0.2, 0.9, BETTER), (0.9, 0.2, WORSE), (0.5, 0.5, MUTED)])
def test_colour_tells_gain_from_loss(before: float, after: float, colour: str) -> None:
    shown = pairs([pair(before, after)])
    assert [c for c in (BETTER, WORSE) if has(shown, c)] == [c for c in (colour,) if c != MUTED]


def test_more_pairs_than_columns_go_below() -> None:
    one, two = pairs([pair(0, 1)] * 2, columns=2), pairs([pair(0, 1)] * 3, columns=2)
    assert two.width == one.width
    assert two.height > 1.9 * one.height


def test_lines_fit_and_lose_nothing() -> None:
    text = "a rather long prompt with incomprehensibilitiesandmanyotherlettersinoneword in it"
    shown = fonts.printable(text, pictures.TEXT_SIZE)
    lines = wrap(shown, 260)
    assert len(lines) > 2
    assert all(shown.font.getlength(line) <= 260 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_too_long_a_text_ends_in_an_ellipsis() -> None:
    shown = fonts.printable("word " * 100, pictures.TEXT_SIZE)
    lines = wrap(shown, WIDTH)
    assert len(lines) == pictures.MAX_LINES
    assert lines[-1].endswith("…")
    assert all(shown.font.getlength(line) <= WIDTH for line in lines)


def test_a_text_without_spaces_breaks_between_characters() -> None:
    shown = fonts.printable("Ж" * 40, pictures.TEXT_SIZE)
    assert "".join(wrap(shown, WIDTH)) == "Ж" * 40


def test_default_font_shows_latin_and_cyrillic_as_they_are() -> None:
    assert fonts.printable("café  Привет\n!", 16).text == "café Привет !"


@pytest.fixture
def system_fonts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The fonts of the system; none at first."""
    found: list[str] = []
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: found)
    for cached in (fonts._font_for, fonts._say_what_to_install):
        cached.cache_clear()
    yield found
    for cached in (fonts._font_for, fonts._say_what_to_install):
        cached.cache_clear()


def test_a_prompt_that_no_font_can_show_is_named_by_its_record(
    system_fonts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert caption("a red 圆", "7") == "a red 圆"
    assert fonts.printable("a red 圆", 16).text == "a red □"
    assert not caplog.records
    for record in ("7", "8"):
        assert caption("红色的 circle", record) == "红色的 circle"
        assert caption("红色的圆", record) == f"{record}\nprompt: see report"
    assert [record.getMessage().count("fonts-noto-cjk") for record in caplog.records] == [1]


def test_the_font_with_the_most_glyphs_is_used_where_none_has_all(system_fonts: list[str]) -> None:
    other = fonts.DEFAULT.with_name("STIXGeneral.ttf")
    only_there = sorted(fonts._glyphs(other) - fonts._glyphs(fonts.DEFAULT))[-3:]
    system_fonts.append(str(other))
    found = fonts.printable(f"x{''.join(only_there)}红", 16)
    assert (found.text, found.font.getname()[0]) == (f"x{''.join(only_there)}□", "STIXGeneral")


def test_a_system_font_with_the_glyphs_is_used(system_fonts: list[str]) -> None:
    other = fonts.DEFAULT.with_name("STIXGeneral.ttf")
    only_there = next(c for c in sorted(fonts._glyphs(other) - fonts._glyphs(fonts.DEFAULT)) if ord(c) > 0x1000)
    broken = fonts.DEFAULT.parent.parent / "afm" / "cmr10.afm"
    system_fonts += [str(broken), str(other)]
    found = fonts.printable(f"x{only_there}", 16)
    assert found.text == f"x{only_there}"
    assert found.font.getname()[0] == "STIXGeneral"


def test_the_margin_is_white() -> None:
    shown = grid([flat("red")], ["x"])
    assert PAPER == "white"
    assert shown.getpixel((0, 0)) == (255, 255, 255)


class Judge:
    """Returns the given picture, or None."""

    needs_whole_groups = False

    def __init__(self, painted: torch.Tensor | None) -> None:
        self.painted = painted

    def __call__(self, prompts, samples):
        raise AssertionError("painting a sample must not score it")

    def picture(self, record, sample):
        return self.painted


def test_a_text_is_shown_as_it_is_painted(tmp_path) -> None:
    red = to_tensor(flat("red", 40, 20))
    shown = of_sample(PromptRecord(id="a", prompt="where?"), ANSWER, Judge(red))
    assert (shown.size, shown.getpixel((0, 0))) == ((40, 20), (255, 0, 0))


def test_a_text_without_a_painting_reward_is_shown_below_its_image(tmp_path) -> None:
    flat("blue").save(tmp_path / "source.png")
    record = PromptRecord(id="a", prompt="where?", source_images=(tmp_path / "source.png",))
    shown = np.asarray(of_sample(record, ANSWER, Judge(None)))
    blue = np.flatnonzero((shown == (0, 0, 255)).all(-1).any(1))
    ink = np.flatnonzero((shown == (0x1F, 0x23, 0x28)).all(-1).any(1))
    assert blue.max() < ink.min()
    longer = replace(ANSWER, text="many more words " * 6)
    assert of_sample(record, longer, Judge(None)).height > shown.shape[0]
    assert has(of_sample(PromptRecord(id="a", prompt="no image"), ANSWER, Judge(None)), INK)


def test_sources_are_above_the_pairs_that_have_one() -> None:
    edit = replace(pair(0, 1), source=flat("red", 64, 32))
    shown = np.asarray(pairs([pair(0, 1), edit]))
    red = (shown == (255, 0, 0)).all(-1)
    assert red.sum() == WIDTH * WIDTH // 2
    assert np.flatnonzero(red.any(1)).max() < np.flatnonzero((shown == (0, 0, 255)).all(-1).any(1)).min()
    assert np.flatnonzero(red.any(0)).min() > shown.shape[1] // 2
    without = pairs([pair(0, 1)] * 2)
    assert shown.shape[0] > without.height
    assert not has(without, "red")


def test_several_sources_are_shown_side_by_side() -> None:
    assert beside([flat("red")]).size == (64, 64)
    shown = beside([flat("red"), flat("lime")])
    assert shown.getpixel((WIDTH // 2, WIDTH // 2)) == (255, 0, 0)
    assert shown.getpixel((WIDTH + GAP + WIDTH // 2, WIDTH // 2)) == (0, 255, 0)
