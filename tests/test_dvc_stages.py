"""What DVC is told of the pipelines: generated, complete, and without anything stale."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from kedro.framework.project import configure_project

from visual_grpo import sources
from visual_grpo.config import Parameters
from visual_grpo.config.outputs import FLOW
from visual_grpo.config.training import EvaluationConfig, ModuleConfig
from visual_grpo.decisive_parameters import NEVER, NOT_READ, decides, decisive, decisive_keys
from visual_grpo.dvc_stages.__main__ import main
from visual_grpo.dvc_stages.environment import Environment
from visual_grpo.dvc_stages.stages import stages_text
from visual_grpo.errors import UserError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the configuration; the code is this project's."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf", ignore=shutil.ignore_patterns("dvc.*"))
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    configure_project("visual_grpo")
    return tmp_path


def text(environment: str | None = None) -> str:
    return stages_text(Environment.read(environment))


def stages(environment: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text(environment))["stages"]
    return found


def outputs(stage: dict[str, Any]) -> set[str]:
    listed = [*stage.get("outs", []), *stage.get("metrics", [])]
    return {path for out in listed for path in (out if isinstance(out, dict) else [out])}


def configure(project: Path, environment: str, text: str) -> None:
    (project / "conf" / environment).mkdir(exist_ok=True)
    (project / "conf" / environment / "parameters.yml").write_text(text, encoding="utf-8")


def test_the_committed_file_is_what_the_pipelines_make_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    configure_project("visual_grpo")
    written = (ROOT / "dvc.yaml").read_text(encoding="utf-8")
    assert written == text(), "run: make dvc-stages"
    for name, stage in yaml.safe_load(written)["stages"].items():
        for dependency in stage["deps"]:
            assert dependency.startswith("data/") or (ROOT / dependency).exists(), f"{name}: {dependency}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("      - src/visual_grpo/training.py\n", ""),
        ("      - src/visual_grpo/training.py\n", "      - src/visual_grpo/training.py\n      - src/gone.py\n"),
        ("          - evaluation.seed\n", ""),
    ],
    ids=["missing", "stale", "a parameter"],
)
def test_a_file_that_says_something_else_is_refused_and_written_again(project, capsys, old, new):
    right = (project / "dvc.yaml").read_text(encoding="utf-8")
    (project / "dvc.yaml").write_text(right.replace(old, new, 1), encoding="utf-8")
    assert main(["--check"]) == 1
    assert "dvc.yaml is not what the pipelines and parameters" in capsys.readouterr().err
    assert main([]) == 0
    assert (project / "dvc.yaml").read_text(encoding="utf-8") == right
    assert main(["--check"]) == 0


def test_a_result_depends_on_what_its_pipeline_imports_be_it_within_a_function_or_by_name():
    files = {name: {file.as_posix() for file in sources.files_of(name)} for name in FLOW}
    by_name = {"rewards/ocr.py", "policies/sd3/model.py", "starter/shapes/reward.py"}
    lazily = {"components.py", "policies/lora.py", "hardware/parallel.py"}
    for name in ("baseline", "train", "evaluate"):
        assert by_name | lazily <= files[name]
    assert {"grpo/trainer.py", "grpo/losses.py", "grpo/two_stage.py", "training.py"} <= files["train"]
    of_trainer = {file for file in files["baseline"] if file.startswith("grpo/")}
    assert of_trainer == {"grpo/packing.py"}, "what other processes are sent"
    assert {"evaluation/compare.py", "evaluation/headline.py"} <= files["evaluate"] - files["train"]
    assert "records/split.py" in files["data_preparation"]
    assert not any(file.startswith(("console", "tracking", "hooks")) for found in files.values() for file in found)


def test_what_is_left_out_of_imports_is_still_there(monkeypatch):
    monkeypatch.setattr(sources, "NOT_CALLED", [("components", "grpo.losses")])
    sources._graph.cache_clear()
    with pytest.raises(ValueError, match="no longer imports"):
        sources.files_of("baseline")
    sources._graph.cache_clear()


def test_every_parameter_that_decides_is_written_in_conf_base():
    tree = yaml.safe_load((ROOT / "conf/base/parameters.yml").read_text(encoding="utf-8"))
    for pipeline in NOT_READ:
        assert {name for name in Parameters.model_fields if decides(pipeline, name)} <= tree.keys()
        keys = {f"evaluation.{name}" for name in EvaluationConfig.model_fields}
        assert {name for name in keys if decides(pipeline, name)} <= set(decisive_keys(pipeline, tree))


def test_what_decides_nothing_are_names_of_parameters():
    sections = set(Parameters.model_fields)
    known = sections | {f"evaluation.{name}" for name in EvaluationConfig.model_fields}
    known |= {f"modules.*.{name}" for name in ModuleConfig.model_fields}
    assert {*NEVER, *(name for names in NOT_READ.values() for name in names)} <= known


def test_of_a_module_only_its_rewards_and_its_adapter_decide_what_is_evaluated():
    training = {name: 1 for name in ModuleConfig.model_fields if name not in ("rewards", "lora")}
    tree = {"modules": {"dit": {**training, "rewards": {"ocr": 1.0}, "lora": {"rank": 4}}, "ar": training}}
    for pipeline in ("baseline", "evaluate"):
        assert decisive(pipeline, tree) == {"modules.dit.rewards.ocr": 1.0, "modules.dit.lora.rank": 4}
        assert decisive_keys(pipeline, tree) == ["modules.dit.rewards", "modules.dit.lora"]
        assert decisive(pipeline, {"modules": {}}) == decisive(pipeline, {"modules": {"ar": training}})
    assert len(decisive("train", tree)) == 2 * len(training) + 2
    assert decisive_keys("train", tree) == ["modules"]


def test_the_intervals_of_an_evaluation_are_its_own_parameter(project):
    reading = [name for name, stage in stages().items() if "evaluation.bootstrap_samples" in str(stage["params"])]
    assert reading == ["evaluate"]


def test_checkpoints_are_no_output_of_dvc(project):
    checkpoints = Path("data/06_models/checkpoints")
    outs = [Path(out) for stage in stages().values() for out in outputs(stage)]
    assert not any(out == checkpoints or out in checkpoints.parents for out in outs)


def test_what_a_stage_reads_another_one_leaves(project):
    found = stages()
    left = {out for stage in found.values() for out in outputs(stage)}
    read = {dependency for stage in found.values() for dependency in stage["deps"] if dependency.startswith("data/")}
    assert read <= left
    assert {"data/05_model_input/images", "data/06_models/base", "data/07_model_output/baseline"} <= read


def test_another_environment_has_a_file_of_its_own(project, capsys):
    assert main(["--env=text"]) == 0
    written = yaml.safe_load((project / "conf/text/dvc.yaml").read_text(encoding="utf-8"))
    assert written["vars"] == ["../../conf/text/start.yml"]
    assert (project / "conf/text/start.yml").is_file()
    train = written["stages"]["train"]
    assert train["wdir"] == "../.."
    assert train["cmd"] == ".venv/bin/kedro run --pipeline=train --env=text --params=resume=same,${train_params}"
    assert outputs(train) == {"data/text/06_models/adapters", "data/text/08_reporting/training.csv"}
    assert "conf/local" not in train["deps"]
    by_file = {file: keys for entry in train["params"] for file, keys in entry.items()}
    assert by_file["conf/text/parameters.yml"] == ["data", "evaluation.every", "evaluation.prompts", "grpo", "policy"]
    assert written["stages"]["check"]["deps"] == ["conf/text/parameters.yml"], "a new section makes the file stale"
    assert (project / "dvc.yaml").read_text() == (ROOT / "dvc.yaml").read_text(), "the default's is as it was"
    shutil.copytree(project / "conf/text", project / "conf/mine")
    assert main(["--check", "--env=mine"]) == 1
    assert "Write it again: make dvc-stages ENV=mine" in capsys.readouterr().err


def test_own_data_own_rewards_and_an_own_model_are_dependencies(project, monkeypatch):
    (project / "my_reward.py").write_text("import my_helper\ndef score(a, b): ...\n", encoding="utf-8")
    (project / "my_helper.py").write_text("", encoding="utf-8")
    (project / "words.txt").write_text("", encoding="utf-8")
    (project / "model").mkdir()
    monkeypatch.syspath_prepend(project)
    configure(
        project,
        "mine",
        "data: {path: photos}\nmodel: {family: sd3, path: model}\nmodules: {dit: null}\n"
        "rewards: {own: {function: 'my_reward:score', options: {words: words.txt, mode: fast}}}\n",
    )
    found = stages("mine")
    assert "photos" in found["data_preparation"]["deps"]
    assert "model" in found["starter"]["deps"]
    assert outputs(found["starter"]) == {next(iter(outputs(found["starter"])))}, "only its report: nothing is drawn"
    for name in ("baseline", "train", "evaluate"):
        assert {"my_reward.py", "my_helper.py", "words.txt"} <= set(found[name]["deps"])
    assert all(out.startswith("data/mine/photos-") for out in outputs(found["train"]))


def test_data_elsewhere_is_named_by_its_whole_path(project):
    configure(project, "mine", "data: {path: /elsewhere/photos}\n")
    assert "/elsewhere/photos" in stages("mine")["data_preparation"]["deps"]
    configure(project, "mine", f"data: {{path: {project}/photos}}\n")
    assert "photos" in stages("mine")["data_preparation"]["deps"]


def test_an_environment_that_is_not_there_or_wrong_is_named(project, capsys):
    assert main(["--env=txt"]) == 1
    assert "There is no environment 'txt' in conf. Did you mean 'text'?" in capsys.readouterr().err
    configure(project, "mine", "grpo: {stepps: 3}\n")
    assert main(["--env=mine"]) == 1
    assert "grpo.stepps" in capsys.readouterr().err
    configure(project, "mine", "grpo: {steps: ${nothing}}\n")
    with pytest.raises(UserError, match="conf/mine"):
        text("mine")
