"""What holds for every built-in reward: order and neighbours do not matter, nothing is drawn, no image is changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from tests.rewards.learned import tiny
from visual_grpo.common.images import to_tensor
from visual_grpo.common.types import PromptRecord, RewardOutput, TextSample, VideoSample
from visual_grpo.config import RewardConfig
from visual_grpo.rewards.build import build_reward
from visual_grpo.rewards.catalogue import BUILT_IN
from visual_grpo.rewards.reward import FunctionReward, groups_of
from visual_grpo.starter.shapes.render import COMBINATIONS
from visual_grpo.starter.shapes.render import draw as draw_shape

SIDE = 64
"""Pixels."""

ELSEWHERE = {"votes", "http", "vlm_judge"}
"""Of people's choices (tests/rewards/votes), or scored by another program (tests/rewards/remote)."""
BY_NAME: dict[str, Any] = {
    "clip_score": {"model": "clip"},
    "pick_score": {"model": "clip"},
    "hps": {"model": "clip"},
    "aesthetic": {"model": "clip", "head": "head"},
    "dino_identity": {"model": "dino"},
    "dino_structure": {"model": "dino"},
    "object_layout": {"detector": "tests.rewards.test_every_reward:somewhere"},
    "lpips": {"backbone": "backbone"},
}
"""Options of the rewards that need weights, for which ``weights`` has what they name."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    folder = tmp_path_factory.mktemp("weights")
    torch.save(tiny.perceptron().state_dict(), folder / "aesthetic-model.pth")
    return {
        "clip": str(tiny.saved_clip(folder / "clip")),
        "dino": str(tiny.saved_dino(folder / "dino")),
        "head": str(folder),
        "backbone": str(tiny.saved_alexnet(folder / "backbone.pth")),
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[PromptRecord]:
    """Groups of 2, 3 and 2 samples of records, each with all that any reward reads."""
    folder = tmp_path_factory.mktemp("records")
    found: list[PromptRecord] = []
    for number, (color, shape) in enumerate([("red", "circle"), ("blue", "square"), ("green", "triangle")]):
        source, target = (tiny.picture(100 + 2 * number + offset, SIDE, SIDE) for offset in (0, 1))
        prompt = f'a {color} {shape} that says "CAT {number}"'
        metadata = {
            "color": color,
            "shape": shape,
            "position": "center",
            "size": "small",
            "objects": [{"label": "spot", "color": color, "position": "left"}],
            "region": [[0, 0, 0.5, 0.5 + number / 10]],
            "box": [10, 10, 60, 60],
            "points": [[20, 20]],
        }
        record = tiny.record(f"r{number}", prompt, folder, source=source, target=target)
        found += [replace(record, metadata=metadata)] * (2, 3, 2)[number]
    return found


def images(count: int) -> list[Tensor]:
    """Blocks and noise, a drawn shape and a written word by turns: something for every reward to tell apart."""
    kinds = [lambda n: tiny.picture(n, SIDE, SIDE), _shape, _word]
    return [kinds[n % 3](n) for n in range(count)]


def _shape(number: int) -> Tensor:
    return to_tensor(draw_shape(COMBINATIONS[7 * number % len(COMBINATIONS)], SIDE, SIDE, random.Random(number)))


def _word(number: int) -> Tensor:
    canvas = Image.new("RGB", (SIDE, SIDE), (0, 0, 20 * number))
    ImageDraw.Draw(canvas).text((4, 20), "CAT" if number % 2 else "CAT 0", font=ImageFont.load_default(20))
    return to_tensor(canvas)


def somewhere(image: Tensor) -> list[Any]:
    """A detector: the image's sum decides in which of its quarters a spot is."""
    row, column = divmod(int(image.long().sum()) % 4, 2)
    return [("spot", (row / 2, column / 2, row / 2 + 0.5, column / 2 + 0.5), 1.0)]


def answers(count: int) -> list[TextSample]:
    """Points that differ, and now and then no answer at all."""
    text = '<answer>{"bbox":[10,10,%d,60],"points":[[20,20]],"negative_points":[[50,%d]]}</answer>'
    said = [text % (40 + 3 * n, 20 + n) if n % 4 else "there" for n in range(count)]
    return [TextSample(text=each, finished=True, frame=(SIDE, SIDE)) for each in said]


def videos(count: int) -> list[VideoSample]:
    """Noisy shapes that move, each at its own speed."""
    frames = [
        torch.stack([image.roll(time * (1 + n), 2) for time in range(4)]) for n, image in enumerate(images(count))
    ]
    return [VideoSample(frames=each, fps=8.0) for each in frames]


def whole(reward: FunctionReward, prompts: Sequence[PromptRecord], samples: Sequence[Any]) -> dict[str, Tensor]:
    output: RewardOutput = reward(prompts, samples)
    ratios = {f"{name}{n}": pair[n] for name, pair in output.ratios.items() for n in (0, 1)}
    return {"values": output.values, **output.parts, **ratios}


def chosen_rows(reward: FunctionReward, prompts: Sequence[PromptRecord]) -> list[list[int]]:
    """Rows that must be scored as in the whole batch: all in another order, single ones, and some together.

    Samples of a prompt stay together for a reward that compares them.
    """
    drawn = random.Random(0)
    groups = groups_of(prompts) if reward.needs.whole_groups else [[row] for row in range(len(prompts))]

    def mixed() -> list[int]:
        return [row for group in drawn.sample(groups, len(groups)) for row in drawn.sample(group, len(group))]

    some = [] if reward.needs.whole_groups else [[6, 1], [0, 3, 4, 2]]
    return [mixed(), *groups, *some]


@pytest.mark.parametrize("name", sorted(BUILT_IN.keys() - ELSEWHERE))
def test_order_and_neighbours_do_not_matter(
    name: str, rows: list[PromptRecord], weights: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("visual_grpo.rewards.target.WINDOW", 3)  # For images so small.
    monkeypatch.setattr("visual_grpo.rewards.ocr._PAGE_SIDE", SIDE)
    options = {key: weights.get(value, value) for key, value in BY_NAME.get(name, {}).items()}
    reward = build_reward(name, RewardConfig(function=None, options=options))
    make: Callable[[int], list[Any]] = answers if name == "negative_points" else images
    make = videos if reward.needs.video else make
    samples = make(len(rows))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    all_rows = whole(reward, rows, samples)
    assert torch.equal(torch.get_rng_state(), state), "it draws from the global generator"
    assert not all_rows["values"].isnan().any()
    assert len(all_rows["values"].unique()) > 1, "the test would see nothing"
    torch.manual_seed(2)
    for chosen in chosen_rows(reward, rows):
        found = whole(reward, [rows[row] for row in chosen], [samples[row] for row in chosen])
        expected = {name: all_rows[name][chosen] for name in found}
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    # The callable itself: what it is given here are not the copies that a run gives it.
    given = make(len(rows))
    reward.function(rows, given)
    given, samples = ([getattr(sample, "frames", sample) for sample in each] for each in (given, samples))
    assert all(torch.equal(one, other) if isinstance(one, Tensor) else one == other for one, other in
               zip(given, samples, strict=True)), "it changes its images"  # fmt: skip
