"""The reward for drawn shapes on drawings with known attributes."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.images import to_tensor
from visual_grpo.common.types import PromptRecord
from visual_grpo.starter.shapes.render import (
    ATTRIBUTES,
    BACKGROUND,
    COLORS,
    COMBINATIONS,
    EDITS,
    RADII,
    VOCABULARY,
    Combination,
    Jitter,
    draw,
    draw_edit,
    draw_scene,
    random_edit,
    stacked,
)
from visual_grpo.starter.shapes.shapes_reward import RenderingReward, ShapesReward

ASKED = Combination(color="red", shape="circle", position="left", size="small")


def record(combination: Combination, name: str = "r") -> PromptRecord:
    return PromptRecord(id=name, prompt=combination.prompt, metadata=asdict(combination))


def image(combination: Combination, height: int = 128, width: int = 128) -> Tensor:
    return to_tensor(draw(combination, height, width, random.Random(3)))


def mixed(sample: Tensor, share: float) -> Tensor:
    """With a share of the background in the colours."""
    background = torch.tensor(BACKGROUND, dtype=torch.float32).view(3, 1, 1)
    return (background + (1 - share) * (sample.float() - background)).round().to(torch.uint8)


@pytest.mark.parametrize("size", [(256, 128), (101, 130)])
def test_every_true_drawing_is_right(size: tuple[int, int]) -> None:
    records = [record(combination) for combination in COMBINATIONS]
    scores = ShapesReward()(records, [image(combination, *size) for combination in COMBINATIONS])
    assert list(scores.parts) == [*ATTRIBUTES, "all"]
    for part in scores.parts.values():
        assert part.tolist() == [1.0] * len(COMBINATIONS)
    assert scores.values.dtype == torch.float32
    assert scores.values.min() > 0.98
    assert scores.values.max() <= 1


@pytest.mark.parametrize(
    ("attribute", "drawn"),
    [(name, word) for name, words in VOCABULARY.items() for word in words if word != getattr(ASKED, name)],
)
def test_a_wrong_attribute_lowers_its_own_part_alone(attribute: str, drawn: str) -> None:
    scores = ShapesReward()([record(ASKED)], [image(replace(ASKED, **{attribute: drawn}))])
    wrong = {part for part, value in scores.parts.items() if value.item() == 0}
    assert wrong == {attribute, "all"}
    assert scores.values.item() < 0.8


def test_the_value_falls_smoothly_with_the_colour() -> None:
    scores = ShapesReward()([record(ASKED)] * 4, [mixed(image(ASKED), share) for share in (0, 0.15, 0.3, 0.5)])
    assert (scores.values.diff() < -0.02).all()
    assert scores.parts["shape"].tolist() == [1, 1, 1, 1]
    assert scores.parts["color"].tolist()[::3] == [1, 0]


OTHER = Combination(color="blue", shape="square", position="right", size="large")


def scene(*objects: Combination, size: tuple[int, int] = (128, 128)) -> Tensor:
    rng = random.Random(4)
    return stacked([draw_scene([(thing, Jitter.draw(rng)) for thing in objects], *size)])[0]


def edited(kind: str, subject: Combination, other: Combination | None = None) -> PromptRecord:
    metadata = {**asdict(subject), "edit": kind, "other": None if other is None else asdict(other)}
    return PromptRecord(id="e", prompt="", metadata=metadata)


@pytest.mark.parametrize("kind", EDITS)
def test_true_edits_are_right_and_their_sources_are_worth_little(kind: str) -> None:
    rng = random.Random(5)
    edits = [random_edit(kind, combination, rng) for combination in COMBINATIONS[::3]]
    records = [PromptRecord(id=str(i), prompt="", metadata=edit.metadata) for i, edit in enumerate(edits)]
    pictures = [draw_edit(edit, 64, 96, rng) for edit in edits]
    right = ShapesReward()(records, list(stacked([target for _, target in pictures])))
    copied = ShapesReward()(records, list(stacked([source for source, _ in pictures])))
    assert right.values.min() > 0.95
    assert right.values.max() <= 1
    assert all(part[~part.isnan()].eq(1).all() for part in right.parts.values())
    assert copied.values.max() < 0.4
    assert copied.values.mean() < 0.3
    assert copied.parts["instructed"].eq(0).all()
    assert copied.parts["all"].eq(0).all()
    assert copied.parts["kept"][~copied.parts["kept"].isnan()].eq(1).all()
    keeps_nothing = torch.tensor([edit.kind in ("add", "remove") and edit.other is None for edit in edits])
    assert torch.equal(copied.parts["kept"].isnan(), keeps_nothing)


BLANK = scene()
TURNED = replace(ASKED, position="right")
CHANGED_TOO = replace(ASKED, color="green", size="large")
EDIT_CASES = {
    "the colour alone": (edited("recolour", ASKED), scene(ASKED), 1, 1),
    "the colour, and moved": (edited("recolour", ASKED), scene(TURNED), 1, 0),
    "kept but another colour": (edited("recolour", ASKED), scene(replace(ASKED, color="green")), 0, 1),
    "neither": (edited("recolour", ASKED), scene(CHANGED_TOO), 0, 0),
    "gone": (edited("resize", ASKED), BLANK, 0, 0),
    "moved, and a second one": (edited("move", ASKED), scene(ASKED, OTHER), None, 0),
    "added": (edited("add", ASKED, OTHER), scene(ASKED, OTHER), 1, 1),
    "added alone": (edited("add", ASKED, OTHER), scene(ASKED), 1, 0),
    "added in another colour": (edited("add", ASKED, OTHER), scene(replace(ASKED, color="blue"), OTHER), 0, 1),
    "added to nothing": (edited("add", ASKED), scene(ASKED), 1, None),
    "added twice": (edited("add", ASKED), scene(ASKED, OTHER), 0, None),
    "removed": (edited("remove", ASKED, OTHER), scene(OTHER), 1, 1),
    "removed both": (edited("remove", ASKED, OTHER), BLANK, 1, 0),
    "removed the wrong one": (edited("remove", ASKED, OTHER), scene(ASKED), 0, 0),
    "removed the last": (edited("remove", ASKED), BLANK, 1, None),
    "something else instead": (edited("remove", ASKED), scene(OTHER), 0, None),
}


@pytest.mark.parametrize("case", EDIT_CASES)
def test_instructed_and_kept(case: str) -> None:
    record, sample, instructed, kept = EDIT_CASES[case]
    scores = ShapesReward()([record], [sample])
    found = {part: values.item() for part, values in scores.parts.items()}
    if instructed is not None:
        assert found["instructed"] == instructed
    assert found["kept"] == kept if kept is not None else math.isnan(found["kept"])
    assert found["all"] == (found["instructed"] == 1 and kept in (1, None))
    assert scores.values.item() > 0.95 if found["all"] else scores.values.item() < 0.67


def test_an_edits_value_is_what_was_followed_and_kept() -> None:
    """By hand: followed 1; kept (colour 1, shape 1, position 0) / 3; not everything correct."""
    away = scene(replace(ASKED, position="right"))
    scores = ShapesReward()([edited("resize", ASKED)], [away])
    assert scores.values.item() == pytest.approx((1 + 1 * 2 / 3 + 0) / 3, abs=0.02)


@pytest.mark.parametrize(("kind", "other"), [*((kind, None) for kind in EDITS), ("add", OTHER), ("remove", OTHER)])
def test_what_a_part_cannot_say_depends_on_the_record(kind: str, other: Combination | None) -> None:
    pictures = [BLANK, scene(ASKED), scene(ASKED, OTHER), torch.full_like(BLANK, 128)]
    scores = ShapesReward()([edited(kind, ASKED, other)] * len(pictures), pictures)
    assert not scores.values.isnan().any()
    for name, values in scores.parts.items():
        assert len(set(values.isnan().tolist())) == 1, name


def test_prompts_beside_edits_are_judged_as_ever() -> None:
    samples = [scene(ASKED), scene(OTHER), scene(ASKED, size=(64, 96))]
    records = [record(ASKED), edited("recolour", OTHER), record(ASKED)]
    scores = ShapesReward()(records, samples)
    alone = ShapesReward()([records[0], records[2]], [samples[0], samples[2]])
    assert torch.equal(scores.values[[0, 2]], alone.values)
    assert scores.parts["instructed"].isnan().tolist() == [True, False, True]
    assert "instructed" not in alone.parts
    marked = replace(records[0], metadata={**records[0].metadata, "edit": None})
    assert ShapesReward()([marked], samples[:1]).parts["kept"].isnan().all()


def test_records_that_describe_no_drawn_object_are_named() -> None:
    odd = PromptRecord(id="e7", prompt="", metadata={**asdict(ASKED), "color": "pink"})
    with pytest.raises(UserError, match="1 record lacks them: 'e7'"):
        ShapesReward().check_records([record(ASKED), odd])


def test_full_colours_are_worth_most_and_every_step_of_fading_costs() -> None:
    some = COMBINATIONS[::10]
    full, faded, dull = (
        RenderingReward()([record(thing) for thing in some], [mixed(image(thing), share) for thing in some]).values
        for share in (0.0, 0.2, 0.4)
    )
    assert (full > 0.84).all()
    # A fifth of the way to the background is 0.13 to 0.18 of RGB distance for these colours, of a reach of 0.6.
    assert (full - faded > 0.05).all()
    assert (faded - dull > 0.1).all()


@pytest.mark.parametrize(
    ("asked", "worth"),
    [
        (record(ASKED), 0.0),
        (edited("add", ASKED), 0.0),
        (edited("remove", OTHER, ASKED), 0.0),
        (edited("remove", ASKED), 1.0),
    ],
)
def test_a_blank_picture_has_the_floor_or_full_marks(asked: PromptRecord, worth: float) -> None:
    blank, drawn = RenderingReward()([asked, asked], [BLANK, image(ASKED)]).values.tolist()
    assert blank == worth
    assert 0.95 < drawn <= 1


def test_two_objects_are_rendered_as_cleanly_as_one() -> None:
    asked = edited("add", ASKED, OTHER)
    both, one, none = RenderingReward()([asked] * 3, [scene(ASKED, OTHER), scene(OTHER), BLANK]).values.tolist()
    assert both > 0.9
    assert one == pytest.approx(both / 2, abs=0.05)
    assert none == 0
    assert RenderingReward()([edited("remove", ASKED, OTHER)], [scene(OTHER)]).values.item() > 0.9


def superellipse(power: float) -> Tensor:
    """Anti-aliased |x|^power + |y|^power < 1 in red at the centre: a circle for 2, nearly a square for 8."""
    axis = ((torch.arange(512) + 0.5) / 512 - 0.5) / RADII["large"]
    inside = (axis.abs()[:, None] ** power + axis.abs()[None] ** power < 1).float()
    share = torch.nn.functional.avg_pool2d(inside[None], 4)
    background, red = (torch.tensor(color, dtype=torch.float32).view(3, 1, 1) for color in (BACKGROUND, COLORS["red"]))
    return (background + share * (red - background)).round().to(torch.uint8)


def test_every_step_towards_a_circle_is_worth_something_and_what_lies_between_is_no_circle() -> None:
    asked = record(Combination(color="red", shape="circle", position="center", size="large"))
    pictures = [superellipse(power) for power in (5, 3, 2.6, 2.3, 2)]
    shapes, rendering = (reward([asked] * len(pictures), pictures) for reward in (ShapesReward(), RenderingReward()))
    assert (shapes.values.diff() > 0.005).all()
    assert (rendering.values[1:].diff() > 0.02).all(), "of the square at the start, it is the other way round"
    assert shapes.parts["shape"].tolist() == [0, 0, 1, 1, 1]


def test_an_outline_is_where_the_eye_sees_it() -> None:
    """At half of the colour's height, wherever a weak glow around it ends."""
    asked = Combination(color="red", shape="circle", position="center", size="large")
    drawn = image(asked)
    glowing = drawn.clone()
    glowing[:, 56:72, 96:112] = mixed(drawn, 0.55)[:, 56:72, 56:72]
    plain, glows = RenderingReward()([record(asked)] * 2, [drawn, glowing]).values.tolist()
    assert glows > 0.9 * plain
