import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from tests.evaluation.painter import EVAL_SAMPLER, ROLLOUT, Painter, brightness, records
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import read_image, to_tensor
from visual_grpo.common.types import Needs, PromptRecord, RewardOutput, TextSample
from visual_grpo.config import EvaluationConfig
from visual_grpo.evaluation.comparison import compare, join
from visual_grpo.evaluation.samples import (
    Request,
    distinct_prompts,
    file_stem,
    generate_and_score,
    image_seed,
    plan_images,
    read_scores,
    requests,
)
from visual_grpo.rewards.combine import RewardSet

SAMPLERS = {"rollout": ROLLOUT, "eval": EVAL_SAMPLER}


def scorer() -> RewardSet:
    def halves(prompts, samples):
        top = torch.tensor([float(s[:, :16].float().mean()) for s in samples])
        return RewardOutput(values=torch.full((len(samples),), torch.nan), parts={"top": top})

    return RewardSet({"brightness": (brightness, 2.0), "halves": (halves, 0.0)})


def asked_for(found: list[PromptRecord], samples: int) -> list[Request]:
    return requests(found, samples, 0, "held_out")


def made(
    folder: Path, asked: list[Request], policy: Any = None, judge: RewardSet | None = None, batch_size: int = 2
) -> pd.DataFrame:
    """Scores at the eval sampler, read from their file."""
    draws = {"eval": (EVAL_SAMPLER, asked)}
    generate_and_score(policy or Painter(), judge or scorer(), draws, folder, batch_size=batch_size)
    return read_scores(folder)


def paint(folder: Path, batch_size: int = 4, advance: Callable[..., object] | None = None) -> pd.DataFrame:
    """Of two splits at two samplers."""
    splits = {"held_out": records("held_out", 3), "eval": records("eval", 2)}
    plan = plan_images(splits, EvaluationConfig(every=0, prompts=1, images_per_prompt=2), SAMPLERS)
    return generate_and_score(Painter(), scorer(), plan, folder, batch_size=batch_size, advance=advance)


def test_scores_are_those_of_the_files(tmp_path: Path) -> None:
    drawn, table = paint(tmp_path), read_scores(tmp_path)
    pd.testing.assert_frame_equal(table, drawn)
    assert table.attrs == {
        "weights": {"brightness": 2.0, "halves": 0.0},
        "judges": {},
        "measures": {},
        "guards": {},
        "comparing": [],
    }
    kept = [to_tensor(read_image(tmp_path / file)) for file in table["file"]]
    again = scorer()([PromptRecord(id=i, prompt="") for i in table["id"]], kept)
    assert table["total"].tolist() == again.total.tolist()
    assert table["reward/brightness"].tolist() == again.rewards["brightness"].tolist()
    assert table["part/halves/top"].tolist() == again.parts["halves/top"].tolist()
    assert table["reward/halves"].isna().all()


def test_every_prompt_is_generated_with_every_sampler_and_its_own_seed(tmp_path: Path) -> None:
    table = paint(tmp_path)
    assert len(table) == 2 * (3 + 2) * 2
    assert len(list(tmp_path.glob("*/*.png"))) == len(table) == table["file"].nunique()
    for row in table.to_dict("records"):
        assert row["seed"] == image_seed(0, row["id"], row["index"])
        assert row["file"].startswith(f"{row['sampler']}/")
    judged, rollout = (table[table["sampler"] == name] for name in ("eval", "rollout"))
    assert judged["seed"].tolist() == rollout["seed"].tolist()


def test_batches_change_nothing_and_progress_counts_all(tmp_path: Path) -> None:
    done: list[int] = []
    one = paint(tmp_path / "a", batch_size=1)
    many = paint(tmp_path / "b", batch_size=7, advance=done.append)
    pd.testing.assert_frame_equal(one, many)
    assert done == [7, 3, 7, 3]


def test_each_prompt_is_evaluated_once_and_a_limit_is_stable_and_unbiased() -> None:
    found = distinct_prompts(reversed(records("eval", 3, per_prompt=4)), None)
    assert [record.id for record in found] == ["eval-00-0", "eval-01-0", "eval-02-0"]
    edits = [PromptRecord(id=i, prompt="make it red", source_images=(Path(i),)) for i in "ab"]
    assert len(distinct_prompts(edits, None)) == 2, "with other sources it is another prompt"
    few, more = (distinct_prompts(records("eval", 40), limit) for limit in (10, 20))
    assert len(few) == 10
    assert {r.id for r in few} < {r.id for r in more}
    assert [r.id for r in few] != [f"eval-{n:02d}-0" for n in range(10)]


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

    with pytest.raises((TypeError, ValueError), match=complaint):
        made(tmp_path, asked_for(records("eval", 1), 2), Broken())


def test_any_id_gives_a_file_name_of_its_own(tmp_path: Path) -> None:
    alike = ["a/b", "a b", "a_b", "A_b", "a_B", "x" * 300, "x" * 301, "../x", "a:b", "红" * 100]
    assert len({file_stem(name).lower() for name in alike}) == len(alike)
    for name in alike:
        (tmp_path / f"{file_stem(name)}_12.png").touch()
    assert len(list(tmp_path.iterdir())) == len(alike)
    assert file_stem("eval-00.1_x") == "eval-00.1_x"


def test_seeds_never_change_and_differ_by_seed_record_and_index() -> None:
    # Fixed values: a change would make all existing baselines unusable for pairing.
    assert image_seed(0, "a", 0) == 9196027511977055662
    assert image_seed(7, "红", 3) == 5488351668699260486
    seeds = {image_seed(s, r, i) for s in range(5) for r in ("a", "b", "a0", "1") for i in range(12)}
    assert len(seeds) == 5 * 4 * 12
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62, "the top bit is in use"


def test_units_and_sources_stand_beside_the_scores(tmp_path: Path) -> None:
    names = ["prepared/a.png", "prepared/b.png"]
    found = [
        PromptRecord(id="a", prompt="left wing", split_group="bird"),
        PromptRecord(id="b", prompt="right wing", split_group="bird"),
        PromptRecord(
            id="c",
            prompt="mix them",
            source_images=tuple(tmp_path / name for name in names),
            target_image=tmp_path / "t.png",
        ),
    ]
    folder = tmp_path / "scores"
    rows = made(folder, asked_for(found, 1)).set_index("id")
    assert rows["unit"].to_dict() == {"a": "bird", "b": "bird", "c": "c"}
    assert rows["source"]["a"] is None
    assert [(folder / path).resolve() for path in rows["source"]["c"]] == [(tmp_path / n).resolve() for n in names]
    assert not any(Path(path).is_absolute() for path in rows["source"]["c"])
    assert (folder / rows["target"]["c"]).resolve() == (tmp_path / "t.png").resolve()
    assert not {"source", "target", "answer"} & set(paint(tmp_path / "plain"))


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
    tables = []
    for size in (2, 9):
        ranking, painter = Ranking(), Painter()
        asked, judge = asked_for(records("held_out", 3), 3), RewardSet({"rank": (ranking, 1.0)})
        tables.append(made(tmp_path / str(size), asked, painter, judge, batch_size=size))
        assert all(count % 3 == 0 for count in ranking.sizes)
        assert painter.batches[0] == size
    assert tables[0].equals(tables[1])
    assert tables[0].attrs["comparing"] == ["rank"]
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

    asked = asked_for(records("held_out", 4), 1)
    waited = made(tmp_path / "a", asked, Second(), RewardSet({"b": (Waiting(), 1.0)}))
    plain = made(tmp_path / "b", asked, judge=RewardSet({"b": (brightness, 1.0)}))
    assert waited.equals(plain)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reward")]


class Answerer:
    """Answers with the number of its record, wrong by 1 to 3 times ``error``."""

    def __init__(self, error: int) -> None:
        self.error = error

    def generate(self, prompts, seeds, sampler):
        answers = [record.metadata["number"] * (1 + self.error) for record in prompts]
        return [TextSample(text=str(answer), finished=True, frame=(32, 32)) for answer in answers]


def overlap(prompts: Sequence[PromptRecord], samples: Sequence[TextSample]) -> RewardOutput:
    """Of two columns that are 8 wide: their IoU, and its numerator and denominator."""
    shifts = [abs(int(s.text) - p.metadata["number"]) for p, s in zip(prompts, samples, strict=True)]
    inside = 8.0 - torch.tensor(shifts)
    return RewardOutput(values=inside / (16 - inside), ratios={"ciou": (inside, 16 - inside)})


class OfMarked:
    """Scores the prompts with a mark; ``tells``: its check of records says so."""

    def __init__(self, tells: bool) -> None:
        self.tells = tells

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[torch.Tensor]) -> list[float | None]:
        return [1.0 if record.prompt.endswith("!") else None for record in prompts]

    def check_records(self, found: Sequence[PromptRecord]) -> None:
        if self.tells and not any(record.prompt.endswith("!") for record in found):
            raise UserError("no prompt has a mark")


def test_records_that_no_reward_can_score_may_come_first(tmp_path: Path) -> None:
    found = records("held_out", 8)
    found[6:] = [replace(record, prompt=f"{record.prompt}!") for record in found[6:]]
    judge = RewardSet({"marked": (OfMarked(tells=True), 1.0)})
    plan = {"eval": (EVAL_SAMPLER, asked_for(found, 1))}
    table = generate_and_score(Painter(), judge, plan, tmp_path, batch_size=2)
    assert table["total"].notna().tolist() == [False] * 6 + [True] * 2


@pytest.mark.parametrize(("tells", "judged"), [(False, 2), (True, 8)])
def test_nothing_but_unscored_samples_is_refused_at_once_if_they_should_be_scored(
    tmp_path: Path, tells: bool, judged: int
) -> None:
    judge = RewardSet({"marked": (OfMarked(tells), 1.0)})
    with pytest.raises(UserError, match=rf"none of {judged} samples could be scored.*unscored were: marked"):
        made(tmp_path, asked_for(records("held_out", 8), 1), judge=judge)


def test_texts_are_kept_and_their_ratios_compared_as_sums_over_sums(tmp_path: Path) -> None:
    found = [PromptRecord(id=f"q{n}", prompt=f"where is {n}?", metadata={"number": n}) for n in (1, 2, 3)]
    judge = RewardSet({"overlap": (overlap, 1.0)})
    tables = [made(tmp_path / str(error), asked_for(found, 2), Answerer(error), judge) for error in (2, 1)]
    entries = {entry["name"]: entry for entry in compare(*tables, bootstrap_samples=200, seed=0)}
    assert list(entries) == ["total", "overlap", "overlap/ciou"]
    ratio = entries["overlap/ciou"]
    assert (ratio["optimised"], ratio["win_rate"]) == (False, 1)
    for table, mean in zip(tables, ("baseline", "trained"), strict=True):
        above, below = (table[f"{side}/overlap/ciou"].sum() for side in ("numerator", "denominator"))
        assert ratio[mean] == pytest.approx(above / below)
        assert ratio[mean] != pytest.approx(table["reward/overlap"].mean())
    answers = join(*tables)[["answer_baseline", "answer_trained"]].values.tolist()
    assert answers[::2] == [["3", "2"], ["6", "4"], ["9", "6"]]
