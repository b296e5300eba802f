"""The project as a whole: registry, configuration, command line, Makefile."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from visual_grpo.config.validation import validate
from visual_grpo.hooks.parameters import ProjectConfigLoader
from visual_grpo.models.run_spec import resolve
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.settings import CONFIG_LOADER_ARGS

ROOT = Path(__file__).parents[1]
PIPELINES = {"starter", "data_preparation", "baseline", "train", "evaluate"}
ON_DEMAND = {
    "compare",
    "generate",
    "labels",
    "gpu_check",
    "check_model",
    "plan",
    "promote",
    "reproduce",
    "reward_report",
}
ON_DEMAND |= {"publish", "rollback", "score", "vote"}
TRACKED = subprocess.run(
    ["git", "ls-files", "conf"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
ENVIRONMENTS = sorted({Path(name).parts[1] for name in TRACKED if name.count("/") > 1} - {"base"})
"""A user's environments are not git's."""

COMMANDS = """
import contextlib, io, json, sys
from kedro.framework.cli import main
sys.argv = ["kedro", "registry", "list"]
out = io.StringIO()
with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
    main()
heavy = sorted({"torch", "transformers", "diffusers", "peft", "accelerate", "torchvision"} & set(sys.modules))
print(json.dumps({"listed": out.getvalue(), "heavy": heavy}))
sys.argv = ["kedro", "run", "--pipeline=train", "--params=grpo.learning_rat=1"]
main()
"""


@pytest.fixture(scope="module")
def ended() -> subprocess.CompletedProcess[str]:
    """A process that has listed the pipelines, and then was asked for an unknown parameter."""
    return subprocess.run([sys.executable, "-c", COMMANDS], cwd=ROOT, capture_output=True, text=True, check=False)


def loader(environment: str, **parameters: Any) -> ProjectConfigLoader:
    return ProjectConfigLoader(str(ROOT / "conf"), env=environment, runtime_params=parameters, **CONFIG_LOADER_ARGS)


def test_the_registry_lists_every_pipeline_and_imports_no_heavy_library(ended):
    registry = json.loads(ended.stdout.splitlines()[-1])
    assert set(re.findall(r"^- (\w+)$", registry["listed"], re.MULTILINE)) == PIPELINES | ON_DEMAND | {"__default__"}
    assert registry["heavy"] == []
    found = {name: [node.name for node in pipeline.nodes] for name, pipeline in register_pipelines().items()}
    default = set(found["__default__"])
    assert {name for name, nodes in found.items() if default.isdisjoint(nodes)} == ON_DEMAND
    assert default == {node for name in PIPELINES for node in found[name]}


def test_an_unknown_parameter_ends_the_command_at_once_and_in_plain_words(ended):
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[1:] == []
    assert "grpo.learning_rat = 1: this parameter does not exist. Did you mean 'grpo.learning_rate'?" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) <= 4


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_every_environment_is_valid(environment):
    conf = loader(environment)
    config = validate(conf["parameters"])
    assert config.seed == 0
    assert resolve(config).modules, "what the environment says fits its model's family"
    assert set(conf["catalog"]) >= {"records", "baseline", "adapters", "evaluation"}


def test_params_change_one_key_and_leave_its_neighbours():
    before, changed = loader("base")["parameters"], loader("base", seed=5, grpo={"steps": 3})["parameters"]
    assert changed == {**before, "seed": 5, "grpo": {**before["grpo"], "steps": 3}}


@pytest.mark.parametrize("name", ["requirements.lock", "benchmarks/requirements.lock"])
def test_an_environment_that_the_project_is_built_in_has_what_builds_it(name):
    """`make` installs the project editable and without build isolation into .venv and .venv-bench."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    builders = {re.split(r"[^\w-]", requirement)[0] for requirement in requires} | {"editables"}
    pins = re.findall(r"^([a-z0-9][\w.-]*)==", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert builders <= set(pins)
