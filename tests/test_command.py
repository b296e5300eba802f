"""The command that is printed is the command that was run, with more parameters."""

from __future__ import annotations

import shlex

from visual_grpo.command import Command


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


def test_another_environment_takes_the_place_of_the_own() -> None:
    assert "--env=negative_points" in str(Command.of({"env": "local"}).of_environment("negative_points"))
