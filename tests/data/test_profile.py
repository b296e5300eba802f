"""The profile of prepared records."""

from __future__ import annotations

import random

import numpy as np
import pytest
from PIL import Image

from tests.data.making import jsonl, picture, prepare
from tests.data.profiles import profile, prompts
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import ImageError
from visual_grpo.data.drift import MAX_PROMPTS, QUANTILES, image_features, profile_of, read_profile, write_profile


def prepared(folder, rows, **changes):
    jsonl(folder / "data/records.jsonl", rows)
    return prepare(folder, **changes)


def test_it_says_what_was_found_and_not_in_which_order(tmp_path):
    picture(tmp_path / "data/dark.png", (40, 80), (51, 51, 51))
    picture(tmp_path / "data/light.png", (80, 80), (204, 204, 204))
    rows = [{"id": f"d{n}", "prompt": f"a cat {n}", "target_image": "dark.png"} for n in range(30)]
    rows += [{"id": f"l{n}", "prompt": f"a dog {n}", "target_image": "light.png"} for n in range(10)]
    rows += [{"id": f"n{n}", "prompt": "一只猫"} for n in range(10)]
    rows += [{"prompt": ""}]
    found = profile_of(prepared(tmp_path, rows, sealed_share=0.2))
    assert (found.accepted, found.rejected) == (50, 1)
    assert sum(found.splits.values()) == 50
    assert found.splits["sealed"] > 0
    assert found.shares["kinds"].shares == {"no source, no target": 0.2, "no source, with a target": 0.8}
    assert (found.shares["kinds"].n, found.shares["kinds"].spread) == (50, 1)
    assert len(found.prompts.hashes) == 41
    assert found.prompts.complete
    brightness = found.values["target_brightness"]
    assert len(brightness.quantiles) == QUANTILES
    # A darker one of 30 records and a lighter one of 10.
    assert 150 <= sum(value == pytest.approx(0.2) for value in brightness.quantiles) <= 152
    assert brightness.records == 40
    assert brightness.n == pytest.approx(40**2 / (30**2 + 10**2))
    assert set(found.values["target_aspect"].quantiles) == {0.5, 1.0}
    assert set(found.values["target_width"].quantiles) == {40, 80}
    words = found.values["prompt_words"].quantiles
    assert (words[0], words[-1]) == (1, 3)
    assert found.values["prompt_words"].n == pytest.approx(50**2 / (40 + 10**2), abs=1e-3)
    assert not any(name.startswith("source") for name in found.values)
    random.Random(0).shuffle(rows)
    assert profile_of(prepared(tmp_path, rows, sealed_share=0.2)) == found


def test_source_images_are_measured_too(tmp_path):
    for shade in (51, 204):
        picture(tmp_path / f"data/{shade}.png", (64, 64), (shade,) * 3)
    rows = [{"prompt": "darker", "source_image": f"{shade}.png", "target_image": "51.png"} for shade in (51, 204)]
    found = profile_of(prepared(tmp_path, rows * 20, task="i2i"))
    assert set(found.values["source_brightness"].quantiles) == {0.2, 0.8}
    assert set(found.values["target_brightness"].quantiles) == {0.2}
    assert found.shares["kinds"].shares == {"one source, with a target": 1}
    assert "source_width" not in found.values


def test_more_prompts_than_are_kept(tmp_path):
    every = prompts(1200)
    found = profile(tmp_path, every)
    assert len(found.prompts.hashes) == MAX_PROMPTS
    assert not found.prompts.complete
    assert found.values["prompt_characters"].n == MAX_PROMPTS
    assert found == profile(tmp_path, every[::-1])
    assert len(found.model_dump_json()) < 30_000
    assert profile(tmp_path, ["A  cat", "a cat", "a CAT "]) == profile(tmp_path, ["a cat"] * 3)


def test_pairs_of_characters_count_by_prompt_and_no_word_is_in_the_file(tmp_path):
    found = profile(tmp_path, ["zebra " * 40, "ok"])
    text = found.shares["prompt_text"]
    assert sum(text.shares.values()) == pytest.approx(1)
    assert sorted(text.shares.values())[-3:] == pytest.approx([1 / 6] * 3, abs=1e-6), "the pairs of ' ok '"
    # Two prompts without a common pair are each as far from the mean as one category of two.
    assert text.spread == pytest.approx(1, abs=1e-5)
    assert "zebra" not in found.model_dump_json()


def test_beside_the_adapters_it_can_be_read_again(tmp_path):
    found = profile(tmp_path, prompts())
    assert read_profile(tmp_path) is None
    write_profile(found, tmp_path)
    assert read_profile(tmp_path) == found
    (tmp_path / "data_profile.json").write_text('{"format": 2}')
    with pytest.raises(UserError, match=r"data_profile\.json is damaged"):
        read_profile(tmp_path)


def test_a_prepared_picture_that_is_gone_is_named(tmp_path):
    with pytest.raises(ImageError, match=r"gone\.png"):
        profile(tmp_path, [{"prompt": "a cat", "target_image": "gone.png"}])


def plain(*colours):
    """Stripes of 32 x 32 pixels."""
    return np.concatenate([np.broadcast_to(np.uint8(colour), (32, 32, 3)) for colour in colours], axis=1)


@pytest.mark.parametrize(
    ("pixels", "expected"),
    [
        (plain((51, 51, 51)), {"brightness": 0.2, "contrast": 0, "colourfulness": 0, "sharpness": 0}),
        # The second difference is 1 and -1 at the two columns beside the edge.
        (plain((0, 0, 0), (255, 255, 255)), {"brightness": 0.5, "contrast": 0.5, "sharpness": (2 / 64) ** 0.5}),
        (plain((255, 0, 0)), {"brightness": 0.299, "colourfulness": 0.3 * np.hypot(1, 0.5)}),
        # Red - green is 1 and 0, yellow - blue 0.5 and -1.
        (plain((255, 0, 0), (0, 0, 255)), {"colourfulness": np.hypot(0.5, 0.75) + 0.3 * np.hypot(0.5, -0.25)}),
        # A larger image is reduced by averaging blocks.
        (plain((51, 51, 51), (153, 153, 153)).repeat(9, 0).repeat(9, 1), {"brightness": 0.4, "contrast": 0.2}),
    ],
)
def test_what_is_measured_of_an_image(tmp_path, pixels, expected):
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = image_features(tmp_path / "a.png")
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-9)
