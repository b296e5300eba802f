"""The project as a whole: registry, configuration, command line, DVC stages, Makefile."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kedro.config import OmegaConfigLoader

ROOT = Path(__file__).parents[1]
PIPELINES = {"starter", "data_preparation", "baseline", "train", "evaluate"}
ON_DEMAND = {"compare", "generate", "labels", "score"}
ENVIRONMENTS = sorted(path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name != "base")

REGISTRY_LIST = """
import contextlib, io, json, sys
from kedro.framework.cli import main
from kedro.framework.project import pipelines
sys.argv = ["kedro", "registry", "list"]
out = io.StringIO()
with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
    main()
heavy = {"torch", "transformers", "diffusers", "peft", "accelerate", "torchvision"}
nodes = {name: [node.name for node in pipeline.nodes] for name, pipeline in pipelines.items()}
print(json.dumps({"listed": out.getvalue(), "nodes": nodes, "heavy": sorted(heavy & set(sys.modules))}))
"""


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def registry() -> dict[str, Any]:
    done = call(sys.executable, "-c", REGISTRY_LIST)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def loader(environment: str) -> OmegaConfigLoader:
    from visual_grpo.settings import CONFIG_LOADER_ARGS

    return OmegaConfigLoader(str(ROOT / "conf"), env=environment, **CONFIG_LOADER_ARGS)


def test_the_registry_lists_every_pipeline(registry):
    assert set(re.findall(r"^- (\w+)$", registry["listed"], re.MULTILINE)) == PIPELINES | ON_DEMAND | {"__default__"}


def test_the_default_leaves_out_what_is_run_on_demand(registry):
    default = set(registry["nodes"]["__default__"])
    assert {name for name, nodes in registry["nodes"].items() if default.isdisjoint(nodes)} == ON_DEMAND
    assert default == {node for name in PIPELINES for node in registry["nodes"][name]}


def test_the_registry_imports_no_heavy_library(registry):
    assert registry["heavy"] == []


def test_an_unknown_parameter_ends_the_command_at_once_and_in_plain_words():
    done = call(sys.executable, "-m", "kedro", "run", "--pipeline=train", "--params=grpo.learning_rat=1")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "grpo.learning_rat = 1: there is no such parameter. Did you mean 'grpo.learning_rate'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 4


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_every_environment_is_valid(environment):
    from visual_grpo.components import make_plan
    from visual_grpo.config.validation import validate

    conf = loader(environment)
    config = validate(conf["parameters"])
    assert config.seed == 0
    assert make_plan(config).modules, "what the environment says fits its model's family"
    assert conf["mlflow"]["server"]["mlflow_tracking_uri"].startswith("sqlite:////")
    assert set(conf["catalog"]) >= {"records", "baseline", "adapters", "evaluation"}


def test_params_change_one_key_and_leave_its_neighbours():
    from visual_grpo.settings import CONFIG_LOADER_ARGS

    runtime = {"seed": 5, "grpo": {"steps": 3}}
    changed = OmegaConfigLoader(str(ROOT / "conf"), env="base", runtime_params=runtime, **CONFIG_LOADER_ARGS)
    before = loader("base")["parameters"]
    assert changed["parameters"] == {**before, "seed": 5, "grpo": {**before["grpo"], "steps": 3}}


def test_a_seed_in_globals_is_refused_and_not_overlooked(tmp_path):
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "conf/local/globals.yml").write_text("seed: 3\nmine: 1\n", encoding="utf-8")
    command = (sys.executable, "-m", "kedro", "run", "--pipeline=train", f"--conf-source={tmp_path / 'conf'}")
    done = call(*command)
    assert done.returncode == 1
    assert "globals.yml sets seed to 3, but the seed is now a parameter like any other, and is 0." in done.stderr
    (tmp_path / "conf/local/parameters.yml").write_text("seed: ${globals:seed}\ngrpo: {loss: x}\n", encoding="utf-8")
    assert "globals.yml" not in call(*command).stderr, "where it is still read, it is right"


def test_a_module_in_the_projects_root_can_be_imported(tmp_path):
    code = "import sys; from visual_grpo.settings import PROJECT_PATH; print(str(PROJECT_PATH) == sys.path[-1])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("True\n"), done.stderr


def dvc_stages() -> dict[str, Any]:
    text = (ROOT / "dvc.yaml").read_text(encoding="utf-8")
    [variables] = yaml.safe_load(text)["vars"]
    for name, value in variables.items():
        text = text.replace(f"${{{name}}}", value)
    stages: dict[str, Any] = yaml.safe_load(text)["stages"]
    return stages


def outputs(stage: dict[str, Any]) -> Iterator[str]:
    for out in stage["outs"] + stage.get("metrics", []):
        yield from out if isinstance(out, dict) else [out]


def test_dvc_has_one_stage_per_pipeline():
    stages = dvc_stages()
    assert set(stages) == PIPELINES
    for name, stage in stages.items():
        assert f"kedro run --pipeline={name} " in stage["cmd"]


def test_dvc_keeps_everything_that_its_stages_write():
    tracked = {out for stage in dvc_stages().values() for out in outputs(stage)}
    entries = {name: entry for name, entry in loader("base")["catalog"].items() if not name.endswith("_draft")}
    on_disk = [entry for entry in entries.values() if "filepath" in entry]
    catalog = {entry["filepath"] for entry in on_disk if entry.get("made_by") not in ON_DEMAND}
    assert catalog <= tracked


def test_dvc_watches_source_and_parameters_that_exist():
    sections = set(loader("base")["parameters"])
    for stage in dvc_stages().values():
        for dependency in stage["deps"]:
            assert dependency.startswith(("data/", "conf/local")) or (ROOT / dependency).exists(), dependency
        [keys] = [entry["conf/base/parameters.yml"] for entry in stage["params"] if "conf/base/parameters.yml" in entry]
        assert set(keys) <= sections
        assert ("policy" in keys) == ("modules" in keys), "what is common to all modules, and their own settings"


def test_dvc_watches_every_module_that_a_result_depends_on():
    import grimp

    from visual_grpo.policies import families
    from visual_grpo.rewards import catalogue

    graph = grimp.build_graph("visual_grpo", exclude_type_checking_imports=True)
    # Loaded by name, which no import shows.
    for module in (catalogue, families):
        for path in module.BUILT_IN.values():
            graph.add_import(importer=module.__name__, imported=path.partition(":")[0])
    # Only training calls these; baseline and evaluate share the modules that they are imported in.
    graph.remove_import(importer="visual_grpo.components", imported="visual_grpo.grpo.trainer")
    graph.remove_import(importer="visual_grpo.components", imported="visual_grpo.grpo.two_stage")
    # From there only the name of the starter's family.
    graph.remove_import(importer="visual_grpo.components", imported="visual_grpo.starter.build")
    graph.remove_import(importer="visual_grpo.policies.token_policy", imported="visual_grpo.grpo.losses")
    shows = {"command", "console", "errors", "evaluation.fonts", "evaluation.pictures", "faults", "model_card"} | {
        "secret_values",
        "stopping",
        "third_party_output",
        "tracking",
        "types",
        "visible_text",
    }
    shows |= {module.removeprefix("visual_grpo.") for module in graph.find_descendants("visual_grpo.tracking")}
    for name, stage in dvc_stages().items():
        top = f"visual_grpo.pipelines.{name}"
        modules = {m for own in {top} | graph.find_descendants(top) for m in graph.find_upstream_modules(own)}
        needed = {f"src/{m.replace('.', '/')}" for m in modules - {f"visual_grpo.{m}" for m in shows}}
        watched = [dependency.removesuffix(".py") for dependency in stage["deps"]]
        assert {m for m in needed if not any(m == w or m.startswith(f"{w}/") for w in watched)} == set(), name


def test_checkpoints_are_no_output_of_dvc():
    outs = [Path(out) for stage in dvc_stages().values() for out in outputs(stage)]
    checkpoints = Path("data/06_models/checkpoints")
    assert not any(out == checkpoints or out in checkpoints.parents for out in outs)


def test_make_offers_what_the_readme_promises():
    listed = call("make", "help").stdout
    for target in ("setup", "demo", "test", "test-slow", "lint", "lock", "repro", "ui", "viz", "clean"):
        assert re.search(rf"^  make {target} ", listed, re.MULTILINE), target


def test_make_says_which_python_it_needs(tmp_path):
    done = subprocess.run(
        ["/usr/bin/make", "setup", "PYTHON=no-such-python", f"VENV={tmp_path}/v", f"TOOLS={tmp_path}/t"],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Python 3.11 or newer is needed" in done.stderr


def test_the_lock_names_no_index_and_has_every_hash():
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert not re.search(r"https?://|--(extra-)?index-url|--find-links", lock)
    pins = re.findall(r"^[a-z0-9][^\n]*==[^\n]*", lock, re.MULTILINE)
    assert len(pins) > 100
    assert all(pin.rstrip().endswith("\\") for pin in pins), "every pin is followed by its hashes"
