"""What a result depends on, and what differs between two records."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.defaults import parameters, samples_record
from tests.evaluation.painter import brightness
from visual_grpo import provenance
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.common.importing import load_attribute
from visual_grpo.config.decides import DEPENDS_ON
from visual_grpo.config.training import ModuleConfig
from visual_grpo.config.validation import validate
from visual_grpo.provenance import (
    code_notes,
    differences,
    parameters_of_training,
    require_made_from,
    require_pair,
    values,
    without_scoring,
)
from visual_grpo.rewards.catalogue import BUILT_IN, transport_of
from visual_grpo.training import made_with
from visual_grpo.training.made_with import source_digest

HERE = "tests.test_provenance"


def decided(pipeline: str, tree: dict[str, Any]) -> dict[str, Any]:
    """The parameters that decide a pipeline's result."""
    return values({"parameters": tree}, DEPENDS_ON[pipeline])


class Patient:
    """Brightness; how long it waits changes nothing."""

    transport = frozenset({"timeout"})

    def __init__(self, gain: float = 1.0, timeout: float = 1.0) -> None:
        self.gain = gain

    def __call__(self, prompts: Any, samples: Any) -> Any:
        return [self.gain * score for score in brightness(prompts, samples)]


def rewards_of(
    options: dict[str, Any], name: str = "judge", function: str | None = f"{HERE}:Patient"
) -> dict[str, Any]:
    return {"rewards": {name: {"function": function, "weight": 1.0, "options": options}}}


def test_built_in_rewards_declare_only_options_that_they_have_and_nothing_that_decides() -> None:
    deciding = {"url", "model", "rubric", "protocol", "extra", "headers"}
    deciding |= {"batch_size", "image_size", "image_format"}
    declared: dict[str, frozenset[str]] = {
        name: getattr(load_attribute(path, ""), "transport", frozenset()) for name, path in BUILT_IN.items()
    }
    assert declared == {name: transport_of(name, None) for name in BUILT_IN}
    assert {name for name, options in declared.items() if options} == {"http", "vlm_judge"}
    for name, options in declared.items():
        made = load_attribute(BUILT_IN[name], "")
        assert options <= set(inspect.signature(made).parameters)
        assert not options & deciding
    assert {"timeout", "retries", "concurrency", "deadline", "stop_after", "api_key"} == declared["vlm_judge"]


@pytest.mark.parametrize("pipeline", list(DEPENDS_ON))
@pytest.mark.parametrize(
    ("name", "function", "transport", "other"),
    [
        ("http", None, {"timeout": 5.0, "api_key": "(hidden)"}, {"url": "http://other"}),
        ("vlm_judge", None, {"retries": 9, "concurrency": 1}, {"rubric": "text"}),
        ("held_out", BUILT_IN["vlm_judge"], {"deadline": 9.0, "stop_after": 0}, {"image_size": 64}),
        ("mine", f"{HERE}:Patient", {"timeout": 2.0}, {"gain": 2.0}),
    ],
)
def test_they_decide_nothing_and_other_options_do(
    pipeline: str, name: str, function: str | None, transport: dict[str, Any], other: dict[str, Any]
) -> None:
    plain, changed = (decided(pipeline, rewards_of(options, name, function)) for options in ({}, transport))
    assert plain == changed
    assert decided(pipeline, rewards_of(other, name, function)) != plain
    # An option of another reward that has the same name decides.
    assert decided(pipeline, rewards_of(transport, "brightness", "tests.evaluation.painter:brightness")) != decided(
        pipeline, rewards_of({}, "brightness", "tests.evaluation.painter:brightness")
    )


def test_code_that_is_gone_declares_nothing() -> None:
    assert transport_of("mine", "no_such_module_here:score") == frozenset()
    assert transport_of("unknown", None) == frozenset()


def test_results_pair_whatever_the_patience() -> None:
    def judged(options: dict[str, Any]) -> Any:
        return samples_record(parameters(**rewards_of(options)))

    assert judged({"timeout": 3.0}) == judged({"timeout": 9.0}) == judged({})
    assert judged({"gain": 2.0}) != judged({})


def test_the_window_of_training_decides_samples_where_a_judged_sampler_has_it() -> None:
    def judged(window: int, loss: str) -> Any:
        return samples_record(
            parameters(policy={"train": "dit", "flow": {"window_steps": window}}, grpo={"loss": loss})
        )

    assert judged(1, "grpo") != judged(2, "grpo")
    assert judged(1, "nft") == judged(2, "nft")


def test_the_signal_check_belongs_to_the_training() -> None:
    tree = {"policy": {"signal_check": {"rollouts": 0}}}
    read = {"policy.signal_check.rollouts": 0}
    assert [decided(pipeline, tree) for pipeline in ("baseline", "train", "evaluate")] == [{}, read, {}]


def test_of_a_module_only_its_rewards_decide_what_is_evaluated() -> None:
    training = {name: 1 for name in ModuleConfig.model_fields if name not in ("rewards", "lora")}
    tree = {"modules": {"dit": {**training, "rewards": {"ocr": 1.0}, "lora": {"rank": 4}}, "ar": training}}
    assert decided("baseline", tree) == decided("baseline", {"modules": {}}) == {}
    assert decided("evaluate", tree) == {"modules.dit.rewards.ocr": 1.0}
    assert len(decided("train", tree)) == 2 * len(training) + 2


def tree(**changes: Any) -> dict[str, Any]:
    return parameters(**changes).model_dump(mode="json")


def test_an_adapter_is_judged_with_its_own_parameters_on_the_present_ones_terms() -> None:
    own = tree(
        grpo={"loss": "dapo"},
        seed=3,
        evaluation={"max_prompts": 7},
        model={"device": "cuda", "dtype": "bfloat16"},
        data={"max_pixels": 10**12, "max_zip_ratio": 10**12},
        distributed={"processes": 8},
    )
    present = tree(
        evaluation={"max_prompts": 9}, policy={"denoise_batch": 5}, adapter="a run", model={"offload": "phases"}
    )
    judged = parameters_of_training(present, own, {"sampling": {"eval": {"steps": 3}}})
    assert (judged["grpo"]["loss"], judged["seed"]) == ("dapo", 3)
    assert judged["model"] == {**own["model"], "device": "auto", "offload": "phases"}
    assert judged["distributed"]["processes"] == 1
    assert judged["evaluation"]["max_prompts"] == 9
    assert judged["policy"]["denoise_batch"] == 5
    assert judged["adapter"] == "a run"
    limits = {name: value for name, value in present["data"].items() if name.startswith("max_")}
    assert judged["data"] == own["data"] | limits
    assert judged["sampling"]["eval"] == {**own["sampling"]["eval"], "steps": 3}
    removed = parameters(data={"path": "mine"}, reward="target", rewards={"edge_density": None}).public()
    assert list(validate(parameters_of_training(present, removed, {})).rewards) == ["ssim", "colour_entropy"]


def test_a_command_that_scores_nothing_takes_over_no_reward_but_what_paints_answers() -> None:
    painting = {"function": "visual_grpo.rewards.negative_points:NegativePointsReward", "options": {"think": True}}
    judge = {"function": "a:b", "judge": True, "judge_of": "mine"}
    rewards = {"mine": {"function": "a:b"}, "judge": judge, "points": painting, "negative_points": {"weight": 0.0}}
    kept = validate(without_scoring(tree(rewards=rewards, modules={"ar": {"rewards": {"mine": 2.0}}}))).rewards
    assert {name for name, reward in kept.items() if reward.function != painting["function"]} == {
        *("negative_points", "edge_density", "colour_entropy")
    }
    assert kept["points"].options == {"think": True}


def test_every_file_is_a_source_but_those_that_only_call_show_and_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {file.parent.name for file in made_with.PACKAGE.glob("*/__init__.py")}
    monkeypatch.setattr(made_with, "PACKAGE", tmp_path)
    seen, before = set(), source_digest()
    for name in packages:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").touch()
        seen |= {name} if source_digest() != before else set()
        before = source_digest()
    assert packages - seen == {"operations", "tracking"}


def test_other_code_of_a_reward_than_the_trainings_is_told() -> None:
    training = {"code of reward warm": "abc", "code of reward sharp": "def"}
    assert code_notes(training, {"code of reward warm": "abc", "code of reward new": "xyz"}) == []
    [note] = code_notes(training, {"code of reward warm": "xyz", "code of reward sharp": "def"})
    assert note == "The code of reward warm has changed since the training."


TRAIN = DEPENDS_ON["train"]
TREE: dict[str, Any] = {"seed": 0, "grpo": {"steps": 2}, "model": {"options": {}}}
RECORD: dict[str, Any] = {"parameters": TREE, "data": "d", "numerics": "torch 2"}


@pytest.mark.parametrize(
    ("changes", "options", "found"),
    [
        ({}, {}, {}),
        ({"steps": 9, "sums": {}, "model": "elsewhere"}, {}, {}),  # Not of a record.
        ({"data": "e"}, {}, {"data": ("d", "e")}),
        ({"data": "e"}, {"but": ["data"]}, {}),
        ({"numerics": "torch 3"}, {}, {"numerics": ("torch 2", "torch 3")}),
        ({"numerics": "torch 3"}, {"rounding": False}, {}),
        ({"code of reward mine": "a"}, {}, {"code of reward mine": (None, "a")}),
        ({"parameters": {"seed": 0, "grpo": {"steps": 3, "clip_low": None}}}, {}, {"grpo.steps": (2, 3)}),
        ({"parameters": {"grpo": {"steps": 2}}}, {}, {"seed": (0, None)}),
        # What the model never reads decides no sample, and a training all the same.
        (
            {"parameters": TREE | {"policy": {"flow": {"noise": 1}}}, "unread": ["policy.flow"]},
            {},
            {"policy.flow.noise": (None, 1)},
        ),
        (
            {"parameters": TREE | {"policy": {"flow": {"noise": 1}}}, "unread": ["policy.flow"]},
            {"about": DEPENDS_ON["baseline"]},
            {},
        ),
        ({"parameters": {"seed": 0, "a_new_parameter": 1, "grpo": {"steps": 2}}}, {}, {"a_new_parameter": (None, 1)}),
    ],
)
def test_two_records_differ_in_what_decides(changes: dict[str, Any], options: dict[str, Any], found: Any) -> None:
    assert differences(RECORD, RECORD | changes, **{"about": TRAIN, **options}) == found


def of(evaluation: dict[str, Any], digest: str = "a") -> dict[str, Any]:
    """The record of samples."""
    return {"parameters": {"evaluation": evaluation}, "model_digest": digest}


EACH, MOST, CONTROLS, FRAMES = "images_per_prompt", "max_prompts", "controls", {"parameters": {"data": {"frames": 5}}}
HIGH, LOW = {"guidance_scale": 3.0}, {"guidance_scale": 1.0}
SAMPLED = {"parameters": {"sampling": {"rollout": {"steps": 5, "guidance_scale": 1.0}, "eval": {"steps": 5}}}}
PAIRS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (of({"seed": 0}), of({"seed": 0}), []),
    (of({"seed": 1}), of({"seed": 0}, "b"), ["evaluation.seed (was 1, is 0)", "base model"]),
    (FRAMES, {"parameters": {"data": {"frames": 9}}}, ["data.frames (was 5, is 9)"]),
    ({"device": "cuda"}, {"device": "cpu"}, ["kind of device"]),
    # A baseline of more samples has those that are asked for.
    (of({EACH: 6}), of({EACH: 2, MOST: 10}), []),
    (of({EACH: 6, MOST: 20}), of({EACH: 6, MOST: 10}), []),
    (of({EACH: 6, MOST: 20}), of({EACH: 6}), [f"evaluation.{MOST} (was 20, is None)"]),
    (of({EACH: 6, MOST: 20}), of({EACH: 6, MOST: 21}), [f"evaluation.{MOST} (was 20, is 21)"]),
    (of({EACH: 6}), of({EACH: 7}), [f"evaluation.{EACH} (was 6, is 7)"]),
    # Nor do samples of a sampler that nobody asks for any more differ.
    ({**SAMPLED, "unread": []}, {**SAMPLED, "unread": ["sampling.rollout"]}, []),
    (
        {**SAMPLED, "unread": ["sampling.rollout"]},
        {**SAMPLED, "unread": []},
        ["samples with the settings sampling.rollout (was none, is some)"],
    ),
    # Controls that nobody asks for any more are no difference.
    (of({CONTROLS: [HIGH, LOW]}), of({CONTROLS: [LOW]}), []),
    (of({CONTROLS: []}), of({CONTROLS: [HIGH]}), [f"evaluation.{CONTROLS} (was [], is [{HIGH}])"]),
]


@pytest.mark.parametrize(("made", "now", "listed_in_order"), PAIRS)
def test_a_baseline_of_other_samples_is_refused_with_the_differences(
    made: dict[str, Any], now: dict[str, Any], listed_in_order: list[str]
) -> None:
    if not listed_in_order:
        require_pair(made, now)
        return
    with pytest.raises(UserError) as caught:
        require_pair(made, now)
    first, *listed, _ = str(caught.value).splitlines()
    assert first == "the baseline does not pair with this run:"
    assert listed == [f"  {difference}" for difference in listed_in_order]
    assert caught.value.remedy == Remedy("baseline")


def test_samples_of_an_earlier_adapter_are_refused() -> None:
    made = {"made_from": {"adapters": "a", "baseline": "b"}}
    require_made_from(made, Path("trained"), "evaluate", adapters="a", baseline="b")
    for artifacts, named in (
        ({"adapters": "c"}, "adapters"),
        ({"adapters": "c", "baseline": "d"}, "adapters and baseline"),
    ):
        with pytest.raises(UserError, match=f"^trained was made from other {named} than") as caught:
            require_made_from(made, Path("trained"), "evaluate", **artifacts)
        assert caught.value.remedy == Remedy("evaluate")


def test_the_code_of_a_function_that_an_option_names_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "edited_segmenter.py"
    file.write_text("def segment(image, prompt):\n    return image[0] > 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = {"segmenter": {"function": "edited_segmenter:segment"}}
    config = parameters(**rewards_of(options, "negative_points", None))
    before = provenance.code(config)
    file.write_text("def segment(image, prompt):\n    return image[0] > 9\n")
    now = provenance.code(config)
    name = "code of reward negative_points: segmenter.function"
    assert differences(before, now, TRAIN) == {name: (before[name], now[name])}
    [note] = code_notes(before, now)
    assert note == "The code of reward negative_points: segmenter.function has changed since the training."


def test_a_comparison_runs_no_code_that_a_record_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\ndef score(): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    record = {"parameters": {"rewards": {"z": {"function": "evil:score", "options": {"timeout": 1}}}}}
    assert provenance.differences(record, {"parameters": {}}, TRAIN)
    assert not Path("ran").exists()


def test_a_run_that_goes_on_keeps_its_first_tags_and_has_later_ones_beside_them() -> None:
    first = {"command": "train", "git.commit": "a", "git.state": "clean"}
    assert provenance.continued({}, first) == first
    again = provenance.continued(first, {**first, "command": "go on"})
    assert again == {**first, "resumed.command": "go on"}
    third = provenance.continued(again, {"command": "go further", "git.commit": "b", "git.state": "clean"})
    assert third == {**first, "resumed.command": "go on\ngo further", "resumed.git.commit": "b"}
