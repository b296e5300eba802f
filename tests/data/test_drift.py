"""The profile of prepared records, and how far two datasets are apart."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.making import jsonl, picture, prepare
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import ImageError
from visual_grpo.config import DataChecks
from visual_grpo.data.drift import (
    MAX_PROMPTS,
    QUANTILES,
    Profile,
    check,
    drift,
    image_features,
    lost_share,
    profile_of,
    prompt_features,
    read_profile,
    write_profile,
)
from visual_grpo.data.manifest import RecordTable, write_manifest
from visual_grpo.starter.shapes.dataset import draw_dataset

ANIMALS = ("cat", "dog", "horse", "bear", "owl", "whale", "crane", "lizard", "snail", "tiger")
PLACES = ("house", "lake", "wood", "street", "mountain", "bridge", "harbour", "field", "desert", "island", "market")
TIMES = ("morning", "evening", "autumn", "winter", "rain", "snow", "fog", "sun", "moonlight", "storm", "spring")


def prompts(count: int = 300, seed: int = 0) -> list[str]:
    """Returns distinct prompts."""
    texts = [f"a {animal} at the {place} in {time}" for animal in ANIMALS for place in PLACES for time in TIMES]
    return random.Random(seed).sample(texts, count)


def profile(folder: Path, rows: Iterable[str | dict[str, Any]]) -> Profile:
    """Describes records with these prompts or columns."""
    columns = [{"prompt": row} if isinstance(row, str) else row for row in rows]
    path = folder / "records.parquet"
    path.unlink(missing_ok=True)
    write_manifest(path, ({"id": str(n), "split": "train", "metadata": "{}", **row} for n, row in enumerate(columns)))
    return profile_of(RecordTable(path))


def prepared(folder, rows, **changes):
    jsonl(folder / "data/records.jsonl", rows)
    return prepare(folder, **changes)


def test_a_profile_describes_records_whatever_their_order(tmp_path):
    picture(tmp_path / "data/dark.png", (40, 80), (51, 51, 51))
    picture(tmp_path / "data/light.png", (80, 80), (204, 204, 204))
    rows = [{"id": f"d{n}", "prompt": f"a cat {n}", "target_image": "dark.png"} for n in range(30)]
    rows += [{"id": f"l{n}", "prompt": f"a dog {n}", "target_image": "light.png"} for n in range(10)]
    rows += [{"id": f"n{n}", "prompt": "一只猫"} for n in range(10)]
    rows += [{"prompt": ""}]
    described = profile_of(prepared(tmp_path, rows, sealed_share=0.2))
    assert (described.accepted, described.rejected) == (50, 1)
    assert (described.values["record_targets"].n, described.values["record_targets"].mean) == (50, 0.8)
    assert len(described.prompts) == 41
    brightness = described.values["target_brightness"]
    assert len(brightness.quantiles) == QUANTILES
    # A darker one of 30 records and a lighter one of 10.
    assert 150 <= sum(value == pytest.approx(0.2) for value in brightness.quantiles) <= 152
    assert brightness.records == 40
    assert brightness.n == pytest.approx(40**2 / (30**2 + 10**2))
    assert set(described.values["target_aspect"].quantiles) == {0.5, 1.0}
    assert set(described.values["target_width"].quantiles) == {40, 80}
    words = described.values["prompt_words"].quantiles
    assert (words[0], words[-1]) == (1, 3)
    assert described.values["prompt_words"].n == pytest.approx(50**2 / (40 + 10**2), abs=1e-3)
    assert not any(name.startswith("source") for name in described.values)
    random.Random(0).shuffle(rows)
    assert profile_of(prepared(tmp_path, rows, sealed_share=0.2)) == described


def test_source_images_are_profiled(tmp_path):
    for shade in (51, 204):
        picture(tmp_path / f"data/{shade}.png", (64, 64), (shade,) * 3)
    rows = [{"prompt": "darker", "source_image": f"{shade}.png", "target_image": "51.png"} for shade in (51, 204)]
    described = profile_of(prepared(tmp_path, rows * 2, task="i2i"))
    assert set(described.values["source_brightness"].quantiles) == {0.2, 0.8}
    assert set(described.values["target_brightness"].quantiles) == {0.2}
    assert {described.values[name].mean for name in ("record_sources", "record_targets")} == {1}
    assert "source_width" not in described.values


def test_a_sample_of_many_prompts(tmp_path):
    every = prompts(1200)
    described = profile(tmp_path, every)
    assert len(described.prompts) == MAX_PROMPTS
    assert described.values["prompt_characters"].n == MAX_PROMPTS
    assert described == profile(tmp_path, every[::-1])
    assert len(described.model_dump_json()) < 30_000
    assert profile(tmp_path, ["A  cat", "a cat", "a CAT "]) == profile(tmp_path, ["a cat"] * 3)


def test_a_profile_is_written_without_a_word_of_a_prompt_and_read(tmp_path):
    described = profile(tmp_path, ["zebra " * 40, "Ok, 7 猫"])
    assert prompt_features("ok, 7 猫") == {"characters": 7, "words": 3, "latin_share": 2 / 7, "vowel_share": 1 / 7}
    assert described.values["prompt_words"].mean == 43 / 2
    assert read_profile(tmp_path) is None
    write_profile(described, tmp_path)
    assert read_profile(tmp_path) == described
    file = tmp_path / "data_profile.json"
    assert "zebra" not in file.read_text()
    file.write_text('{"format": 1}')
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
def test_image_features(tmp_path, pixels, expected):
    Image.fromarray(pixels).save(tmp_path / "a.png")
    features = image_features(tmp_path / "a.png")
    assert {name: features[name] for name in expected} == pytest.approx(expected, abs=1e-9)


LIMITS = DataChecks()
ALL_LOST = DataChecks(max_lost_prompts=1)
"""Two halves of one dataset have no prompt in common."""


def feature(drifts, name):
    [drift] = [drift for drift in drifts if drift.feature == name]
    return drift


def names(violations):
    return {text.rpartition("retrain.data.")[2].rstrip(").") for text in violations}


@pytest.fixture
def before(tmp_path):
    return profile(tmp_path, prompts())


class TestDistances:
    def test_lengths_of_a_part_of_the_records_move_by_that_part(self, tmp_path, before):
        assert {one.feature: one.distance for one in drift(before, before)} == dict.fromkeys(before.values, 0)
        mixed = profile(tmp_path, [*prompts(), *["a cat"] * 100])
        for there in (drift(before, mixed), drift(mixed, before)):
            assert feature(there, "prompt_words").distance == pytest.approx(0.25, abs=0.01)
        assert "mean 5.75 before, 7 now; distance 0.25" in feature(there, "prompt_words").text

    def test_repeats_of_a_prompt_say_no_more_than_one(self, tmp_path):
        found = []
        for times in (1, 20):
            halves = [profile(tmp_path, prompts()[start : start + 50] * times) for start in (0, 50)]
            found.append({one.feature: one for one in drift(*halves) if one.feature.startswith("prompt_")})
        once, often = found
        for name, one in often.items():
            assert (one.distance, one.chance) == pytest.approx((once[name].distance, once[name].chance), rel=1e-3)

    def test_kinds_of_a_part_of_the_records_move_by_that_part(self, tmp_path, before):
        target = picture(tmp_path / "a.png").name
        some = [{"prompt": text, **({"target_image": target} if n < 120 else {})} for n, text in enumerate(prompts())]
        now = profile(tmp_path, some)
        assert check(before, now, LIMITS) == [
            "targets of the records: mean 0 before, 0.4 now; distance 0.40, expected at most 0.30"
            " (retrain.data.max_kind_drift)."
        ]
        edited = profile(tmp_path, [{**row, "source_images": [target]} for row in some])
        assert feature(drift(now, edited), "record_sources").distance == 1

    def test_chance_is_what_halves_of_one_dataset_stay_below(self, tmp_path):
        every = prompts(160)
        highest = dict.fromkeys(("prompt_vowel_share", "prompt_characters"), 0.0)
        for number in range(40):
            shuffled = random.Random(number).sample(every, 160)
            for moved in drift(profile(tmp_path, shuffled[:80]), profile(tmp_path, shuffled[80:])):
                if moved.feature in highest:
                    highest[moved.feature] = max(highest[moved.feature], moved.distance / moved.chance)
        assert all(0.4 < ratio < 1 for ratio in highest.values()), highest


class TestLostPrompts:
    def test_the_share_of_few_prompts_is_counted(self, tmp_path, before):
        rows = [*prompts()[:240], *prompts(900, seed=5)][:600]
        gone = len({*prompts()} - {*rows}) / 300
        assert lost_share(before, profile(tmp_path, rows)) == pytest.approx(gone)

    @pytest.mark.parametrize("gone", [0.0, 0.4, 1.0])
    def test_the_share_of_many_prompts_is_estimated(self, tmp_path, gone):
        every = [f"prompt {number}" for number in range(4000)]
        more = [f"another {number}" for number in range(8000)]
        earlier, now = (profile(tmp_path, rows) for rows in (every, every[int(gone * 4000) :] + more))
        assert lost_share(earlier, now) == pytest.approx(gone, abs=0.06)


class TestChecks:
    @pytest.mark.parametrize(
        ("rejected", "fewest", "faults"),
        [
            (33, 300, []),
            (0, 301, ["300 usable records, expected at least 301 (retrain.data.min_records)."]),
            (34, 20, ["34 of 334 records rejected: 10.2%, expected at most 10.0% (retrain.data.max_rejected)."]),
        ],
    )
    def test_without_a_champion_only_the_data_themselves_are_checked(self, before, rejected, fewest, faults):
        now = before.model_copy(update={"rejected": rejected})
        assert check(None, now, DataChecks(min_records=fewest)) == faults

    def test_more_data_and_halves_of_the_same_pass_but_for_what_is_gone(self, tmp_path, before):
        assert check(before, profile(tmp_path, [*prompts(), *prompts(200, seed=1)]), LIMITS) == []
        halves = profile(tmp_path, prompts()[:150]), profile(tmp_path, prompts()[150:])
        assert check(*halves, ALL_LOST) == []
        assert names(check(*halves, LIMITS)) == {"max_lost_prompts"}

    def test_halved_data_fail(self, tmp_path, before):
        assert check(before, profile(tmp_path, prompts()[:150]), LIMITS) == [
            "150 usable records, 300 before: 50.0% fewer, expected at most 30.0% (retrain.data.max_fewer_records).",
            "50.0% of the earlier prompts are gone, expected at most 30.0% (retrain.data.max_lost_prompts).",
        ]
        assert check(before, profile(tmp_path, prompts()[:220]), LIMITS) == []

    @pytest.mark.parametrize(
        ("change", "moved"),
        [
            # Another script, another language in the same script, tags; all of the same length.
            (lambda text: re.sub(r"\S", lambda sign: chr(0x4E00 + ord(sign[0])), text), ["latin share", "vowel share"]),
            (lambda text: text.translate(str.maketrans("aeioutn", "xyzqvwj")), ["vowel share"]),
            (lambda text: text.replace(" ", ","), ["words"]),
        ],
    )
    def test_prompts_of_the_same_length_in_another_language_or_style_fail(self, tmp_path, before, change, moved):
        faults = check(before, profile(tmp_path, map(change, prompts())), ALL_LOST)
        assert [fault.partition(" of the prompts: mean ")[0] for fault in faults] == moved
        assert all(fault.endswith(", expected at most 0.30 (retrain.data.max_prompt_drift).") for fault in faults)

    def test_a_few_records_may_differ_by_chance(self, tmp_path):
        few = ["a cat"] * 12 + [f"a large dog number {n}" for n in range(13)]
        first, second = profile(tmp_path, few), profile(tmp_path, [*few[12:], *prompts(12)])
        limits = DataChecks(max_lost_prompts=1, max_prompt_drift=0.01)
        moved = feature(drift(first, second), "prompt_words")
        assert 0.3 < moved.distance < moved.chance
        assert "max_prompt_drift" not in names(check(first, second, limits))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Rows of shapes as the starter draws them, with the pictures' folder."""
    folder = tmp_path_factory.mktemp("shapes")
    draw_dataset(folder / "raw", 2, 64, 64, seed=0)
    names = sorted(path.name for path in (folder / "raw/target_images").iterdir())
    return folder, [
        {"prompt": f"shape {n % 150}", "target_image": f"raw/target_images/{name}"} for n, name in enumerate(names)
    ]


class TestPictures:
    def test_darkened_pictures_fail(self, pictures):
        folder, rows = pictures
        dark = []
        for row in rows:
            name = row["target_image"].replace("/shape", "/dark")
            with Image.open(folder / row["target_image"]) as image:
                image.point(lambda value: 0.7 * value).save(folder / name)
            dark.append(row | {"target_image": name})
        violations = check(profile(folder, rows), profile(folder, dark), LIMITS)
        assert names(violations) == {"max_image_drift"}
        assert any(text.startswith("brightness of the target images: mean 0.") for text in violations)

    def test_one_picture_in_all_records_fail(self, pictures):
        folder, rows = pictures
        before = profile(folder, rows)
        same = profile(folder, [row | {"target_image": rows[0]["target_image"]} for row in rows])
        assert names(check(before, same, LIMITS)) == names(check(same, before, LIMITS)) == {"max_image_drift"}
