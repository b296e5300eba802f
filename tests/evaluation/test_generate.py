import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from tests.evaluation.defaults import parameters
from tests.evaluation.painter import ROLLOUT, STOCK, Painter, brightness, records
from visual_grpo.components import make_plan
from visual_grpo.errors import UserError
from visual_grpo.evaluation.generate import (
    Advance,
    conditions,
    distinct_prompts,
    draw_and_score,
    file_stem,
    image_seed,
    plan_images,
    read_scores,
)
from visual_grpo.images import read_image, to_tensor
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.types import Needs, PromptRecord, RewardOutput

SAMPLERS = {"rollout": ROLLOUT, "stock": STOCK}


def scorer() -> RewardSet:
    def halves(prompts, samples):
        top = torch.tensor([float(s[:, :16].float().mean()) for s in samples])
        return RewardOutput(values=torch.full((len(samples),), torch.nan), parts={"top": top})

    return RewardSet({"brightness": (brightness, 2.0), "halves": (halves, 0.0)})


def draw(folder: Path, batch_size: int = 4, advance: Advance | None = None) -> pd.DataFrame:
    plan = plan_images(
        {"held_out": records("held_out", 3), "eval": records("eval", 2)},
        seed=0,
        images_per_prompt=2,
        max_prompts=None,
    )
    return draw_and_score(
        Painter(),
        scorer(),
        plan,
        SAMPLERS,
        folder,
        batch_size=batch_size,
        facts={"seed": 0},
        advance=advance,
    )


def test_scores_are_those_of_the_files(tmp_path: Path) -> None:
    table = draw(tmp_path)
    kept = [to_tensor(read_image(tmp_path / file)) for file in table["file"]]
    again = scorer()([PromptRecord(id=i, prompt="") for i in table["id"]], kept)
    assert table["total"].tolist() == again.total.tolist()
    assert table["reward/brightness"].tolist() == again.rewards["brightness"].tolist()
    assert table["part/halves/top"].tolist() == again.parts["halves/top"].tolist()
    assert table["reward/halves"].isna().all()


def test_every_prompt_is_generated_with_every_sampler_and_its_own_seed(tmp_path: Path) -> None:
    table = draw(tmp_path)
    assert len(table) == 2 * (3 + 2) * 2
    assert len(list(tmp_path.glob("*/*.png"))) == len(table) == table["file"].nunique()
    for row in table.to_dict("records"):
        assert row["seed"] == image_seed(0, row["id"], row["index"])
        assert row["file"].startswith(f"{row['sampler']}/")
    stock, rollout = (table[table["sampler"] == name] for name in ("stock", "rollout"))
    assert stock["seed"].tolist() == rollout["seed"].tolist()


def test_batches_change_nothing_and_progress_counts_all(tmp_path: Path) -> None:
    done: list[int] = []
    one = draw(tmp_path / "a", batch_size=1)

    def advance(n: int = 1, **fields: float) -> None:
        done.append(n)

    many = draw(tmp_path / "b", batch_size=7, advance=advance)
    pd.testing.assert_frame_equal(one, many)
    assert done == [7, 3, 7, 3]


def test_the_file_keeps_conditions_and_weights(tmp_path: Path) -> None:
    drawn = draw(tmp_path)
    read = read_scores(tmp_path)
    pd.testing.assert_frame_equal(read, drawn)
    assert read.attrs == {"facts": {"seed": 0}, "weights": {"brightness": 2.0, "halves": 0.0}}


def test_records_of_one_prompt_are_evaluated_once() -> None:
    found = distinct_prompts(reversed(records("eval", 3, per_prompt=4)), None)
    assert [record.id for record in found] == ["eval-00-0", "eval-01-0", "eval-02-0"]


def test_the_same_prompt_with_other_sources_is_a_distinct_prompt() -> None:
    edits = [PromptRecord(id=i, prompt="make it red", source_images=(Path(i),)) for i in "ab"]
    assert len(distinct_prompts(edits, None)) == 2


def test_a_limit_is_stable_and_not_biased_to_the_first() -> None:
    few = distinct_prompts(records("eval", 40), 10)
    more = distinct_prompts(records("eval", 40), 20)
    assert len(few) == 10
    assert {r.id for r in few} < {r.id for r in more}
    assert [r.id for r in few] != [f"eval-{n:02d}-0" for n in range(10)]


def test_no_prompts_to_evaluate_says_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"raise data\.eval_share or data\.held_out_share"):
        draw_and_score(Painter(), scorer(), [], SAMPLERS, tmp_path, batch_size=2, facts={})


@pytest.mark.parametrize(
    ("images", "complaint"),
    [
        ([torch.zeros(3, 32, 32, dtype=torch.uint8)], "asked for 2 samples and returned 1"),
        ([torch.zeros(3, 32, 32)] * 2, r"'eval-00-0'.*torch.float32 \[3, 32, 32\]"),
        ([torch.zeros(32, 32, 3, dtype=torch.uint8)] * 2, r"\[32, 32, 3\]"),
        ([None, None], "NoneType"),
    ],
)
def test_a_policy_that_returns_no_images_is_refused(tmp_path: Path, images: list, complaint: str) -> None:
    class Broken(Painter):
        def generate(self, prompts, seeds, sampler):
            return images

    plan = plan_images({"eval": records("eval", 1)}, seed=0, images_per_prompt=2, max_prompts=None)
    with pytest.raises((TypeError, ValueError), match=complaint):
        draw_and_score(Broken(), scorer(), plan, SAMPLERS, tmp_path, batch_size=2, facts={})


@pytest.mark.parametrize("name", ["a/b", "../x", "a b", "a:b", "x" * 300, "红" * 100])
def test_any_id_gives_a_file_name(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{file_stem(name)}_12.png").touch()
    assert len(list(tmp_path.iterdir())) == 1


def test_ids_with_the_same_cleaned_name_get_different_files() -> None:
    alike = ["a/b", "a b", "a_b", "A_b", "a_B", "x" * 300, "x" * 301]
    assert len({file_stem(name).lower() for name in alike}) == len(alike)
    assert file_stem("eval-00.1_x") == "eval-00.1_x"


def test_records_that_are_held_out_together_are_one_unit(tmp_path: Path) -> None:
    found = [
        PromptRecord(id="a", prompt="left wing", held_with="bird"),
        PromptRecord(id="b", prompt="right wing", held_with="bird"),
        PromptRecord(id="c", prompt="a cat"),
    ]
    plan = plan_images({"eval": found}, seed=0, images_per_prompt=1, max_prompts=None)
    draw_and_score(Painter(), scorer(), plan, {"stock": STOCK}, tmp_path, batch_size=1, facts={})
    assert read_scores(tmp_path).set_index("id")["unit"].to_dict() == {"a": "bird", "b": "bird", "c": "c"}


def test_the_sources_of_an_edit_are_named_relative_to_the_scores(tmp_path: Path) -> None:
    names = ["prepared/a.png", "prepared/b.png"]
    found = [
        PromptRecord(id="both", prompt="mix them", source_images=tuple(tmp_path / name for name in names)),
        PromptRecord(id="none", prompt="a cat"),
    ]
    plan = plan_images({"eval": found}, seed=0, images_per_prompt=1, max_prompts=None)
    folder = tmp_path / "scores"
    draw_and_score(Painter(), scorer(), plan, {"stock": STOCK}, folder, batch_size=1, facts={})
    both, none = read_scores(folder)["source"]
    assert [(folder / path).resolve() for path in both] == [(tmp_path / name).resolve() for name in names]
    assert not any(Path(path).is_absolute() for path in both)
    assert none is None


def test_images_from_prompts_have_no_columns_of_sources_and_answers(tmp_path: Path) -> None:
    assert not {"source", "answer"} & set(draw(tmp_path))


def conditions_of(changes: dict[str, Any], model: str = "m", dataset: str = "d") -> dict[str, Any]:
    config = parameters(**changes)
    plan = make_plan(config)
    return conditions(config, plan.samplers, model=model, dataset=dataset, controls=plan.controls)


def test_conditions_of_a_language_model_contain_its_options() -> None:
    language = {
        "data": {"task": "segmentation"},
        "starter": {"world": "scenes"},
        "modules": {"dit": None},
        "evaluation": {"controls": []},
        "sampling": {
            "rollout": {"steps": None, "guidance_scale": None},
            "stock": {"steps": None, "guidance_scale": None},
        },
    }
    base = conditions_of(language)
    assert conditions_of(language | {"model": {"options": {"max_tokens": 5}}}) != base
    assert conditions_of(language | {"policy": {"flow": {"noise": 0.5}}}) == base


def test_conditions_contain_the_files_that_a_reward_is_given(tmp_path: Path) -> None:
    file = tmp_path / "head.json"
    changes = {"rewards": {"shapes": {"options": {"head": str(file)}}}}
    absent = conditions_of(changes)
    file.write_text("1")
    first = conditions_of(changes)
    file.write_text("2")
    assert absent != first != conditions_of(changes)


def test_conditions_contain_exactly_what_images_and_scores_depend_on() -> None:
    base = conditions_of({})
    for unchanged in (
        {"grpo": {"learning_rate": 1.0}},
        {"seed": 5},
        {"evaluation": {"batch_size": 3}},
        {"model": {"device": "cpu"}},
        # One baseline serves every module: totals are computed again, and all three samplers are always judged.
        {"policy": {"train": "ar"}},
        {"rewards": {"shapes": {"weight": 2.0}}},
        {"modules": {"dit": {"rewards": {"palette": 2.0}}}},
    ):
        assert conditions_of(unchanged) == base, unchanged
    changed: dict[str, Any]
    for changed in (
        {"evaluation": {"seed": 5}},
        {"evaluation": {"controls": []}},
        {"data": {"height": 64}},
        {"sampling": {"stock": {"steps": 3}}},
        {"rewards": {"shapes": {"options": {"strict": True}}}},
        {"rewards": {"shapes": {"clip": [0.0, 0.5]}}},
        {"rewards": {"shapes": {"clip": [0.0, None], "only_where": {"palette": 0.5}}}},
        {"policy": {"flow": {"noise": 0.5}}},
        {"evaluation": {"images_per_prompt": 2}},
        {"model": {"dtype": "bfloat16"}},
        {"model": {"base_weights": "4bit"}},
        {"model": {"device": "cuda:1"}},
    ):
        assert conditions_of(changed) != base, changed
    assert conditions_of({}, model="other") != base
    assert conditions_of({}, dataset="other") != base


def test_a_reward_of_ones_own_whose_code_was_edited_does_not_pair(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "an_edited_reward.py"
    rewards = {"mine": {"function": "an_edited_reward:score"}, "palette": {"weight": 0.5}}

    def made() -> dict[str, Any]:
        found = conditions(parameters(rewards=rewards), {}, model="m", dataset="d")["rewards"]
        assert "code" not in found["palette"]
        return found["mine"]

    file.write_text("def score(prompts, images): return [1.0] * len(images)")
    before = made()
    assert made() == before
    file.write_text("def score(prompts, images): return [5.0] * len(images)")
    assert made()["code"] != before["code"]


def test_other_weights_on_the_hub_do_not_pair() -> None:
    config = parameters(rewards={"clip_score": {}, "palette": {"weight": 0.5}})

    def made(commit: str) -> dict[str, Any]:
        return conditions(config, {}, model="m", dataset="d", commits={"clip_score": {"model": commit}})["rewards"]

    assert made("a" * 40) == made("a" * 40) != made("b" * 40)
    assert "commits" not in made("a" * 40)["palette"]


class Ranking:
    """A sample's rank among those of its prompt, divided by their number."""

    needs = Needs(whole_groups=True)

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, prompts, samples):
        self.sizes.append(len(samples))
        means = [float(sample.float().mean()) for sample in samples]
        groups = [[mean for mean, other in zip(means, prompts, strict=True) if other.id == own.id] for own in prompts]
        return [sorted(group).index(mean) / len(group) for group, mean in zip(groups, means, strict=True)]


def test_a_reward_that_compares_samples_gets_all_of_a_prompt_whatever_the_batch(tmp_path: Path) -> None:
    plan = plan_images({"held_out": records("held_out", 3)}, seed=0, images_per_prompt=3, max_prompts=None)
    tables = []
    for size in (2, 9):
        ranking, painter = Ranking(), Painter()
        judge = RewardSet({"rank": (ranking, 1.0)})
        drawn = draw_and_score(painter, judge, plan, {"stock": STOCK}, tmp_path / str(size), batch_size=size, facts={})
        assert all(count % 3 == 0 for count in ranking.sizes)
        assert painter.batches[0] == size
        tables.append(drawn)
    assert tables[0].equals(tables[1])
    assert sorted(tables[0]["total"][:3]) == pytest.approx([0, 1 / 3, 2 / 3])


def test_a_batch_is_judged_elsewhere_while_the_next_is_drawn(tmp_path: Path) -> None:
    """The judge answers only when the next batch is being drawn: without overlap, it would wait for ever."""
    drawing = threading.Event()

    class Waiting:
        waits = True

        def __call__(self, prompts, samples):
            assert drawing.wait(20), "nothing was drawn meanwhile"
            return brightness(prompts, samples)

    class Second(Painter):
        def generate(self, *arguments):
            if self.batches:
                drawing.set()
            return super().generate(*arguments)

    plan = plan_images({"held_out": records("held_out", 4)}, seed=0, images_per_prompt=1, max_prompts=None)
    waited = draw_and_score(
        Second(), RewardSet({"b": (Waiting(), 1.0)}), plan, {"stock": STOCK}, tmp_path / "a", batch_size=2, facts={}
    )
    plain = draw_and_score(
        Painter(), RewardSet({"b": (brightness, 1.0)}), plan, {"stock": STOCK}, tmp_path / "b", batch_size=2, facts={}
    )
    assert waited.equals(plain)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reward")]
