"""Options of rewards that only say how a server is asked: a change of them makes no result again."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.evaluation.defaults import conditions_of, parameters
from tests.evaluation.painter import brightness
from visual_grpo.common.importing import load_attribute
from visual_grpo.config import Parameters
from visual_grpo.config.training import EvaluationConfig, ModuleConfig
from visual_grpo.rewards.catalogue import BUILT_IN, transport_of
from visual_grpo.training.cache_key import NEVER, NOT_READ, cache_key

HERE = "tests.training.test_cache_key"


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
    declared = {name: transport_of(name, None) for name in BUILT_IN}
    assert {name for name, options in declared.items() if options} == {"http", "vlm_judge"}
    for name, options in declared.items():
        made = load_attribute(BUILT_IN[name], "")
        assert options <= set(inspect.signature(made).parameters)
        assert not options & deciding
    assert {"timeout", "retries", "concurrency", "deadline", "stop_after", "api_key"} == declared["vlm_judge"]


@pytest.mark.parametrize("pipeline", list(NOT_READ))
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
    plain, changed = (cache_key(pipeline, rewards_of(options, name, function)) for options in ({}, transport))
    assert plain == changed
    assert cache_key(pipeline, rewards_of(other, name, function)) != plain
    # An option of another reward that has the same name decides.
    assert cache_key(pipeline, rewards_of(transport, "brightness", "tests.evaluation.painter:brightness")) != cache_key(
        pipeline, rewards_of({}, "brightness", "tests.evaluation.painter:brightness")
    )


def test_code_that_is_gone_declares_nothing() -> None:
    assert transport_of("mine", "no_such_module_here:score") == frozenset()
    assert transport_of("unknown", None) == frozenset()


def test_results_pair_whatever_the_patience() -> None:
    def judged(options: dict[str, Any]) -> Any:
        return conditions_of(parameters(**rewards_of(options)))["rewards"]

    assert judged({"timeout": 3.0}) == judged({"timeout": 9.0}) == judged({})
    assert judged({"gain": 2.0}) != judged({})


def test_what_decides_nothing_are_names_of_parameters() -> None:
    known = set(Parameters.model_fields) | {f"evaluation.{name}" for name in EvaluationConfig.model_fields}
    known |= {f"modules.*.{name}" for name in ModuleConfig.model_fields}
    assert {*NEVER, *(name for names in NOT_READ.values() for name in names)} <= known


def test_of_a_module_only_its_rewards_and_its_adapter_decide_what_is_evaluated() -> None:
    training = {name: 1 for name in ModuleConfig.model_fields if name not in ("rewards", "lora")}
    tree = {"modules": {"dit": {**training, "rewards": {"ocr": 1.0}, "lora": {"rank": 4}}, "ar": training}}
    for pipeline in ("baseline", "evaluate"):
        assert cache_key(pipeline, tree) == {"modules.dit.rewards.ocr": 1.0, "modules.dit.lora.rank": 4}
        assert cache_key(pipeline, {"modules": {}}) == cache_key(pipeline, {"modules": {"ar": training}})
    assert len(cache_key("train", tree)) == 2 * len(training) + 2
