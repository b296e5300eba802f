"""The command that is printed is the command that was run, with more parameters."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from visual_grpo.command import Command, takes_over, use_source


def test_options_and_parameters_of_the_run_are_kept() -> None:
    command = Command.of(
        {
            "env": "sd3_small",
            "pipeline_names": ["train", "evaluate"],
            "runtime_params": {"data": {"path": "my photos"}, "seed": 3, "output": None, "policy": {"train": "dit"}},
            "tags": None,
        }
    )
    words = shlex.split(str(command.adding({"data.task": "i2i", "seed": 4})))
    assert words[1:] == [
        "run",
        "--env=sd3_small",
        "--pipelines=train,evaluate",
        "--params=data.path=my photos,seed=4,output=null,policy.train=dit,data.task=i2i",
    ]
    assert words[0].rpartition("/")[2] == "kedro"


def test_the_default_environment_is_not_named() -> None:
    for environment in (None, "local"):
        assert shlex.split(str(Command.of({"env": environment})))[1:] == ["run"]


def test_the_command_that_goes_on_has_all_that_was_given_and_what_cannot_be_pasted_is_left_to_the_run() -> None:
    given = {"data": {"path": "my photos"}, "grpo": {"learning_rate": 5e-05}, "resume": "never", "seed": 3}
    command = Command.of({"env": "text", "pipeline_names": ["train", "evaluate"], "runtime_params": given})
    words = shlex.split(str(command.resuming("never", Path("data/x/checkpoints"))))
    params = "--params=data.path=my photos,grpo.learning_rate=5e-05,resume=auto,seed=3"
    assert words[1:] == ["run", "--env=text", "--pipeline=train", params]
    for key, value in (("policy.train", ["dit", "ar"]), ("model.options.instruction", "Find, then answer")):
        words = shlex.split(str(command.adding({key: value}).resuming("never", Path("data/x/checkpoints"))))
        assert words[-1] == params.replace("resume=auto", "resume=data/x/checkpoints")
    secret = command.adding({"rewards.judge.options.api_key": "sesame-open"})
    assert shlex.split(str(secret.resuming("auto", Path("data/x/checkpoints"))))[-1] == params
    named = command.resuming("elsewhere/step-000004", Path("data/x/checkpoints"))
    assert "resume=data/x/checkpoints" in str(named)


@pytest.mark.parametrize(
    "value", [3, 5e-05, True, None, "text", "5", "null", "true", "1e-3", "a: b", " a", "it's", "ü", "[x"]
)
def test_every_value_is_read_as_what_it_was(value: object) -> None:
    [params] = shlex.split(str(Command.of({"runtime_params": {"key": value}})))[2:]
    read = OmegaConf.from_dotlist([item.strip() for item in params.removeprefix("--params=").split(",")])
    assert read["key"] == value
    assert type(read["key"]) is type(value)


def test_the_folder_of_the_configuration_is_kept() -> None:
    use_source("other/conf")
    try:
        assert "run --conf-source=other/conf" in str(Command.of({}))
    finally:
        use_source(None)


def test_another_environment_takes_the_place_of_the_own() -> None:
    assert "--env=negative_points" in str(Command.of({"env": "local"}).of_environment("negative_points"))


def test_what_comes_after_a_resumed_run_judges_as_that_run_did() -> None:
    takes_over({"evaluation.max_prompts": 4, "evaluation.controls": [{"guidance_scale": 1.0}], "grpo.steps": 5})
    try:
        judging = Command.of({"runtime_params": {"seed": 1, "resume": "auto"}}).without("resume").judging()
        assert judging.parameters == {"seed": 1, "evaluation.max_prompts": 4}
    finally:
        takes_over({})
