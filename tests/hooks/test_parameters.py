"""The parameters of a command: what is given is used, or refused with its name before anything is touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kedro.io import DataCatalog, MemoryDataset

from tests.small_project import ROOT
from visual_grpo.adapter_folder import adapter_digest
from visual_grpo.common.digests import file_digest
from visual_grpo.common.errors import UserError
from visual_grpo.config.validation import validate
from visual_grpo.data.datasets import FolderDataset
from visual_grpo.grpo.checkpoint import SUMS, save_checkpoint
from visual_grpo.hooks.cli import parsed
from visual_grpo.hooks.parameters import RUN_SPEC, ParameterHooks, ProjectConfigLoader
from visual_grpo.models.run_spec import resolve
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.settings import CONFIG_LOADER_ARGS
from visual_grpo.training import made_with


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("tracking=3", "tracking = 3"),
        ("rewards=3", "rewards = 3"),
        ("data=null", "data = None"),
        ("starter=3", "starter = 3"),
        ("data.path=[1]", r"data.path = \[1\]"),
        ("tracking.checkpoints=[3],resume=auto", r"tracking.checkpoints = \[3\]"),
        ("resume=null", "resume = None"),
        ("seed=3 grpo.steps=2", "seed = '3 grpo.steps=2'"),
        ("grpo..steps=3", "grpo.: this parameter does not exist"),
        (".a=3", "this parameter does not exist"),
        (
            "retrain.notify=curl https://hooks.slack.com/services/a",
            "retrain.notify looks like a secret",
        ),
        ("data.mask_value=3", "data.mask_value is 3, which nothing reads: .* masks, and task is t2i. Leave it out"),
        ("data.fps=8", "data.fps is 8.0, which nothing reads: .* frames is null. Leave it out, or set it to 16.$"),
        ("data.revision=v1", "data.revision is v1, which nothing reads: it is for a dataset of the hub, and path does"),
        ("data.config=en", "data.config is en, which nothing reads: it is for a dataset of the hub, and path does"),
    ],
)
def test_a_slip_is_named(given: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        ParameterHooks().after_context_created(context_of(given))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"parameters.yml": "seed: 3  # é".encode("latin-1")},
            r"conf/local/parameters.yml is not valid UTF-8: .*0xe9.* Save it",
        ),
        (
            {"parameters.yml": b"seed: 3", "parameters_mine.yml": b"seed: 4"},
            r"Duplicate keys found in .*parameters\w*.yml and .*parameters\w*.yml: seed",
        ),
        ({"parameters.yml": b"[1, 2]"}, r"The configuration in .*conf cannot be read"),
        ({"catalog.yml": b"# \xe9"}, r"conf/local/catalog.yml is not valid UTF-8: .*0xe9.* Save it"),
    ],
)
def test_files_of_conf_that_cannot_be_read_are_named(tmp_path: Path, files: dict[str, bytes], said: str) -> None:
    shutil.copytree(ROOT / "conf/base", tmp_path / "conf/base")
    (tmp_path / "conf/local").mkdir()
    for name, content in files.items():
        (tmp_path / "conf/local" / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        ParameterHooks().after_context_created(context_of("", tmp_path / "conf"))


@pytest.mark.parametrize(
    ("local", "given"),
    [
        ("", "grpo.learning_rate=1e-4,grpo.kl_weight=0.02,modules.dit.kl_weight=0.04"),
        ("grpo: {learning_rate: 1.0e-4, kl_weight: 0.02}\nmodules: {dit: {kl_weight: 0.04}}", ""),
        ("grpo: {learning_rate: 1.0e-4, kl_weight: 0.02}", "modules.dit.kl_weight=0.04"),
        ("modules: {dit: {learning_rate: 1.0e-3, kl_weight: 0.04}}", "grpo.learning_rate=1e-4"),
        ("grpo: {learning_rate: 1.0e-4, kl_weight: 0.04}\nmodules: {dit: null}", "modules.dit.advantage_epsilon=0.03"),
    ],
)
def test_grpo_parameters_replace_those_of_single_modules_in_earlier_sources(
    tmp_path: Path, local: str, given: str
) -> None:
    """conf/base sets different ones for dit; conf/local is later, --params last."""
    shutil.copytree(ROOT / "conf/base", tmp_path / "conf/base")
    (tmp_path / "conf/local").mkdir()
    (tmp_path / "conf/local/parameters.yml").write_text(local)
    hooks = ParameterHooks()
    hooks.after_context_created(context_of(given, tmp_path / "conf"))
    dit = hooks._parameters.grpo_of("dit")
    assert (dit.learning_rate, dit.kl_weight, dit.advantage_epsilon) == (1e-4, 0.04, 0.03)


@pytest.mark.parametrize("env", [*sorted(path.name for path in (ROOT / "conf").glob("*_small")), "text"])
def test_a_setting_of_a_small_models_only_module_leaves_the_rewards(env: str) -> None:
    weights = []
    for given in ("", "modules.dit.learning_rate=1e-4"):
        loader = ProjectConfigLoader(str(ROOT / "conf"), env=env, runtime_params=parsed(given), **CONFIG_LOADER_ARGS)
        weights.append(validate(loader["parameters"]).weights(["dit"]))
    assert weights[0] == weights[1]


@pytest.mark.parametrize(("given", "output"), [("", "before"), (",output=moved", "moved")])
def test_a_resumed_run_has_its_parameters_and_the_folder_that_is_given(given: str, output: str, tmp_path: Path) -> None:
    before = hooks_of("seed=5,output=before")._parameters.public()
    before["data"]["fps"] = 8.0  # Nothing reads it, and earlier versions did not refuse it.
    written = save_checkpoint(tmp_path, 1, {"a": torch.zeros(1)}, {"provenance": {"parameters": before}})
    trusted = file_digest(written / SUMS)[:32]
    resumed = hooks_of(f'resume={written}{given},trust="{trusted}"')._parameters
    assert (resumed.seed, resumed.output) == (5, output)
    assert resumed.tracking.checkpoints == f"{output}/06_models/checkpoints"


def test_resume_same_is_settled_before_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "start/ar").mkdir(parents=True)
    weights = tmp_path / "start/ar/adapter_model.safetensors"
    weights.write_bytes(b"weights")
    base_model = {"model": "data/06_models/base", "digest": "digest", "content": None}
    hooks = hooks_of("resume=same,train.start=start,policy.train=ar")
    config = hooks._parameters
    (tmp_path / "start/training.json").write_text(json.dumps({"parameters": config.public()}))
    made = made_with.of(resolve(config), base_model, "data", adapter_digest(tmp_path / "start"))
    metadata = {"provenance": made, "mlflow_run_id": None}
    save_checkpoint(Path(config.tracking.checkpoints), 1, {"a": torch.zeros(1)}, metadata)

    def settled() -> tuple[str, str]:
        inputs = {"base_model": base_model, "records": SimpleNamespace(digest="data")}
        catalog = DataCatalog({name: MemoryDataset(value) for name, value in inputs.items()})
        catalog["adapters"] = FolderDataset(filepath=str(tmp_path / "adapters"))
        hooks.after_catalog_created(catalog)
        hooks.before_pipeline_run(register_pipelines()["train"], catalog)
        return catalog.load("parameters").resume, catalog.load(RUN_SPEC).config.resume

    assert settled() == ("auto", "auto")
    weights.write_bytes(b"others")
    assert settled() == ("never", "never"), "from other adapters"


def hooks_of(given: str) -> ParameterHooks:
    hooks = ParameterHooks()
    hooks.after_context_created(context_of(given))
    return hooks


def context_of(given: str, conf: Path = ROOT / "conf") -> Any:
    loader = ProjectConfigLoader(str(conf), env="local", runtime_params=parsed(given), **CONFIG_LOADER_ARGS)
    return SimpleNamespace(config_loader=loader, env="local")
