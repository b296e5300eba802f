"""How far two datasets are apart, and whether that is too far."""

from __future__ import annotations

import math
import random

import pytest

from tests.data.making import picture
from tests.data.profiles import profile, prompts
from visual_grpo.config import DataChecks
from visual_grpo.data.drift import check, drift, lost_share

LIMITS = DataChecks()
ALL_LOST = DataChecks(max_lost_prompts=1)
"""Two halves of one dataset have no prompt in common."""


def of(found, feature):
    [one] = [one for one in found if one.feature == feature]
    return one


def names(violations):
    return {text.rpartition("retrain.data.")[2].rstrip(").") for text in violations}


@pytest.fixture
def before(tmp_path):
    return profile(tmp_path, prompts())


class TestDistances:
    def test_the_same_data_are_at_distance_0(self, before):
        found = drift(before, before)
        assert {one.feature for one in found} == {"kinds", "prompt_text", "prompt_characters", "prompt_words"}
        assert all(one.distance == 0 for one in found)
        assert check(before, before, LIMITS) == []

    def test_they_are_symmetric_and_between_0_and_1(self, tmp_path):
        first, second = profile(tmp_path, ["a", "b c", "b c", "ab ab"]), profile(tmp_path, ["cd", "b b b", "d"])
        there, back = drift(first, second), drift(second, first)
        assert [found.distance for found in there] == pytest.approx([found.distance for found in back])
        assert [found.chance for found in there] == pytest.approx([found.chance for found in back])
        assert all(0 <= found.distance <= 1 + 1e-9 and 0 <= found.chance <= 1 for found in there)

    def test_what_has_nothing_in_common_is_at_distance_1(self, tmp_path):
        found = drift(profile(tmp_path, ["zzz"] * 30), profile(tmp_path, ["to be or not to be"] * 30))
        assert [one.distance for one in found[1:]] == pytest.approx([1, 1, 1])

    def test_lengths_of_a_part_of_the_records_move_by_that_part(self, tmp_path, before):
        mixed = profile(tmp_path, [*prompts(), *["a cat"] * 100])
        assert of(drift(before, mixed), "prompt_words").distance == pytest.approx(0.25, abs=0.01)
        assert "median 7 before, 7 now; distance 0.25" in of(drift(before, mixed), "prompt_words").text

    def test_kinds_are_compared_by_the_jensen_shannon_distance(self, tmp_path, before):
        target = picture(tmp_path / "a.png").name
        some = [{"prompt": text, **({"target_image": target} if n < 60 else {})} for n, text in enumerate(prompts())]
        found = of(drift(before, profile(tmp_path, some)), "kinds")
        # (1, 0) and (0.8, 0.2): half the divergence of each from their mean (0.9, 0.1), in bits.
        divergence = 0.5 * math.log2(1 / 0.9) + 0.5 * (0.8 * math.log2(0.8 / 0.9) + 0.2 * math.log2(0.2 / 0.1))
        assert found.distance == pytest.approx(divergence**0.5)

    def test_chance_is_what_halves_of_one_dataset_stay_below(self, tmp_path):
        every = prompts(160)
        highest = dict.fromkeys(("prompt_text", "prompt_characters"), 0.0)
        for number in range(40):
            shuffled = random.Random(number).sample(every, 160)
            for found in drift(profile(tmp_path, shuffled[:80]), profile(tmp_path, shuffled[80:])):
                if found.feature in highest:
                    highest[found.feature] = max(highest[found.feature], found.distance / found.chance)
        assert all(0.4 < ratio < 1 for ratio in highest.values()), highest


class TestLostPrompts:
    def test_of_few_it_is_counted(self, tmp_path, before):
        rows = [*prompts()[:240], *prompts(900, seed=5)][:600]
        gone = len({*prompts()} - {*rows}) / 300
        assert lost_share(before.prompts, profile(tmp_path, rows).prompts) == pytest.approx(gone)

    @pytest.mark.parametrize("gone", [0.0, 0.4, 1.0])
    def test_of_many_it_is_estimated(self, tmp_path, gone):
        every = [f"prompt {number}" for number in range(4000)]
        more = [f"another {number}" for number in range(8000)]
        earlier, now = (profile(tmp_path, rows).prompts for rows in (every, every[int(gone * 4000) :] + more))
        assert lost_share(earlier, now) == pytest.approx(gone, abs=0.06)


class TestChecks:
    def test_without_a_champion_only_the_data_themselves_are_checked(self, before):
        assert check(None, before, LIMITS) == []
        [said] = check(None, before, DataChecks(min_records=301))
        assert said == "300 usable records, needed are 301 (retrain.data.min_records)."

    def test_rejected_records(self, before):
        some, many = (before.model_copy(update={"rejected": count}) for count in (33, 34))
        assert check(None, some, LIMITS) == []
        [said] = check(None, many, LIMITS)
        assert said == "34 of 334 records rejected: 10.2%, allowed are 10.0% (retrain.data.max_rejected)."

    def test_more_data_and_halves_of_the_same_pass_but_for_what_is_gone(self, tmp_path, before):
        assert check(before, profile(tmp_path, [*prompts(), *prompts(200, seed=1)]), LIMITS) == []
        halves = profile(tmp_path, prompts()[:150]), profile(tmp_path, prompts()[150:])
        assert check(*halves, ALL_LOST) == []
        assert names(check(*halves, LIMITS)) == {"max_lost_prompts"}

    def test_halved_data_do_not(self, tmp_path, before):
        assert check(before, profile(tmp_path, prompts()[:150]), LIMITS) == [
            "150 usable records, 300 before: 50.0% fewer, allowed are 30.0% (retrain.data.max_fewer_records).",
            "50.0% of the earlier prompts are gone, allowed are 30.0% (retrain.data.max_lost_prompts).",
        ]
        assert check(before, profile(tmp_path, prompts()[:220]), LIMITS) == []

    def test_prompts_in_another_script_do_not(self, tmp_path, before):
        chinese = ["".join(chr(0x4E00 + ord(sign)) for sign in text[::3]) for text in prompts()]
        assert "max_prompt_length_drift" in names(check(before, profile(tmp_path, chinese), ALL_LOST))

    def test_other_text_of_the_same_length_does_not(self, tmp_path, before):
        turned = profile(tmp_path, [text.translate(str.maketrans("aeioutn", "xyzqvwj")) for text in prompts()])
        [said] = check(before, turned, ALL_LOST)
        assert said.startswith("pairs of characters in the prompts: distance 0.")
        assert said.endswith(", allowed is 0.40 (retrain.data.max_prompt_text_drift).")

    def test_a_few_records_may_differ_by_chance(self, tmp_path):
        few = ["a cat"] * 12 + [f"a large dog number {n}" for n in range(13)]
        first, second = profile(tmp_path, few), profile(tmp_path, [*few[12:], *prompts(12)])
        limits = DataChecks(max_lost_prompts=1, max_prompt_length_drift=0.01)
        found = of(drift(first, second), "prompt_words")
        assert 0.3 < found.distance < found.chance
        assert "max_prompt_length_drift" not in names(check(first, second, limits))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Rows of shapes as the starter draws them, with the pictures' folder."""
    from visual_grpo.starter.shapes.dataset import draw_dataset

    folder = tmp_path_factory.mktemp("shapes")
    draw_dataset(folder / "raw", 2, 64, 64, seed=0)
    names = sorted(path.name for path in (folder / "raw/target_images").iterdir())
    return folder, [
        {"prompt": f"shape {n % 150}", "target_image": f"raw/target_images/{name}"} for n, name in enumerate(names)
    ]


class TestPictures:
    def test_halves_of_the_same_pictures_pass(self, pictures):
        folder, rows = pictures
        shuffled = random.Random(0).sample(rows, len(rows))
        assert check(profile(folder, shuffled[:150]), profile(folder, shuffled[150:]), ALL_LOST) == []

    def test_darkened_pictures_do_not(self, pictures):
        from PIL import Image

        folder, rows = pictures
        dark = []
        for row in rows:
            name = row["target_image"].replace("/shape", "/dark")
            with Image.open(folder / row["target_image"]) as image:
                image.point(lambda value: 0.7 * value).save(folder / name)
            dark.append(row | {"target_image": name})
        violations = check(profile(folder, rows), profile(folder, dark), LIMITS)
        assert names(violations) == {"max_image_drift"}
        [said] = [text for text in violations if text.startswith("brightness")]
        assert said.startswith("brightness of the target images: median 0.")

    def test_one_picture_in_all_records_does_not(self, pictures):
        folder, rows = pictures
        before = profile(folder, rows)
        same = profile(folder, [row | {"target_image": rows[0]["target_image"]} for row in rows])
        assert names(check(before, same, LIMITS)) == names(check(same, before, LIMITS)) == {"max_image_drift"}
