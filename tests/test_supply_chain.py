"""What is read from disk or the hub is data, never code: safetensors and JSON, no pickles."""

from __future__ import annotations

import ast
import pickle
import shutil
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
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
        assert not weights or keyword(call, "use_safetensors") is True, f"{where}: {on}.from_pretrained"


class Planted:
    """Unpickling it makes the file ``proof``."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.proof,))


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
