"""DVC's stages: that none lacks what its pipeline reads, leaves or depends on, in any environment."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kedro.framework.project import configure_project, pipelines

from tests.evaluation.defaults import FILE
from tests.small_project import ROOT, merged
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.config.pipelines import DATA_FLOW
from visual_grpo.operations.retraining.__main__ import main
from visual_grpo.operations.retraining.project import PARAMETERS, Project, read_project, stage_parameters
from visual_grpo.starter.world_defaults import with_world


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder with one more environment."""
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    (tmp_path / "conf/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def project(environment: str | None = None, **changes: Any) -> Project:
    tree = merged(yaml.safe_load(FILE.read_text(encoding="utf-8")), changes)
    return Project(Parameters.model_validate(with_world(tree, environment)), environment)


def stages(about: Project) -> dict[str, Any]:
    """The stages as DVC reads them."""
    values = yaml.safe_load(about.values.read_text(encoding="utf-8"))
    text = re.sub(r"\$\{(\w+)\}", lambda found: str(values[found[1]]), about.stages.read_text(encoding="utf-8"))
    found: dict[str, Any] = yaml.safe_load(text)["stages"]
    return found


def outputs(stage: dict[str, Any]) -> set[str]:
    listed = [*stage.get("outs", []), *stage.get("metrics", [])]
    return {path for out in listed for path in (out if isinstance(out, dict) else [out])}


@pytest.mark.parametrize("environment", [None, "mine"])
def test_every_input_and_output_of_a_pipeline_stands_in_its_stage(folder: Path, environment: str | None) -> None:
    configure_project("visual_grpo")
    about = project(environment)
    about.write()
    found, output = stages(about), about.config.output
    catalog = yaml.safe_load((ROOT / "conf/base/catalog.yml").read_text(encoding="utf-8"))
    paths = {
        name: entry["filepath"].replace("${output:}", output) for name, entry in catalog.items() if "filepath" in entry
    }
    assert list(found) == ["parameters", *DATA_FLOW]
    for name in DATA_FLOW:
        made = {paths[dataset] for dataset in pipelines[name].all_outputs() if dataset in paths}
        read = {paths[dataset] for dataset in pipelines[name].inputs() if dataset in paths}
        assert made <= outputs(found[name]), name
        # The preparation reads no base model: it only comes after the starter, whose data it depends on.
        unread = {paths["base_model"]} if name == "data_preparation" else set()
        assert read - made - unread <= set(found[name]["deps"]), name
        assert found[name]["params"] == [{f"{output}/{PARAMETERS}": [name]}]
        assert "src/visual_grpo" in found[name]["deps"]
    left = {out for stage in found.values() for out in outputs(stage)}
    assert {dep for stage in found.values() for dep in stage.get("deps", []) if dep.startswith(output)} <= left
    assert not any(out.startswith(f"{output}/06_models/checkpoints") for out in left)
    assert {*DATA_FLOW} == json.loads((folder / output / PARAMETERS).read_text()).keys()


def test_the_committed_values_are_those_of_the_configuration(folder: Path) -> None:
    about = project()
    about.write()
    assert about.values.read_text(encoding="utf-8") == (ROOT / "params.yaml").read_text(encoding="utf-8")
    assert not about.write(), "and are written once"


def test_an_environment_has_a_copy_of_the_stages_and_its_own_values(folder: Path) -> None:
    about = project("mine")
    assert about.write()
    assert (folder / "conf/mine/dvc.yaml").read_bytes() == (folder / "dvc.yaml").read_bytes()
    train = stages(about)["train"]
    assert train["wdir"] == "../.."
    assert train["cmd"] == ".venv/bin/kedro run --pipeline=train --env=mine --params=resume=same,"
    assert outputs(train) == {"data/mine/06_models/adapters", "data/mine/08_reporting/training.csv"}
    assert not about.write()
    (folder / "dvc.yaml").write_text("stages: {}\n")
    assert about.write(), "the copy follows"


def test_own_data_and_an_own_model_are_read_where_they_are(folder: Path, tmp_path: Path) -> None:
    for name in ("photos", "model"):
        (folder / name).mkdir()
    about = project(data={"path": "photos"}, model={"path": str(folder / "model")})
    about.write()
    found = stages(about)
    assert "photos" in found["data_preparation"]["deps"]
    assert not outputs(found["starter"]) & set(found["data_preparation"]["deps"]), "few records are refused at once"
    assert all("model" in found[name]["deps"] for name in ("starter", "baseline", "train", "evaluate"))
    assert all(out.startswith("data/photos-") for out in outputs(found["train"]))
    on_hub = project(model={"path": "someone/model"})
    on_hub.write()
    assert "requirements.lock" in stages(on_hub)["starter"]["deps"]


def test_parameters_of_the_training_are_kept_and_replaced(folder: Path) -> None:
    about = project()
    about.write()
    about.values.write_text(about.values.read_text().replace("train_params: ''", "train_params: grpo.steps=5, seed=2"))
    assert about.training_params() == {"grpo.steps": "5", "seed": "2"}
    assert about.write(**{"train.seed": "3", "seed": None})
    assert about.training_params() == {"grpo.steps": "5", "train.seed": "3"}
    assert not about.write(**{"train.seed": "3"})


def test_a_stage_depends_on_what_decides_and_on_own_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(**changes: Any) -> list[str]:
        before, now = (stage_parameters(project(**each).config) for each in ({}, changes))
        return [name for name in DATA_FLOW if before[name] != now[name]]

    assert changed(evaluation={"bootstrap_samples": 700}) == ["evaluate"]
    assert changed(evaluation={"images_per_prompt": 3}) == ["baseline", "evaluate"]
    assert changed(grpo={"steps": 7}) == ["train"]
    assert changed(promotion={"margin": 0.1}, tracking={"images_every": 3}) == []
    assert changed(seed=7) == ["starter", "train"]
    (folder / "own_reward_here.py").write_text("def score(a, b): ...\n")
    (folder / "words.txt").write_text("a")
    monkeypatch.syspath_prepend(folder)
    own = {"own": {"function": "own_reward_here:score", "options": {"words": "words.txt"}}}
    config = project(rewards=own).config
    for file in ("own_reward_here.py", "words.txt"):
        before = stage_parameters(config)
        (folder / file).write_text("# another\ndef score(a, b): ...\n")
        now = stage_parameters(config)
        assert [name for name in DATA_FLOW if before[name] != now[name]] == ["baseline", "train", "evaluate"]
    theirs = project(model={"lora": "theirs.safetensors"}), project(train={"start": "theirs.safetensors"})
    for config, stage in zip((each.config for each in theirs), ("starter", "train"), strict=True):
        (folder / "theirs.safetensors").write_text("a")
        before = stage_parameters(config)
        (folder / "theirs.safetensors").write_text("bc")
        now = stage_parameters(config)
        assert [name for name in DATA_FLOW if before[name] != now[name]] == [stage]
    assert changed(train={"start": "champion"}) == ["train"]
    about = project()
    stages = []
    for text in ("a", "bc"):
        (folder / "theirs.safetensors").write_text(text)
        about.write(**{"train.start": "theirs.safetensors"})
        stages.append(json.loads(Path(about.config.output, PARAMETERS).read_text()))
    assert [name for name in DATA_FLOW if stages[0][name] != stages[1][name]] == ["train"], (
        "train_params names the file"
    )
    about.write(**{"train.start": None})
    world = "from examples.words import WORLD as WORDS\nWORLD = replace(WORDS, render='own_signs_here:draw')\n"
    (folder / "own_world_here.py").write_text(f"from dataclasses import replace\n{world}")
    (folder / "own_signs_here.py").write_text("def draw(*place): ...\n")
    config = project(starter={"world": "own_world_here:WORLD"}).config
    before = stage_parameters(config)
    (folder / "own_signs_here.py").write_text("# another\ndef draw(*place): ...\n")
    now = stage_parameters(config)
    assert [name for name in DATA_FLOW if before[name] != now[name]] == ["starter"]


def test_a_folder_without_a_project_and_an_unknown_environment_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="is not the folder of a Visual GRPO project"):
        read_project(tmp_path, None)
    monkeypatch.chdir(ROOT)
    assert main(["--env=txt"]) == 1
    told = capsys.readouterr().out
    assert told.startswith("Error: The environment 'txt' does not exist in ")
    assert "Did you mean 'text'" in told.replace("\n", " ")


HEAVY = """
import sys
from pathlib import Path
import visual_grpo.operations.retraining.__main__
from visual_grpo.operations.retraining.project import read_project, stage_parameters
assert stage_parameters(read_project(Path.cwd(), None).config)["train"]
print(sorted({"torch", "scipy", "pandas", "diffusers", "transformers", "mlflow", "dvc"} & set(sys.modules)))
"""


def test_what_a_dry_run_reads_imports_no_heavy_library() -> None:
    done = subprocess.run([sys.executable, "-c", HEAVY], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stderr
