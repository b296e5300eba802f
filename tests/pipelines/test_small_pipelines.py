"""generate, score and compare: the node of each, on a small model or on pictures that are made here."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from tests.evaluation.defaults import parameters
from tests.evaluation.painter import Painter, records
from tests.evaluation.reports import numbers_only
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import new_folder
from visual_grpo.common.types import PromptRecord
from visual_grpo.data.manifest import RecordTable, write_manifest, write_seen
from visual_grpo.evaluation.samples import read_scores
from visual_grpo.models.run_spec import RunSpec, resolve
from visual_grpo.operations.candidates import ComparedModel, find_model
from visual_grpo.pipelines.compare import compare_adapters, training_differences
from visual_grpo.pipelines.generate import _show_unknown_words, generate_for_prompts
from visual_grpo.pipelines.score import score_folder, summary
from visual_grpo.training import components

SIZE = {"height": 64, "width": 96}
BASE = {"family": "glm_image", "path": "base"}
BRIGHTNESS = {"brightness": {"function": "tests.evaluation.painter:brightness"}}


def draw(folder: Path, model: Path, rollout: dict[str, Any] | None = None, **settings: Any) -> list[dict[str, Any]]:
    """What the list of pictures says; the pictures are in ``folder/drawn``."""
    folder.mkdir(exist_ok=True)
    config = parameters(
        data=SIZE,
        model={"path": str(model)},
        adapter="none",
        generate=settings,
        rewards=BRIGHTNESS,
        output=str(folder),
        sampling={"rollout": rollout or {}},
    )
    drawn = generate_for_prompts(
        resolve(config), folder, folder / "07_model_output/generated", new_folder(folder / "generated")
    ).rename(folder / "drawn")
    return [json.loads(line) for line in (drawn / "metadata.jsonl").read_text().splitlines()]


def test_generate_says_which_pictures_it_replaces(
    tmp_path: Path, pipeline_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "one/07_model_output/generated"
    for folder, said in (
        (tmp_path / "other", ""),
        (tmp_path / "one", f"This replaces 2 earlier pictures in {earlier}."),
    ):
        draw(folder, pipeline_folder, prompt="a red circle")
        printed = capsys.readouterr().out
        assert said in printed
        assert ("replaces" in printed) == bool(said)
        earlier.mkdir(parents=True, exist_ok=True)
        (earlier / "metadata.jsonl").write_text('{"text": "red\u2028circle"}\n{}\n', encoding="utf-8")


def test_pictures_of_a_file_of_prompts_are_listed_and_repeat(tmp_path: Path, pipeline_folder: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle\n一个蓝色的正方形\n")
    file = str(tmp_path / "prompts.txt")
    rows = draw(tmp_path / "one", pipeline_folder, prompts=file, samples=2)
    assert [row["text"] for row in rows] == ["a red circle"] * 2 + ["一个蓝色的正方形"] * 2
    assert len({row["seed"] for row in rows}) == 4
    again = draw(tmp_path / "two", pipeline_folder, prompts=file, samples=2)
    other = draw(tmp_path / "three", pipeline_folder, prompts=file, samples=2, seed=1)
    assert rows == again
    for row, differing in zip(rows, other, strict=True):
        pictures = [
            np.asarray(Image.open(tmp_path / name / "drawn" / row["file_name"])) for name in ("one", "two", "three")
        ]
        assert pictures[0].shape == (64, 96, 3)
        assert (pictures[0] == pictures[1]).all()
        assert (pictures[0] != pictures[2]).any()
        assert row["seed"] != differing["seed"]
    assert (tmp_path / "one/drawn/contact_sheet.png").is_file()


def test_pictures_by_the_rollout_sampler_have_the_size_of_training_samples(
    tmp_path: Path, pipeline_folder: Path
) -> None:
    rollout = {"height": 128, "width": 192, "steps": 2}
    for sampler, size in (("rollout", (192, 128)), ("eval", (96, 64))):
        folder = tmp_path / sampler
        [row] = draw(folder, pipeline_folder, rollout, prompt="a red circle", sampler=sampler)
        with Image.open(folder / "drawn" / row["file_name"]) as picture:
            assert picture.size == size


@pytest.mark.parametrize(
    ("is_small", "prompt", "said"),
    [
        (True, "a small red circle on the left", None),
        (True, "a red dog in the centre of a dog show", "It does not know: dog, centre, of, show"),
        (False, "a red dog", None),
    ],
)
def test_words_that_the_small_model_does_not_know_are_named(
    is_small: bool, prompt: str, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parameters(model={} if is_small else {"path": "a model"})
    _show_unknown_words(config, [PromptRecord(id="p", prompt=prompt)])
    printed = capsys.readouterr().out.strip()
    assert (printed == "") if said is None else printed.endswith(said)


def test_generate_needs_one_of_two_and_an_adapter_or_none(tmp_path: Path, pipeline_folder: Path) -> None:
    [row] = draw(tmp_path / "one", pipeline_folder, prompt="a red circle")
    assert row["text"] == "a red circle"
    for given in ({}, {"prompt": "a", "prompts": "b.txt"}):
        with pytest.raises(UserError, match=r"(?s)either one prompt or a file.*generate\.prompts=prompts\.txt"):
            generate_for_prompts(resolve(parameters(generate=given)), tmp_path, tmp_path, tmp_path)
    with pytest.raises(UserError, match=r"^generate\.prompts: .* does not exist"):
        generate_for_prompts(
            resolve(parameters(generate={"prompts": str(tmp_path / "none.txt")})), tmp_path, tmp_path, tmp_path
        )
    for task, need in (("segmentation", "a query is about an image"), ("i2i", "an edit needs an image to edit")):
        config = parameters(
            generate={"prompt": "the ball"}, data={"task": task, "path": "mine"}, model={"path": "saved"}
        )
        with pytest.raises(
            UserError, match=rf"^generate\.prompt is .* data\.task is {task}: {need}\. .*prompts=FOLDER"
        ):
            generate_for_prompts(replace(resolve(parameters()), config=config), tmp_path, tmp_path, tmp_path)
    with pytest.raises(UserError, match=r"There are no adapters in .* yet"):
        generate_for_prompts(resolve(parameters(generate={"prompt": "a"})), tmp_path / "none", tmp_path, tmp_path)


def pictures(folder: Path, levels: dict[str, int]) -> str:
    """A picture of one grey level with a caption, for each name."""
    folder.mkdir()
    for name, level in levels.items():
        Image.new("RGB", (96, 64), (level,) * 3).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a picture of {name}")
    return str(folder)


def test_pictures_are_scored_by_any_rewards(tmp_path: Path) -> None:
    path = pictures(tmp_path / "in", {"a": 0, "b": 51, "c": 255})
    rewards = {"brightness": {**BRIGHTNESS["brightness"], "weight": 2.0}}
    config = parameters(data=SIZE, score={"path": path}, rewards=rewards)
    out = score_folder(config, new_folder(tmp_path / "out"))
    table = pd.read_csv(out / "scores.csv").set_index("prompt")
    assert table["file"].tolist() == ["a.png", "b.png", "c.png"]
    assert table.index.tolist() == ["a picture of a", "a picture of b", "a picture of c"]
    assert table["brightness"].tolist() == pytest.approx([0.0, 0.2, 1.0])
    assert table["total"].tolist() == pytest.approx((2 * table["brightness"]).tolist())
    assert (out / "sheet.png").is_file()


@pytest.mark.parametrize(("train", "total"), [("all", 0.5), ("dit", 1.0)])
def test_the_total_has_the_weights_of_the_modules_that_are_trained(train: str, total: float, tmp_path: Path) -> None:
    path, modules = (
        pictures(tmp_path / "in", {"grey": 51, "white": 255}),
        {"ar": {"rewards": {"brightness": 0.0}}, "dit": None},
    )
    training = {"model": BASE, "policy": {"train": train}, "modules": modules}
    config = parameters(data=SIZE, score={"path": path}, rewards=BRIGHTNESS, **training)
    scores = pd.read_csv(score_folder(config, new_folder(tmp_path / "out")) / "scores.csv")
    assert scores["total"].tolist() == pytest.approx([0.2 * total, total])


def test_score_says_which_files_it_leaves_out_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = pictures(tmp_path / "in", {"a": 0, "b": 51, "c": 255} | {f"x{number}": 0 for number in range(6)})
    for number in range(5):
        (tmp_path / f"in/x{number}.png").write_bytes(b"no picture")
    (tmp_path / "in/x5.txt").unlink()
    config = parameters(data=SIZE, score={"path": path}, rewards=BRIGHTNESS, output=str(tmp_path))
    out = score_folder(config, new_folder(tmp_path / "out"))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "6 records rejected:"
    assert f"): {path}/x0.png: cannot be read as an image" in said[1]
    assert said[6] == "  and 1 more"
    assert len(pd.read_csv(out / "scores.csv")) == 3
    (tmp_path / "in/x4.png").unlink()
    (tmp_path / "in/x3.png").unlink()
    score_folder(config, new_folder(tmp_path / "out"))
    assert "  x5.png: it has no caption. Write its prompt to x5.txt." in capsys.readouterr().out


def test_the_share_of_variance_shows_a_drowned_reward() -> None:
    loud, quiet = [0.0, 10.0, 0.0, 10.0], [0.0, 0.0, 1.0, 1.0]
    total = [a + 2 * b for a, b in zip(loud, quiet, strict=True)]
    table = pd.DataFrame({"loud": loud, "quiet": quiet, "total": total})
    rows = {row[0]: row for row in summary(table, {"loud": 1.0, "quiet": 2.0})}
    # Variances 25 and 4 x 0.25 of two uncorrelated parts.
    assert (rows["loud"][6], rows["quiet"][6], rows["total"][6]) == ("96%", "4%", None)
    assert rows["loud"][2:6] == ["5", "5", "0", "10"]
    table.loc[0, "quiet"] = float("nan")
    assert {row[0]: row[7] for row in summary(table, {"loud": 1.0, "quiet": 2.0})}["quiet"] == 1


def test_score_needs_a_folder_with_pictures(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"score needs a folder of pictures.*\n.*score\.path=FOLDER"):
        score_folder(parameters(), tmp_path)
    with pytest.raises(UserError, match=r"^score\.path: .*none does not exist\..* --params=score\.path=FOLDER\.$"):
        score_folder(parameters(score={"path": str(tmp_path / "none")}), tmp_path)
    with pytest.raises(UserError, match=r"^score\.path: no records found in "):
        score_folder(parameters(score={"path": str(tmp_path)}), tmp_path)
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    with pytest.raises(UserError, match=r"2 records of .* without a picture"):
        score_folder(parameters(score={"path": str(tmp_path)}, rewards=BRIGHTNESS), tmp_path)


def test_pictures_of_one_prompt_and_source_are_compared_in_one_call(tmp_path: Path) -> None:
    folder = Path(pictures(tmp_path / "in", {f"{n:02}": 255 * (n % 2) for n in range(41)}))
    pictures(folder / "sources", {"x": 0, "y": 255})
    rows = [
        {"file_name": f"{n:02}.png", "text": "as it was", "source_images": [f"sources/{'y' if n == 7 else 'x'}.png"]}
        for n in range(41)
    ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    edits = {"data": {**SIZE, "task": "i2i", "path": "mine"}, "model": {"path": "saved"}}
    config = parameters(**edits, score={"path": str(folder)}, rewards={"group_diversity": {}})
    table = pd.read_csv(score_folder(config, new_folder(tmp_path / "out")) / "scores.csv")
    assert table["file"].tolist() == [row["file_name"] for row in rows]
    assert table["id"].nunique() == 41
    # 21 black and 19 white pictures of one source; the other source's picture is alone.
    expected = [np.nan if n == 7 else (21 if n % 2 else 19) / 39 for n in range(41)]
    assert table["total"].tolist() == pytest.approx(expected, nan_ok=True)


def test_score_refuses_what_it_cannot_judge(tmp_path: Path) -> None:
    path = {"score": {"path": pictures(tmp_path / "in", {"a": 0, "b": 255})}}
    advice = r".*--params=reward=listed,rewards\.jpeg_size\.weight=1"
    videos = {"data": {"frames": 5}, "rewards": {"ssim": {"frames": "all"}}}
    for given, said in (
        ({"rewards": {"ssim": {}}}, rf"ssim has no target to compare them with\.{advice}, "),
        (videos, rf"no target{advice},rewards\.jpeg_size\.frames=all,"),
        ({}, rf"^the rewards of the world shapes judge [^\n]*\nChoose rewards{advice}, "),
        ({"data": {"path": "mine"}}, rf"reward=auto chooses one for a training{advice}, "),
        ({"rewards": {"group_diversity": {}}}, r"no picture could be scored; .* two or more: group_diversity$"),
        ({"data": {"task": "segmentation", "path": "mine"}, "model": {"path": "saved"}}, "answers in text"),
    ):
        with pytest.raises(UserError, match=said):
            score_folder(parameters(**path, **given), tmp_path)


class Trainings:
    """Prepared records, and folders of trainings whose adapters brighten a painter's pictures."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.gains: dict[Path, float] = {}
        self.built: list[tuple[str, tuple[str, ...], Path | None]] = []
        """Base model, modules and adapters of each model that was drawn."""
        found = [*records("held_out", 4), *records("sealed", 2)]
        rows = [{"id": r.id, "prompt": r.prompt, "split": r.split, "metadata": "{}"} for r in found]
        write_manifest(folder / "records.parquet", rows)
        self.records = RecordTable(folder / "records.parquet")
        monkeypatch.setattr(components, "build_model", self._model)

    def add(
        self,
        name: str,
        gain: float,
        data: str | None = None,
        seen: list[str] | None = None,
        module: str = "ar",
        **own: Any,
    ) -> str:
        folder = self.folder / name
        (folder / module).mkdir(parents=True)
        self.gains[folder] = gain
        config = parameters(rewards=BRIGHTNESS, policy={"train": module}, model=BASE, **own)
        facts = {"steps": 2, "seed": 0, "model": "base", "model_digest": "digest"} | {
            "data": data or self.records.digest,
            "parameters": config.model_dump(mode="json"),
            "git.commit": name,
        }
        (folder / "training.json").write_text(json.dumps(facts))
        (folder / "training.csv").write_text("step,reward/total\n1,0.5\n")
        if seen is not None:
            write_seen(({"prompt": prompt, "source_sha256": None} for prompt in seen), folder)
        return str(folder)

    def compare(self, first: str, second: str, page: bool = False, **own: Any) -> dict[str, Any]:
        small = {"images_per_prompt": 2, "bootstrap_samples": 200, "controls": []}
        config = parameters(
            rewards=BRIGHTNESS,
            policy={"train": "ar"},
            model=BASE,
            compare={"first": first, "second": second},
            evaluation=small,
            output=str(self.folder),
            **own,
        )
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        with nullcontext() if page else numbers_only():
            compare_adapters(config, self.records, Path("latest"), new_folder(out)).rename(out)
        found: dict[str, Any] = json.loads((out / "evaluation.json").read_text())
        return found

    def _model(self, spec: RunSpec, adapters: Path | None = None) -> Painter:
        self.built.append((spec.config.model.path, spec.modules, adapters))
        return Painter(gain=0.0 if adapters is None else self.gains[adapters])


@pytest.fixture
def trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainings:
    return Trainings(tmp_path, monkeypatch)


def test_two_adapters_are_compared_on_the_same_prompts_and_seeds(trainings: Trainings) -> None:
    first = trainings.add("first", 0.1)
    second = trainings.add("second", 0.3, grpo={"loss": "dapo"}, tracking={"checkpoint_every": 3})
    found = trainings.compare(first=first, second=second, page=True)
    assert found["headline"]["difference"] == pytest.approx(0.2, abs=0.01)
    assert (found["headline"]["verdict"], found["headline"]["prompts"]) == ("not shown", 4)
    assert set(read_scores(trainings.folder / "out/first")["split"]) == {"held_out"}
    assert found["headline"]["names"] == [f"{first} (ar, 2 steps, seed 0)", f"{second} (ar, 2 steps, seed 0)"]
    assert found["differences"] == {"grpo.loss": ["grpo", "dapo"], "commit": ["first", "second"]}
    assert (
        found["headline"]["notes"][0] == f"The rewards are taken from the training of {second} (ar, 2 steps, seed 0)."
    )
    assert found["headline"]["notes"][1].startswith("One training each: this compares two adapters, not two methods.")
    assert "What differs between the trainings" in (trainings.folder / "out/evaluation.html").read_text()


def test_an_adapter_is_compared_with_the_base_model(trainings: Trainings) -> None:
    found = trainings.compare(first="none", second=trainings.add("second", 0.3))
    assert found["headline"]["difference"] == pytest.approx(0.3, abs=0.02)
    assert found["differences"] == {}
    assert len(found["headline"]["notes"]) == 1, "one adapter alone is compared with no method"
    with pytest.raises(UserError, match="both none"):
        trainings.compare(first="none", second="none")


def test_an_adapter_without_its_history_is_refused_before_anything_is_drawn(trainings: Trainings) -> None:
    first, second = trainings.add("first", 0.1), trainings.add("second", 0.3)
    (Path(second) / "training.csv").unlink()
    with pytest.raises(UserError, match=r"has no training\.csv"):
        trainings.compare(first=first, second=second)
    assert trainings.built == []


def test_both_sides_are_scored_with_the_weights_of_the_one_that_is_judged(trainings: Trainings) -> None:
    heavy: dict[str, Any] = {"modules": {"ar": {"rewards": {"brightness": 3.0}}}}
    first = trainings.add("first", 0.1, module="dit", **heavy)
    second = trainings.add("second", 0.3, **heavy)
    trainings.compare(first=first, second=second, **heavy)
    assert trainings.built == [("base", ("dit",), Path(first)), ("base", ("ar",), Path(second))], "each as trained"
    for name in ("first", "second"):
        scores = read_scores(trainings.folder / "out" / name)
        assert scores["total"].tolist() == pytest.approx((3 * scores["reward/brightness"]).tolist())


def test_trainings_on_other_data_share_prompts(trainings: Trainings, capsys: pytest.CaptureFixture[str]) -> None:
    other = trainings.add("other", 0.1, data="other", seen=["held_out prompt 0", "held_out prompt 3", "else"])
    found = trainings.compare(first=other, second=trainings.add("second", 0.3))
    assert found["headline"]["prompts"] == 2
    assert "Compared on the 2 of 4 held-out records that no training has seen" in capsys.readouterr().out
    assert found["differences"]["data"] == ["other", trainings.records.digest]


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ([f"held_out prompt {number}" for number in range(4)], "each of the 4 held-out records"),
        (None, r"seen\.json is missing"),
    ],
)
def test_nothing_in_common_is_refused(trainings: Trainings, seen: list[str] | None, said: str) -> None:
    other = trainings.add("other", 0.1, data="other", seen=seen)
    with pytest.raises(UserError, match=said):
        trainings.compare(first=other, second=trainings.add("second", 0.3))


def test_data_of_which_nothing_is_held_out_are_no_ground_for_a_comparison(trainings: Trainings) -> None:
    write_manifest(trainings.folder / "train.parquet", [{"id": "a", "prompt": "a", "split": "train"}])
    trainings.records = RecordTable(trainings.folder / "train.parquet")
    with pytest.raises(UserError, match="none of these records is held out, so there is nothing to judge by"):
        trainings.compare(first="none", second=trainings.add("second", 0.3))


def side(folder: Path, trained: tuple[str, ...], **own: Any) -> ComparedModel:
    for module in trained:
        (folder / module).mkdir(parents=True)
    return ComparedModel(folder.name, folder, {"parameters": parameters(**own).model_dump(mode="json")})


def test_settings_that_decided_nothing_in_either_training_are_no_difference(tmp_path: Path) -> None:
    elsewhere = {"plan": {"prompt_words": 9}, "model": {"device": "cuda"}, "evaluation": {"seed": 3}}
    overridden: dict[str, Any] = elsewhere | {"modules": {"ar": {"kl_weight": 0.5}, "dit": {"learning_rate": 0.5}}}
    dit, too = side(tmp_path / "dit", ("dit",)), side(tmp_path / "too", ("dit",), **overridden)
    assert training_differences(dit, too) == {"evaluation.seed": [0, 3], "modules.dit.learning_rate": [0.0006, 0.5]}
    both = side(tmp_path / "both", ("ar", "dit"), **overridden)
    assert sorted(training_differences(dit, both)) == [
        *("evaluation.seed", "modules.ar.kl_weight", "modules.dit.learning_rate")
    ]
    own: dict[str, Any] = {"modules": {"dit": {"group_size": 4, "lora": {"rank": 2}, "rewards": {"shapes": 2.0}}}}
    found = training_differences(dit, side(tmp_path / "own", ("dit",), **own))
    assert {name.split(".")[2]: first for name, (first, _) in found.items() if isinstance(first, str)} == {
        "group_size": "as grpo",
        "lora": "as policy",
        "rewards": "as rewards",
    }


def test_the_latest_adapter_is_named_by_its_run_too(trainings: Trainings) -> None:
    folder = Path(trainings.add("latest", 0.1))
    file = folder / "training.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mlflow_run_id": "03a38eb8" * 4}))
    assert find_model("latest", folder, parameters(model=BASE)).name == "latest 03a38eb8 (ar, 2 steps, seed 0)"
