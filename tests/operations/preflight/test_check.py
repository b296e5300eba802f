"""What is refused before a run, in one message, and which rewards it uses otherwise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.data.folders import FOLDERS, photo
from tests.data.making import jsonl
from tests.evaluation.defaults import parameters
from visual_grpo.common.errors import CombinedError, Remedy, UserError
from visual_grpo.common.types import Needs, PromptRecord
from visual_grpo.config import Parameters
from visual_grpo.config.presets import TARGET_JUDGE
from visual_grpo.config.validation import with_target_judge
from visual_grpo.models.family import find_family
from visual_grpo.operations import command
from visual_grpo.operations.command import Command
from visual_grpo.operations.preflight.check import check, check_before_run, check_model, pinned
from visual_grpo.operations.preflight.findings import Findings
from visual_grpo.starter.worlds import SHAPES

PLAIN = PromptRecord(id="plain", prompt="a cat")
QUOTED = PromptRecord(id="quoted", prompt='a sign that says "OPEN"')
TEXT = PromptRecord(id="text", prompt="a sign", metadata={"text": "OPEN"})
TARGET = PromptRecord(id="target", prompt="a cat", target_image=Path("a.png"))
EDIT = PromptRecord(id="edit", prompt="make it red", target_image=Path("a.png"), source_images=(Path("a.png"),))
QUOTED_TARGET = PromptRecord(id="both", prompt='"OPEN"', target_image=Path("a.png"))
GUARDS = {"edge_density": 0.0, "colour_entropy": 0.0}
WHOLE = {"base_model", "records", "baseline", "adapters", "trained"}
TRAIN = {"adapters", "training_history"}
SCORED = ("training", "rewards")
TAGS = {
    "base_model": ("training",),
    "generated": ("model",),
    "comparison": ("model",),
    **dict.fromkeys(("baseline", "adapters", "trained"), SCORED),
}


def test_a_released_model_on_a_cpu_is_told_before_any_work(tmp_path: Path) -> None:
    for size, told in ((10**9, []), (5 * 10**9, ["5.0 GB of weights and runs on the CPU (model.device is cpu)"])):
        (tmp_path / "text_encoder").mkdir(exist_ok=True)
        for part in ("model", "text_encoder/model"):
            with (tmp_path / f"{part}.safetensors").open("wb") as file:
                file.truncate(size // 2)
        model = {"path": str(tmp_path), "device": "cpu"}
        notes = pinned(parameters(model=model))[1]
        assert [said in note for said, note in zip(told, notes, strict=True)] == [True] * len(told)


def never() -> Sequence[PromptRecord]:
    raise AssertionError("a run that prepares the records reads them from data.path")


def settle(path: Path | None, outputs: set[str] = WHOLE, records: Any = never, **changes: Any) -> Parameters:
    own = {} if path is None else {"data": {"path": str(path), **changes.pop("data", {})}}
    config = parameters(**own, **changes)
    tags = set().union(*(TAGS.get(name, ()) for name in outputs))
    return check_before_run(config, outputs, tags, records)[0]


def refusal(*args: Any, **changes: Any) -> str:
    with pytest.raises(UserError) as refused:
        settle(*args, **changes)
    return str(refused.value)


@pytest.mark.parametrize(
    ("kind", "task", "reward", "used"),
    [
        ("captions", "t2i", "target", {"ssim": 1.0, **GUARDS, TARGET_JUDGE: 0.0}),
        ("edits", "i2i", "edit", {"ssim": 1.0, "source_ssim": 0.0, **GUARDS, TARGET_JUDGE: 0.0}),
    ],
)
def test_the_rewards_follow_from_the_records(tmp_path, kind, task, reward, used):
    FOLDERS[kind](tmp_path / kind)
    config = settle(tmp_path / kind, data={"task": task})
    assert config.reward == reward
    assert config.weights(["dit"]) == used
    (tmp_path / "prompts.txt").write_text("\n".join(f'a sign that says "SHOP {n}"' for n in range(20)))
    assert list(settle(tmp_path / "prompts.txt").rewards) == ["ocr", *GUARDS]


@pytest.mark.parametrize(
    ("records", "preset"),
    [
        ([PLAIN], None),
        ([TARGET, TARGET], "target"),
        ([TARGET, EDIT], "edit"),
        ([TARGET, PLAIN], None),
        ([QUOTED, TEXT], "text"),
        ([QUOTED, PLAIN], None),
        ([QUOTED, QUOTED_TARGET], "text"),
        ([QUOTED_TARGET], "target"),
        ([], None),
    ],
)
def test_a_preset_is_chosen_only_if_it_can_judge_every_record(records, preset):
    findings = Findings("t2i")
    for record in records:
        findings.add(record)
    assert findings.preset() == preset


def test_a_run_of_prepared_records_looks_at_them():
    records = [PromptRecord(id="a", prompt='"OPEN"')]
    assert settle(Path("gone"), TRAIN, lambda: records).reward == "text"
    removed = settle(Path("gone"), TRAIN, lambda: records, rewards={"edge_density": None})
    assert list(removed.rewards) == ["ocr", "colour_entropy"], "null counts, whoever chooses the preset"
    lacking = (
        r"fits the 1 record in gone: without a target_image are 1 \('plain'\), without quoted text in\nthe prompt 1"
    )
    with pytest.raises(UserError, match=lacking):
        settle(Path("gone"), TRAIN, lambda: [PLAIN])


MINE: dict[str, Any] = {"mine": {"function": "tests.evaluation.painter:brightness"}}
SECOND = {"function": "tests.operations.preflight.test_check:other", "options": {"model": "x"}, "judge": True}
ADDED = f"Judge {TARGET_JUDGE}, added because records have target images: a second opinion"
SOME = f"Judge {TARGET_JUDGE} scores only samples of the 2 of 3 records that have a target image."


@pytest.mark.parametrize(
    ("records", "changes", "judges", "notes"),
    [
        ([TARGET], {}, [TARGET_JUDGE], [ADDED]),
        ([TARGET], {"rewards": MINE}, [TARGET_JUDGE], [ADDED]),
        ([QUOTED_TARGET, QUOTED, QUOTED_TARGET], {}, [TARGET_JUDGE], [ADDED, SOME]),
        ([PLAIN], {"rewards": MINE}, [], []),
        ([TARGET], {"rewards": {TARGET_JUDGE: None}}, [], []),
        ([TARGET], {"rewards": {**MINE, TARGET_JUDGE: None}}, [], []),
        ([TARGET], {"rewards": {TARGET_JUDGE: {}}}, [], []),  # Optimised.
        ([TARGET], {"rewards": {**MINE, TARGET_JUDGE: {"weight": 0}}}, [], []),  # A guard.
        ([TARGET], {"rewards": {**MINE, "second": SECOND}}, ["second"], []),
        ([TARGET], {"reward": "listed", "rewards": MINE}, [], []),
        (
            [TARGET, PLAIN, TARGET],
            {"reward": "listed", "rewards": {**MINE, TARGET_JUDGE: {"judge": True}}},
            [TARGET_JUDGE],
            [SOME],
        ),
    ],
)
def test_a_similarity_to_the_targets_judges_where_no_judge_is_named(records, changes, judges, notes):
    given = parameters(data={"path": "gone"}, **changes)
    config, _, told = check_before_run(given, TRAIN, set(SCORED), lambda: records)
    assert [name for name, reward in config.rewards.items() if reward.judge] == judges
    assert [note.startswith(line) for note, line in zip(told, notes, strict=True)] == [True] * len(notes)
    again, _, told = check_before_run(parameters(**config.public()), TRAIN, set(SCORED), lambda: records)
    assert (again.rewards, [line for line in told if line.startswith(ADDED)]) == (config.rewards, [])


def test_videos_are_judged_frame_by_frame():
    video = {"frames": 5, "path": "gone"}
    given = with_target_judge(parameters(reward=None, data=video, rewards={"motion_consistency": {}}))
    assert given.rewards[TARGET_JUDGE].frames == "all"


class LikeTheSource:
    needs = Needs(source=True)

    def __call__(self, prompts, images):
        return [0.0 for _ in images]


SOURCE_JUDGE = {"function": "tests.operations.preflight.test_check:LikeTheSource", "judge": True}


@pytest.mark.parametrize(
    ("judge", "records", "refused"),
    [
        (
            {"ssim": {"judge": True}},
            [PLAIN, QUOTED],
            "the judge ssim compares with a target image, and none of 2 records has",
        ),
        ({"ssim": {"judge": True}}, [PLAIN, TARGET], None),
        (
            {"near": SOURCE_JUDGE},
            [PLAIN, TARGET],
            "near compares with a source image, and none of 2 records has one: add it",
        ),
        ({"near": SOURCE_JUDGE}, [PLAIN, EDIT], None),
    ],
)
def test_a_judge_is_refused_only_where_no_record_has_what_it_compares_with(judge, records, refused):
    with nullcontext() if refused is None else pytest.raises(UserError, match=refused):
        settle(Path("gone"), TRAIN, lambda: records, rewards={**MINE, **judge})


def test_where_only_the_first_records_were_read_it_is_said(monkeypatch):
    monkeypatch.setattr("visual_grpo.operations.preflight.findings._KEPT", 2)
    given = parameters(data={"path": "gone"}, reward="listed", rewards={**MINE, TARGET_JUDGE: {"judge": True}})
    [told] = check_before_run(given, TRAIN, set(SCORED), lambda: [TARGET, PLAIN, PLAIN])[2]
    assert told.endswith("scores only samples of the 1 of the first 2 records that have a target image.")


@pytest.mark.parametrize("output", ["generated", "comparison"])
def test_a_model_that_is_not_there_is_told_before_anything_else(output):
    said = refusal(None, {output}, model={"path": "no/such/folder"})
    assert "model.path is no/such/folder, which does not exist; expected a folder" in said
    settle(None, {output}, rewards={"shapes": {"weight": 0}})


def test_only_a_run_that_scores_needs_a_reward(tmp_path):
    FOLDERS["prompts"](tmp_path / "prompts")
    assert settle(tmp_path / "prompts", {"records", "data_report"}).reward == "auto"
    assert settle(Path("gone"), {"base_model"}).reward == "auto"
    assert "shapes" in settle(None).rewards, "rendered data is not read"


def test_prompts_alone_are_told_what_each_reward_needs(tmp_path, monkeypatch):
    FOLDERS["prompts"](tmp_path / "prompts")
    monkeypatch.setattr(command, "_current", [Command(None, (), {"data.path": str(tmp_path / "prompts")})])
    message = refusal(tmp_path / "prompts")
    assert "No reward fits the 24 records" in message
    assert "without a target_image are 24 ('0', '1', '2', ...)" in message
    for added in ("reward=target", "reward=text", "rewards.my_reward.function=my_rewards:my_reward"):
        assert f"run --params=data.path={tmp_path / 'prompts'},{added}\n" in message
    assert '\nrewards:\n  my_reward: {function: "my_rewards:my_reward"}\n' in message


OTHER_MODEL = Remedy(environment="negative_points")
NO_STEPS = {"steps": None, "guidance_scale": None}


FLOW_ONLY: dict[str, Any] = {"modules": {"dit": None}, "evaluation": {"controls": []}}


def saved(folder: Path, family: str) -> str:
    """A folder that says that it is a model of a family."""
    (folder / "model").mkdir()
    [kind] = find_family(family).saved_as
    (folder / "model/model_index.json").write_text(json.dumps({"_class_name": kind}))
    return str(folder / "model")


def as_task(task: str) -> Remedy:
    return Remedy(parameters={"data.task": task})


QUERIES: dict[str, Any] = {
    "data": {"task": "segmentation"},
    "starter": {"world": "examples.scenes:WORLD"},
    "modules": {"dit": None},
    "sampling": {"rollout": NO_STEPS, "eval": NO_STEPS},
    "evaluation": {"controls": []},
}


@pytest.mark.parametrize(
    ("family", "count", "refused"),
    [
        ("qwen_image_edit", 2, "qwen_image_edit takes 1 source image, and the record 'two' has 2"),
        ("qwen_image_edit_plus", 2, None),
        ("qwen_image_edit_plus", 4, "qwen_image_edit_plus takes 1 to 3 source images, and the record 'two' has 4"),
        ("flux2_klein", 5, "flux2_klein takes 0 to 4 source images, and the record 'two' has 5"),
    ],
)
def test_sources_that_the_family_does_not_take_are_told_before_any_work(tmp_path, family, count, refused):
    rows = [{"id": n, "prompt": f"edit {n}", "source_image": "a.png", "target_image": "a.png"} for n in range(20)]
    rows.append({**rows[0], "id": "two", "prompt": "both", "source_image": ["a.png"] * count})
    photo(tmp_path / "records/a.png", 0)
    jsonl(tmp_path / "records/records.jsonl", rows)
    given: dict[str, Any] = {"data": {"task": "i2i"}, "model": {"path": saved(tmp_path, family)}, **FLOW_ONLY}
    with nullcontext() if refused is None else pytest.raises(UserError, match=refused):
        settle(tmp_path / "records", **given)


@pytest.mark.parametrize(
    ("kind", "given", "said", "remedy"),
    [
        ("edits", {}, "have a source_image, so they are edits, and data.task is t2i.", as_task("i2i")),
        ("prompts", {"data": {"task": "i2i"}}, "have no source_image, so they are prompts, and", as_task("t2i")),
        ("masks", {}, "are queries about an image with a mask, and data.task is t2i.", OTHER_MODEL),
        # Their targets could be masks.
        ("edits", {"model": "sd3"}, "so they are edits, and data.task is t2i.", None),
        ("prompts", QUERIES, "so they are prompts, and data.task is segmentation. The model does segm", None),
    ],
)
def test_records_of_another_task_are_told_with_the_command_for_it(tmp_path, kind, given, said, remedy):
    make = masks if kind == "masks" else FOLDERS[kind]
    make(tmp_path / "records")
    if "model" in given:
        given = {"model": {"path": saved(tmp_path, given["model"])}}
    with pytest.raises(CombinedError, match=said) as refused:
        settle(tmp_path / "records", **given)
    only = f" does {'t2i' if kind == 'edits' else 'segmentation'} only."
    assert (only in str(refused.value)) == (remedy is None)
    assert refused.value.errors[0].remedy == remedy


def masks(folder: Path) -> None:
    folder.mkdir()
    photo(folder / "a.png", 0)
    rows = [{"image": "a.png", "query": f"part {n}", "mask": "a.png", "group": str(n)} for n in range(20)]
    jsonl(folder / "records.jsonl", rows)


def test_masks_have_their_reward(tmp_path):
    masks(tmp_path / "records")
    config = settle(tmp_path / "records", **QUERIES)
    assert (config.reward, list(config.rewards)) == ("negative_points", ["negative_points"])


def test_everything_that_is_wrong_is_in_one_message(tmp_path):
    FOLDERS["prompts"](tmp_path / "prompts")
    message = refusal(
        tmp_path / "prompts",
        reward="target",
        rewards={"sim": {}, "ocr": {"options": {"lines": 2}}, "shapes": SHAPES_REWARD},
        model={"device": "cuda:99", "path": "no/such/folder"},
    )
    assert message.startswith("6 things are wrong:")
    for said in (
        "no built-in reward 'sim'",
        "has no option 'lines'",
        "model.device is 'cuda:99'",
        "model.path is no/such/folder",
        "the rewards of the world shapes judge what the starter renders",
        "the reward ssim compares with a target image, and 24 records have none: '0', '1', '2', '3', '4' ...",
    ):
        assert said in message


SHAPES_REWARD = SHAPES.preset.rewards["shapes"]


@pytest.mark.parametrize("changes", [{"reward": "shapes"}, {"rewards": {"shapes": SHAPES_REWARD}}])
def test_the_rewards_of_drawn_shapes_are_refused_for_other_data(tmp_path, changes):
    FOLDERS["captions"](tmp_path / "captions")
    assert "Leave these rewards out; for a training, reward=auto chooses others by the records" in refusal(
        tmp_path / "captions", **changes
    )


def test_a_copy_of_the_drawn_shapes_may_use_them(tmp_path):
    drawn = {"color": "red", "shape": "circle", "position": "left", "size": "small"}
    jsonl(tmp_path / "records.jsonl", [{"prompt": f"p {n}", "metadata": drawn} for n in range(20)])
    assert list(settle(tmp_path, reward="shapes").rewards) == ["shapes", "rendering", "outline"]


def test_a_folder_without_records_and_one_without_usable_ones(tmp_path):
    assert "no records found in" in refusal(tmp_path)
    jsonl(tmp_path / "records.jsonl", [{"prompt": "a", "target_imge": "a.png"}] * 7)
    message = refusal(tmp_path)
    assert "7 records rejected:" in message
    assert "the field 'target_imge' is unknown. Did you mean 'target_image'?" in message
    assert "and 2 more" in message


def test_strict_refuses_the_first_bad_record(tmp_path):
    rows = [*({"prompt": f'"{n}"'} for n in range(20)), {"prompt": ""}]
    jsonl(tmp_path / "records.jsonl", rows)
    assert settle(tmp_path).reward == "text"
    assert "line 21" in refusal(tmp_path, data={"strict": True})


@pytest.mark.parametrize("layout", ["prompts.txt", "table.csv"])
@pytest.mark.parametrize(
    ("count", "shares", "said"),
    [
        (
            1,
            {},
            "Note: 1 record: 1 train, 0 eval, 0 held out. 1 independent prompt is too few to hold any out"
            " (at least 8 are needed)",
        ),
        (2, {}, "Note: 2 records: 2 train, 0 eval, 0 held out. 2 independent prompts are too few"),
        (8, {}, ""),
        (
            9,
            {"held_out_share": 0, "eval_share": 0},
            "9 train, 0 eval, 0 held out. data.held_out_share is 0, so nothing can",
        ),
    ],
)
def test_where_nothing_is_held_out_a_sentence_says_so_before_any_work(tmp_path, layout, count, shares, said):
    heading = ["prompt"] * (layout == "table.csv")
    (tmp_path / layout).write_text("\n".join([*heading, *(f"sign {n}" for n in range(count))]))
    given = parameters(data={"path": str(tmp_path), **shares}, rewards={"colour_entropy": {"weight": 1}})
    shown = " ".join(check_before_run(given, WHOLE, set(SCORED), never)[2])
    assert said in shown
    assert ("held out" in shown) == bool(said)


def test_no_record_left_to_train_on_is_told_with_those_that_were_rejected(tmp_path):
    rows = [{"prompt": '"alone"', "split": split} for split in ("test", "train")]
    jsonl(tmp_path / "list.jsonl", [*rows, *({"prompt": ""} for _ in range(6))])
    message = refusal(tmp_path, data={"held_out_split": "test"})
    assert "none is left to train on: all are in data.held_out_split (test), or share a prompt" in message
    assert "6 records rejected:\n  list.jsonl, line 3" in message
    assert message.count("\n  list.jsonl, line") == 5
    assert "and 1 more" in message


def test_a_named_family_does_not_load_the_model_of_another(tmp_path):
    kontext = saved(tmp_path, "flux_kontext")
    check_model(parameters(model={"path": kontext, "family": "auto"}, **FLOW_ONLY, data={"task": "i2i"}))
    said = "model.family is flux, which loads FluxPipeline, but the model at .* is a FluxKontextPipeline"
    with pytest.raises(UserError, match=said):
        check_model(parameters(model={"path": kontext, "family": "flux"}, **FLOW_ONLY))
    with pytest.raises(UserError, match="which does not exist"):
        check(parameters(model={"family": "glm_image", "path": "/nowhere/at/all"}))


def test_a_gated_reward_has_weights_of_one_sign():
    """Its worst is another one by each sign, and a joint rollout judges both modules together."""
    bright = {"function": "tests.evaluation.painter:brightness"}
    gated = {"hard": bright, "easy": bright | {"clip": [0, 1], "only_where": {"hard": 0.5}}}
    for sign, train, refused in ((0.5, "all", False), (0.0, "all", False), (-0.5, "ar", False), (-0.5, "all", True)):
        config = parameters(rewards=gated, modules={"dit": {"rewards": {"easy": sign}}}, policy={"train": train})
        said = r"rewards.easy.only_where.*\[1.0, -0.5\]. Expected weights of one sign"
        with pytest.raises(UserError, match=said) if refused else nullcontext():
            check(config)


def test_modules_of_opposite_weights_leave_no_total_to_judge_by():
    rewards = {"bright": {"function": "tests.evaluation.painter:brightness"}}
    opposite = {"ar": {"rewards": {"bright": 1.0}}, "dit": {"rewards": {"bright": -1.0}}}
    check(parameters(rewards=rewards, modules=opposite, policy={"train": "dit"}))
    with pytest.raises(UserError, match=r"by one total.* cancel: bright has 1 in ar and -1 in dit\. Set other weights"):
        check(parameters(rewards=rewards, modules=opposite, policy={"train": "all"}))
    nothing = {"ar": {"rewards": {"bright": 0.0}}}
    with pytest.raises(UserError, match=r"nothing to optimise: with modules\.ar\.rewards, all its rewards"):
        check(parameters(rewards=rewards, modules=nothing, policy={"train": "all"}))


@pytest.mark.parametrize(
    ("rollout", "reward", "refused"),
    [
        (9, {"frames": "all"}, True),
        (9, {"frames": 2}, True),
        (9, {"frames": "first"}, False),
        (9, {"frames": "all", "judge": True}, False),  # It scores no rollout.
        (9, {"frames": "all", "function": "tests.evaluation.painter:brightness"}, False),
        (5, {"frames": "all"}, False),
        (None, {"frames": "all"}, False),
    ],
)
def test_training_samples_have_no_frames_that_their_targets_lack(tmp_path, rollout, reward, refused):
    rewards = {"ssim": reward, "mine": {**MINE["mine"], "frames": "all"}}
    changes: dict[str, Any] = {
        "data": {"frames": 5},
        "model": {"path": saved(tmp_path, "wan")},
        "sampling": {"rollout": {"frames": rollout}},
        "policy": {"train": "dit"},
    }
    said = r"sampling\.rollout\.frames is 9, but target videos have 5 frames .* or rewards\.ssim\.frames=first"
    with pytest.raises(UserError, match=said) if refused else nullcontext():
        check(parameters(reward=None, rewards=rewards, **changes, **FLOW_ONLY))


@pytest.mark.parametrize(
    ("action", "every", "outputs", "refused"),
    [
        ("rollback", 0, TRAIN, True),
        ("stop", 5, TRAIN, True),
        ("rollback", 4, TRAIN, False),
        ("warn", 0, TRAIN, False),
        ("rollback", 0, {"trained"}, False),
    ],
)
def test_an_alarm_that_ends_a_training_needs_an_evaluation_before_its_end(action, every, outputs, refused):
    said = rf"alarm\.action is {action}, .*evaluation\.every is {every}, and grpo\.steps is 5\. Set evaluation\.every"
    changes: dict[str, Any] = {"alarm": {"action": action}, "evaluation": {"every": every}, "grpo": {"steps": 5}}
    with pytest.raises(UserError, match=said) if refused else nullcontext():
        settle(Path("gone"), outputs, lambda: [TARGET], rewards=MINE, **changes)


BRIGHT, OTHER = "tests.evaluation.painter:brightness_by_words", "tests.operations.preflight.test_check:other"


def reading(function: str, least: float | None = None, **options: Any) -> dict[str, Any]:
    return {"function": function, "options": {**options, **({} if least is None else {"least": least})}}


@pytest.mark.parametrize(
    ("first", "judge", "said"),
    [
        (
            reading(OTHER, model="x"),
            reading(OTHER, model="x"),
            "and is the same function with the same models as it, so",
        ),
        (
            reading(OTHER, model="x"),
            reading(OTHER, 0.5, model="x"),
            "rewards.judge judges what rewards.first optimises",
        ),
        (reading(OTHER, model="x"), reading(OTHER, model="y"), None),
        (reading(OTHER, model=["x"]), reading(OTHER, model=["y"]), None),
        (
            reading(BRIGHT, words="a.bin"),
            reading(OTHER, model="same.bin"),
            "and has the weights of it, so it cannot contradict",
        ),
        (reading(BRIGHT, words="a.bin"), reading(BRIGHT, words="b.bin"), None),
        (reading(BRIGHT, words="words.txt"), reading(OTHER, model="words.txt"), None),  # No weights.
        (reading(OTHER, model="x"), {"function": "no_such_engine:read"}, "no_such_engine"),
    ],
)
def test_a_judge_that_is_the_reward_or_not_installed_is_refused(tmp_path, monkeypatch, first, judge, said):
    for name, content in {"a.bin": "A", "same.bin": "A", "b.bin": "B", "words.txt": "W"}.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    with nullcontext() if said is None else pytest.raises(UserError, match=said):
        check(parameters(reward="listed", rewards={"first": first, "judge": judge | {"judge": True}}))


def other(prompts: object, images: Sequence[object], model: str, least: float = 0.0) -> list[float]:
    return [least for _ in images]
