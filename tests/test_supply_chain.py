"""What is read from disk or the hub is data, never code; what is installed or run by a workflow is pinned."""

from __future__ import annotations

import ast
import pickle
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.models.families.sd3 import tiny
from visual_grpo.common.errors import UserError
from visual_grpo.config import ModelConfig
from visual_grpo.models.loading import load_pipeline
from visual_grpo.rewards.learned.pretrained import read_weights

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
RUN_CODE = {
    "pickle": {"load", "loads", "Unpickler"},
    "torch": {"load"},
    "joblib": {"load"},
    "dill": {"load", "loads"},
    "shelve": {"open"},
    "marshal": {"load", "loads"},
    "yaml": {"load", "full_load", "unsafe_load", "load_all"},
    "pd": {"read_pickle"},
    "os": {"system", "popen"},
}
"""Module -> its functions that can run code which comes with what they read."""
TENSORS_ALONE = {("torch", "load"): "weights_only"}
"""Calls that run nothing with this argument: rewards.learned reads weights that are published as no safetensors."""
WITHOUT_WEIGHTS = ("Processor", "processor_class", "config_class", "Tokenizer", "Scheduler", "Config")
BY_FOLDER = "PeftModel"
"""peft reads a pickle where there is no safetensors file; policies.lora asks for that file first."""

LOCKS = subprocess.run(
    ["git", "ls-files", "*.lock"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def keyword(call: ast.Call, name: str) -> object:
    values = [ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg == name]
    return values[0] if values else None


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.stem)
def test_nothing_that_is_read_can_run_code(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        on, _, name = ast.unparse(call.func).rpartition(".")
        where = f"{file.name}:{call.lineno}"
        tensors_alone = (on, name) in TENSORS_ALONE and keyword(call, TENSORS_ALONE[on, name]) is True
        assert tensors_alone or name not in RUN_CODE.get(on, ()), f"{where} calls {on}.{name}"
        assert (on, name) not in {("", "eval"), ("", "exec")}, where
        for switch in ("allow_pickle", "trust_remote_code", "shell"):
            assert not keyword(call, switch), f"{where} passes {switch}"
        weights = name == "from_pretrained" and not on.endswith(WITHOUT_WEIGHTS) and on != BY_FOLDER
        of_transformers = on.startswith("Auto") or on.endswith("processor_class") or "transformers" in on
        asks = name == "from_pretrained" and of_transformers and keyword(call, "trust_remote_code") is not False
        assert not asks, f"{where}: without trust_remote_code=False transformers asks the user whether to run code"
        assert not weights or keyword(call, "use_safetensors") is True, f"{where}: {on}.from_pretrained"


class Planted:
    """Unpickling it makes the file ``proof``."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.proof,))


def test_a_component_that_points_to_another_model_is_refused(tmp_path: Path) -> None:
    tiny.pipeline().save_pretrained(tmp_path)
    (tmp_path / "text_encoder/adapter_config.json").write_text('{"base_model_name_or_path": "attacker/repository"}')
    with pytest.raises(UserError, match=r"text_encoder/adapter_config\.json names a different model"):
        load_pipeline("StableDiffusion3Pipeline", str(tmp_path), ModelConfig(path="unused"))


def test_weights_as_a_pickle_are_refused_unread(tmp_path: Path) -> None:
    folder, proof = tmp_path / "model", tmp_path / "ran"
    tiny.pipeline().save_pretrained(folder)
    (folder / "transformer/diffusion_pytorch_model.safetensors").unlink()
    (folder / "transformer/diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Planted(proof)))
    with pytest.raises(UserError, match="cannot be loaded"):
        load_pipeline("StableDiffusion3Pipeline", str(folder), ModelConfig(path="unused"))
    assert not proof.exists()
    shutil.rmtree(folder)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_weights_that_brings_code_is_refused_unread(zipped: bool, tmp_path: Path) -> None:
    torch.save({"a": Planted(tmp_path / "ran")}, tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=r"w.pth cannot be read as weights"):
        read_weights("lpips", tmp_path / "w.pth")
    assert not (tmp_path / "ran").exists()


def test_every_imported_library_is_declared() -> None:
    """One that comes with another library alone may be gone with that one's next version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    optional = [*project["dependency-groups"]["dvc"], *project["dependency-groups"]["quantised"]]
    declared = {canonicalize_name(Requirement(text).name) for text in [*project["project"]["dependencies"], *optional]}
    installed = packages_distributions()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"visual_grpo"}:
                known = {canonicalize_name(each) for each in installed.get(name, [name])}
                assert known & declared, f"{file.name} imports {name}, which pyproject.toml does not declare"


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_no_index_and_has_every_hash(name: str) -> None:
    lock = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"https?://|--(extra-)?index-url|--find-links", lock)
    pins = re.findall(r"^[a-z0-9][^\n]*==[^\n]*", lock, re.MULTILINE)
    assert pins
    assert all(pin.rstrip().endswith("\\") for pin in pins), "every pin is followed by its hashes"


def test_every_environment_has_a_lock() -> None:
    workers = [f"{script.parent.relative_to(ROOT)}/requirements.lock" for script in ROOT.glob("workers/*/worker.py")]
    assert len(workers) >= 8
    project = ["requirements.lock", "quantised.lock", "tools.lock", "audit.lock", "benchmarks/requirements.lock"]
    assert sorted(LOCKS) == sorted([*workers, *project])


@pytest.mark.parametrize("target", ["audit", "sbom"])
def test_the_packages_of_every_lock_are_looked_at(target: str) -> None:
    words = ["make", "--dry-run", "--old-file=setup", target]
    planned = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [loop] = re.findall(r"for lock in (.*?);", planned)
    assert sorted(loop.split()) == sorted(LOCKS)


def test_make_installs_nothing_that_is_not_locked() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    installing = [line for line in makefile.splitlines() if re.search(r"\bpip (install|sync)\b|\btool run\b", line)]
    assert len(installing) >= 7
    locked = ("--require-hashes", "--no-deps --no-build-isolation --editable .", "--constraint requirements.lock")
    assert [line for line in installing if not any(word in line for word in locked)] == []


@pytest.mark.parametrize("file", [*WORKFLOWS, ROOT / "schedules/github-actions.yml"], ids=lambda file: file.stem)
def test_a_workflow_names_actions_by_commit(file: Path) -> None:
    """A tag can be moved to other code."""
    text = file.read_text(encoding="utf-8")
    assert 0 < text.count("uses:") == len(re.findall(r"uses: \S+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", text, re.MULTILINE))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_no_package_runs_in_a_job_whose_token_can_write(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        scripts = "\n".join(step.get("run", "") for step in job["steps"])
        if "write" in job.get("permissions", {}).values():
            assert not re.search(r"\b(make|pip|uv|kedro|\.venv)\b|\.ci/run", scripts)
            continue
        checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert [own.get("with", {}).get("persist-credentials") for own in checkouts] == [False]
        assert "github.token" not in str(job)
        assert "secrets." not in str(job)
