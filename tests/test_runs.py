"""What a `kedro run` leaves behind in MLflow, and how it ends.

One subprocess runs a small Kedro project that uses this project's settings, several sessions in turn;
importing Kedro and MLflow costs seconds each time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

REGISTRY = """
from pathlib import Path
from kedro.pipeline import node, pipeline
from visual_grpo.config import DataConfig, GRPOConfig, Parameters
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import new_folder

def make(parameters: Parameters, grpo: GRPOConfig, rewards):
    return {"kinds": [type(value).__name__ for value in (parameters, grpo, rewards["rendering"])]}

def prepare(data: DataConfig, draft):
    from visual_grpo.pipelines.data_preparation import prepare_records
    return prepare_records(data, {}, draft)[0]

def prepare_only(data: DataConfig, draft, base_model):
    return prepare(data, draft)

def score(records, parameters: Parameters, rewards):
    return {"reward": parameters.reward, "rewards": list(rewards)}

def interrupt(report):
    raise KeyboardInterrupt

def crash(report):
    raise RuntimeError("a bug")

def greedy(report):
    bytearray(1 << 62)

def mistake(report):
    raise UserError("the file is empty")

def terminate(report):
    import os, signal, time
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)

def judge(adapters, parameters):
    folder = new_folder(Path(parameters.output, "trained"))
    (folder / "seed").write_text(f"{parameters.seed} {parameters.grpo.loss} {parameters.data.height}")
    if parameters.evaluation.every == 77:
        raise UserError("no room left")
    return folder

def fill(output):
    import torch
    from safetensors.torch import save_file
    folder = new_folder(Path(output, "06_models/adapters"))
    save_file({"a": torch.zeros(1)}, folder / "file.safetensors")
    (folder / "file").touch()
    return folder

def half(output):
    folder = new_folder(Path(output, "folder"))
    (folder / "file").write_text("half")
    raise OSError("an error of a library") from UserError("the model cannot load")

def register_pipelines():
    typed = ["parameters", "params:grpo", "params:rewards"]
    nodes = {
        "make": node(make, typed, "report", name="make"),
        "images": node(make, typed, "baseline", name="images"),
        "half": node(half, "params:output", "folder", name="node_half"),
        "evaluate": node(judge, ["adapters", "parameters"], "trained", name="judge"),
        "prepared": node(prepare_only, ["params:data", "draft", "base_model"], "records", name="prepared"),
        "untrained": node(half, "params:output", "adapters", name="node_untrained"),
        "trained": node(fill, "params:output", "adapters", name="node_trained"),
        **{f.__name__: node(f, "report", None, name=f.__name__)
           for f in (interrupt, crash, mistake, terminate, greedy)},
    }
    own = pipeline([node(prepare, ["params:data", "draft"], "records", name="prepare"),
                    node(score, ["records", "parameters", "params:rewards"], "baseline", name="score")])
    scored = dict.fromkeys(("images", "untrained", "trained"), ["tracked", "training", "rewards"])
    tags = scored | {"evaluate": [*scored["trained"], "parameters_of.adapter"], "own": scored["trained"]}
    made = {**{name: [n] for name, n in nodes.items()}, "own": own.nodes, "__default__": [nodes["make"]]}
    return {name: pipeline(own, tags=tags.get(name, ["tracked"])) for name, own in made.items()}
"""

SCRIPT = """
import gc, json, os, pathlib, shutil, subprocess, time
gc.disable()
from visual_grpo.common import quiet_libraries
quiet_libraries.silence_libraries()
from kedro.framework.project import settings
from kedro.framework.startup import bootstrap_project

root = pathlib.Path.cwd()
bootstrap_project(root)
import mlflow

def end_of(pipeline, env="base", **parameters):
    try:
        with settings.SESSION_CLASS.create(root, env=env, runtime_params=parameters) as session:
            session.run(pipeline_names=[pipeline])
    except BaseException as error:
        return [type(error).__name__, getattr(error, "message", ""), getattr(error, "exit_code", None)]
    return "done"

def run(pipeline, **parameters):
    gc.freeze()  # Each node ends with a collection, of the libraries' objects too.
    end = end_of(pipeline, **parameters)
    database = (root / "mlflow.db").exists()
    if not database:
        shutil.copy(os.environ["EMPTY_DATABASE"], root / "mlflow.db")
    runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
    newest = max(runs, key=lambda r: r.info.start_time, default=None)
    assert mlflow.active_run() is None
    return {
        "end": end, "runs": len(runs), "database": database,
        "id": newest and newest.info.run_id, "status": newest and newest.info.status,
        "params": newest and newest.data.params, "tags": newest and newest.data.tags,
    }

import torch, yaml
from visual_grpo.config import Parameters
from visual_grpo.grpo.checkpoint import save_checkpoint
from visual_grpo.starter.world_defaults import with_world
tree = yaml.safe_load((root / "conf/base/parameters.yml").read_text())
settings_of_training = Parameters.model_validate(with_world({**tree, "seed": 0})).model_dump(mode="json")
out = {"missing": run("interrupt")}
out["env"] = run("make", env="sd3_smal")
out["device"] = run("images", model={"device": "cuda:99"})
out["secret"] = run("images", rewards={"rendering": {"options": {"api_key": "planted" + "-in-params"}}})
for name, line in (("plain", "a cat"), ("quoted", 'a sign that says "OPEN"')):
    (root / name).mkdir()
    (root / name / "prompts.txt").write_text("".join(f"{line} {number}\\n" for number in range(20)))
before = sorted(map(str, root.rglob("*")))
out["plain"] = run("own", data={"path": "plain"})
assert sorted(map(str, root.rglob("*"))) == before
out["made"] = run("make")
out["quoted"] = run("own", data={"path": "quoted"})
out["prepared"] = run("prepared", data={"path": "quoted"})
for name in ("half", "interrupt", "crash", "mistake", "terminate", "greedy"):
    out[name] = run(name)
out["untrained"] = run("untrained")
adapters = root / "data/06_models/adapters"
adapters.mkdir(parents=True)
parameters = {**settings_of_training, "seed": 5, "grpo": {**settings_of_training["grpo"], "loss": "dapo"}}
facts = {"mlflow_run_id": out["made"]["id"], "parameters": parameters}
(adapters / "training.json").write_text(json.dumps(facts))
for name, every in (("judged", 1), ("badly_judged", 77)):
    given = {"evaluation": {"every": every}, "data": {"height": 64}}
    out[name] = run("evaluate", **given) | {"of": mlflow.get_run(out["made"]["id"]).to_dictionary()}
checkpoints = root / "data/06_models/checkpoints"
checkpoints.mkdir(parents=True)

def checkpoint_of(run_id, number, **own):
    provenance = {"parameters": {**settings_of_training, **own}}
    provenance |= {"command": "the first command", "git.commit": "abc", "version.python": "3"}
    provenance |= {"adapter.digest": "planted", "mlflow.user": "planted"}
    facts = {"provenance": provenance, "mlflow_run_id": run_id}
    save_checkpoint(checkpoints, number, {"a": torch.zeros(1)}, facts)

checkpoint_of(out["interrupt"]["id"], 1)
out["other"] = run("trained", resume="auto", seed=77)
out["resumed"] = run("trained", resume="auto", grpo={"steps": 7, "schedule": "constant"})
out["resumed_by_name"] = run("trained", resume=str(checkpoints / "step-000001"))
elsewhere = root / "elsewhere"
checkpoints.rename(elsewhere)
(elsewhere / "step-000002").mkdir()
(elsewhere / "step-000002/facts.json").write_text(json.dumps({"mlflow_run_id": out["interrupt"]["id"]}))
out["elsewhere"] = run("trained", resume="auto", tracking={"checkpoints": "elsewhere"})
elsewhere.rename(checkpoints)
out["resumed_run"] = mlflow.get_run(out["interrupt"]["id"]).to_dictionary()
checkpoint_of("0" * 32, 2)
out["aside"] = run("make", resume="auto")
out["gone"] = run("trained", resume="auto")
checkpoint_of(out["untrained"]["id"], 3)
out["extended"] = run("trained", resume="auto", grpo={"steps": 90, "schedule": "constant"})
out["extended_run"] = mlflow.get_run(out["untrained"]["id"]).to_dictionary()
run("untrained", score={"path": "mine"})
for number, name in enumerate(("mine", "theirs"), 4):
    checkpoint_of(out["untrained"]["id"], number, score={"path": name})
    out[f"resumed_{name}"] = run("trained", resume="auto")
subprocess.run(["git", "init", "--quiet"], check=True)
os.environ["GIT_TEST_ASSUME_DIFFERENT_OWNER"] = "1"
out["distrusted"] = run("make")
began, os.environ["MLFLOW_TRACKING_URI"] = time.monotonic(), "http://127.0.0.1:9"
out["away"] = {"end": end_of("make", output="away"), "seconds": time.monotonic() - began}
pathlib.Path("out.json").write_text(json.dumps(out))
gc.enable()
gc.unfreeze()  # nanobind lists what is left at the end as leaked.
"""


CATALOG = """
draft: {type: MemoryDataset, data: a path}
report: {type: json.JSONDataset, filepath: data/report.json, metadata: {made_by: make}}
base_model: {type: json.JSONDataset, filepath: data/06_models/base_model.json, metadata: {made_by: starter}}
records:
  type: visual_grpo.data.datasets.RecordsDataset
  filepath: "${output:}/05_model_input/records.parquet"
  metadata: {made_by: data_preparation}
baseline: {type: json.JSONDataset, filepath: data/baseline.json, metadata: {made_by: baseline}}
folder: {type: visual_grpo.data.datasets.FolderDataset, filepath: data/folder, metadata: {made_by: half}}
adapters: {type: visual_grpo.data.datasets.FolderDataset, filepath: data/06_models/adapters, metadata: {made_by: train}}
trained: {type: visual_grpo.data.datasets.FolderDataset, filepath: data/trained, metadata: {made_by: evaluate}}
evaluation: {type: json.JSONDataset, filepath: "${output:}/08_reporting/evaluation.json", metadata: {made_by: evaluate}}
evaluation_report:
  type: visual_grpo.data.datasets.FolderDataset
  filepath: "${output:}/08_reporting/evaluation"
  metadata: {made_by: evaluate}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> dict[str, Any]:
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "conf", project / "conf")
    (project / "conf/base/catalog.yml").write_text(CATALOG)
    (project / "pyproject.toml").write_text(
        '[tool.kedro]\npackage_name = "small"\nproject_name = "small"\nkedro_init_version = "1.7.0"\n'
    )
    package = project / "src/small"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "settings.py").write_text("from visual_grpo.settings import *\n")
    (package / "pipeline_registry.py").write_text(REGISTRY)
    store = f"sqlite:///{project / 'mlflow.db'}"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=project,
        env=os.environ | {"MLFLOW_TRACKING_URI": store, "EMPTY_DATABASE": str(empty_database)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads((project / "out.json").read_text())
    return {**result, "printed": done.stdout + done.stderr, "data": project / "data"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", ["report.json", "kedro run --env=base --pipeline=make"]),
        ("env", ["The environment 'sd3_smal' does not exist in", "Did you mean 'sd3_small'? Environments: base, "]),
        ("device", ["model.device is 'cuda:99'"]),
        (
            "secret",
            ["rewards.rendering.options.api_key looks like a secret", "a reward may name that: $NAME"],
        ),
        ("plain", ["No reward fits the 20 records in plain", "--pipelines=own --params=data.path=plain,reward=text"]),
    ],
)
def test_what_can_be_known_before_is_told_before_anything_runs(runs, name, said):
    kind, message, code = runs[name]["end"]
    assert (kind, code, runs[name]["runs"]) == ("ClickException", 1, 0)
    assert [text for text in said if text not in message] == []
    assert "1 of 1: images" not in runs["printed"]
    assert "planted-in" not in runs["printed"]
    assert not runs["missing"]["database"]  # Looking for runs in this test creates it.


def test_no_memory_ends_with_the_parameters_that_need_less(runs):
    kind, message, code = runs["greedy"]["end"]
    assert (kind, code, runs["greedy"]["status"]) == ("ClickException", 1, "FAILED")
    assert "Out of memory" in message
    assert "Less memory: smaller policy.rollout_batch," in message


def test_nodes_and_mlflow_get_the_rewards_that_the_records_decide(runs):
    assert runs["quoted"]["end"] == "done"
    used = json.loads((runs["data"] / "baseline.json").read_text())
    assert used == {"reward": "text", "rewards": ["ocr", "edge_density", "colour_entropy"]}
    logged = runs["quoted"]["params"]
    assert (logged["reward"], logged["rewards.ocr.weight"]) == ("listed", "1.0")


def test_own_data_need_nothing_of_the_starter(runs):
    assert runs["prepared"]["end"] == "done"
    assert "Replacing dataset" not in runs["printed"]
    after = "kedro run --env=base --pipelines=starter,baseline --params=data.path=quoted\n"
    assert after in runs["printed"], "the pipelines that follow do need it"


def test_a_run_has_a_name_flat_parameters_and_its_lineage(runs):
    made = runs["made"]
    assert (made["end"], made["status"], made["tags"]["mlflow.runName"]) == ("done", "FINISHED", "make")
    assert f"MLflow run  make ({made['id'][:8]})" in runs["printed"]
    assert made["params"]["grpo.group_size"] == "8"
    assert not any(name.startswith(("vote.", "plan.", "generate.")) for name in made["params"]), "of other pipelines"
    assert "grpo.clip_low" in made["params"], "defaults that no YAML file names are logged too"
    assert not any(name.startswith("parameters") for name in made["params"])
    report = json.loads((runs["data"] / "report.json").read_text())
    assert report["kinds"] == ["Parameters", "GRPOConfig", "RewardConfig"], "nodes get typed parameters"
    assert {"version.torch", "version.python", "version.peft"} <= set(made["tags"])
    verdicts = [runs[name]["tags"]["verdict"] for name in ("made", "untrained")]
    assert verdicts == ["trains nothing", "not evaluated"]


@pytest.mark.parametrize(
    ("name", "status", "end", "error"),
    [
        ("interrupt", "KILLED", ["Exit", "", 130], (None, None)),
        ("terminate", "KILLED", ["Exit", "", 143], (None, None)),
        ("crash", "FAILED", ["RuntimeError", "", None], ("RuntimeError: a bug", "crash")),
        ("mistake", "FAILED", ["ClickException", "the file is empty", 1], ("the file is empty", "mistake")),
        ("half", "FAILED", ["ClickException", "the model cannot load", 1], ("the model cannot load", "node_half")),
    ],
)
def test_a_run_that_did_not_end_well_says_so_why_and_where(runs, name, status, end, error):
    assert (runs[name]["status"], runs[name]["end"]) == (status, end)
    assert (runs[name]["tags"].get("error"), runs[name]["tags"].get("error.node")) == error
    assert f"== 1 of 1: {error[1] or name}" in runs["printed"]


def test_an_evaluation_goes_on_in_the_trainings_run_with_its_parameters(runs):
    judged = runs["judged"]
    assert judged["end"] == "done"
    assert (runs["data"] / "trained/seed").read_text() == "5 dapo 64"
    run, before = judged["of"], runs["made"]
    assert run["info"]["status"] == "FINISHED"
    assert run["data"]["params"] == before["params"]
    assert {k: v for k, v in run["data"]["tags"].items() if not k.startswith("evaluate.")} == before["tags"]
    assert run["data"]["tags"]["evaluate.status"] == "finished"
    assert "Next: make ui" in runs["printed"]


def test_a_failed_evaluation_does_not_fail_the_training(runs):
    assert runs["badly_judged"]["end"] == ["ClickException", "no room left", 1]
    run = runs["badly_judged"]["of"]
    assert run["info"]["status"] == "FINISHED"
    tags = run["data"]["tags"]
    assert (tags["evaluate.status"], tags["evaluate.error"]) == ("failed", "no room left")
    assert (tags["evaluate.error.node"], "error" in tags) == ("judge", False)


def test_resuming_goes_on_in_the_checkpoints_run(runs):
    assert "made with different seed (was 0, is 77)" in runs["other"]["end"][1]
    assert runs["other"]["runs"] == runs["badly_judged"]["runs"], "refused before its first node"
    assert runs["resumed"]["end"] == "done"
    assert runs["resumed"]["runs"] == runs["elsewhere"]["runs"] == runs["badly_judged"]["runs"]
    assert runs["resumed_by_name"]["runs"] == runs["badly_judged"]["runs"]
    data = runs["resumed_run"]["data"]
    assert runs["resumed_run"]["info"]["status"] == "FINISHED"
    assert data["params"]["resume"] == "never"
    assert data["tags"]["resumed.resume"] == "auto"
    assert data["tags"]["resumed.grpo.steps"] == "7"


def test_an_extended_run_is_named_by_its_steps_and_keeps_the_command_and_the_code_of_its_first_part(runs):
    assert runs["extended"]["end"] == "done"
    tags = runs["extended_run"]["data"]["tags"]
    assert tags["mlflow.runName"] == "steps=90 ar+dit", "its schedule was constant before"
    assert tags["resumed.grpo.steps"] == "90"
    assert (tags["command"], tags["git.commit"], tags["version.python"]) == ("the first command", "abc", "3")
    assert tags["resumed.command"].startswith("python ")
    assert tags["resumed.version.python"].startswith("3.")


def test_a_checkpoint_of_this_project_needs_no_leave_for_what_its_command_was_given(runs):
    assert runs["resumed_mine"]["end"] == "done"
    message = runs["resumed_theirs"]["end"][1]
    assert "step-000005, which is not known as this project's own:\n  file, model or text: score.path = " in message
    assert "planted" not in runs["resumed_run"]["data"]["tags"].values(), "a checkpoint makes nothing the project's own"


def test_another_run_is_started_where_that_is_gone_or_is_no_training(runs):
    """A baseline would end a half-done training as FINISHED."""
    assert (runs["gone"]["end"], runs["aside"]["end"]) == ("done", "done")
    assert runs["gone"]["runs"] == runs["aside"]["runs"] + 1 == runs["elsewhere"]["runs"] + 2


def test_weights_are_for_those_whom_the_umask_allows(runs):
    """The library that writes them gives them to their owner alone."""
    weights, other = (runs["data"] / "06_models/adapters" / name for name in ("file.safetensors", "file"))
    assert weights.stat().st_mode == other.stat().st_mode


def test_a_checkout_that_git_does_not_trust_is_told_with_the_command(runs):
    assert runs["distrusted"]["end"] == "done"
    assert "git.commit" not in runs["distrusted"]["tags"]
    said = (
        "Warning: neither the commit nor uncommitted changes are recorded, since git refuses: fatal: detected dubious"
    )
    lines = [line for line in runs["printed"].splitlines() if line.startswith(said)]
    assert len(lines) == 1
    assert lines[0].endswith(f"git config --global --add safe.directory {runs['data'].parent}")


def test_a_run_goes_on_when_mlflow_is_away_from_its_start_to_its_end(runs):
    assert runs["away"]["end"] == "done"
    assert runs["away"]["seconds"] < 20
    assert runs["printed"].count("MLflow (http://127.0.0.1:9) fails: ") == 1


def test_nothing_but_the_projects_own_lines_is_printed(runs):
    ours = (
        "== ",
        "MLflow run",
        "adapter  ",
        "trained model's samples",
        "base model's samples",
        "Preparing records 20/20",
        *("Records", "found in  quoted", "files  ", "such as  ", "train  ", "eval  ", "held_out  ", "rejected  0"),
        "Note: 20 records: ",
        "Reward preset, chosen from the records: text (ocr: weight 1, edge_density: weight 0, colour",
        "The checkpoint elsewhere/step-000002 is damaged",
        "Parameters kept from the resumed run that differ from the configuration: score.path=mine",
        "Next: ",
        "Stopped.",
        "WARNING  MLflow run 0000",
        "MLflow (http://127.0.0.1:9) fails: ",
        "Warning: neither the commit",
    )
    lines = [line.strip() for line in runs["printed"].splitlines() if line.strip()]
    assert [line for line in lines if not line.startswith(ours)] == []
