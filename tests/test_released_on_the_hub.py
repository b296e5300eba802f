"""`kedro run` with released models' names and layouts on a local hub: an empty cache, then without a network."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from tests.data.folders import photo, prompts_only
from tests.hub import COMMIT, counted, hub
from tests.models import released
from tests.rewards.segmentation.small_sam2 import save_sam2
from tests.small_project import TINY, environment, merged, project_copy

CPU = {"device": "cpu", "dtype": "float32"}
STEPS = {"rollout": {"steps": 3}, "eval": {"steps": 2}}
FEW = {
    "data": {"path": "prompts", "height": 64, "width": 64},
    "model": CPU | {"options": {}},
    "policy": {"lora": {"rank": 2, "alpha": 4}, "flow": {"window_steps": 1}},
    "sampling": STEPS,
    "reward": "listed",
    "rewards": {"colour_entropy": {"weight": 1.0}},
    "grpo": {"steps": 1},
    "evaluation": {"every": 0},
    "tracking": {"images_every": 0},
}
FRAMES = {"rewards": {"colour_entropy": {"frames": "all", "over_frames": "mean"}}}
SAM = "facebook/sam2.1-hiera-large"
MASKS = {"data": {"path": "queries"}, "model": {"options": {"max_tokens": 6}}, "sampling": None, "reward": "auto"}
MASKS |= {"rewards": {"colour_entropy": None, "negative_points": {"options": {"segmenter": {"device": "cpu"}}}}}
ENVIRONMENTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "sd3": ("stabilityai/stable-diffusion-3.5-medium", {}),
    "flux": ("black-forest-labs/FLUX.1-dev", {}),
    "z_image": ("Tongyi-MAI/Z-Image", {}),
    "qwen_image_edit_plus": ("Qwen/Qwen-Image-Edit-2511", {"data": {"path": "edits"}}),
    "wan": ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", {"data": {"frames": 5}, **FRAMES}),
    "ltx": ("Lightricks/LTX-Video", {"data": {"frames": 9}, **FRAMES}),
    "glm_image": ("zai-org/GLM-Image", {}),
    "qwen2_5_vl": ("Qwen/Qwen2.5-VL-7B-Instruct", MASKS),
}
"""Environment -> its model, and what it is given beside `FEW`."""


def edits(folder: Path) -> None:
    for number in range(12):
        photo(folder / f"{number}.png", number)
    rows = [{"prompt": f"make it {number}", "source_image": f"{number}.png"} for number in range(12)]
    (folder / "records.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def queries(folder: Path) -> None:
    for number in range(12):
        photo(folder / f"images/{number}.png", number)
        mask = Image.new("L", (200, 160))
        mask.paste(255, (20, 20, 60 + number, 90))
        (folder / "masks/thing").mkdir(parents=True, exist_ok=True)
        mask.save(folder / f"masks/thing/{number}.png")


DATA: Mapping[str, Callable[[Path], None]] = {"prompts": prompts_only, "edits": edits, "queries": queries}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released configurations, with little work on the CPU; ``model.path`` is theirs."""
    folder = project_copy(tmp_path_factory.mktemp("hub") / "project")
    for name, (model, given) in ENVIRONMENTS.items():
        file = folder / f"conf/{name}/parameters.yml"
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert tree["model"]["path"] == model
        few = {part: value for part, value in FEW.items() if given.get(part, {}) is not None}
        own = {part: value for part, value in given.items() if value is not None}
        file.write_text(yaml.safe_dump(merged(merged(merged(tree, TINY), few), own)), encoding="utf-8")
    for name, make in DATA.items():
        make(folder / name)
    return folder


def run(env: str, project: Path, output: str, **variables: str) -> str:
    """What a whole run shows."""
    kept = environment(project)
    done = subprocess.run(
        ["kedro", "run", f"--env={env}", f"--params=output={output}"],
        cwd=project,
        env=kept | {"MLFLOW_TRACKING_URI": f"sqlite:///{project / output}.db"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def digests(output: Path) -> dict[str, str]:
    """Of the adapters, and of every sample that was generated."""
    files = [*output.glob("06_models/adapters/**/*.safetensors"), *output.glob("07_model_output/**/*.[pw]*")]
    found = {str(file.relative_to(output)): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}
    assert len(found) > 3
    return found


@pytest.mark.slow
@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_a_released_configuration_runs_from_the_hub_and_again_without_a_network(
    env: str, project: Path, tmp_path: Path
) -> None:
    model = ENVIRONMENTS[env][0]
    beside = {SAM: save_sam2(tmp_path / "sam")} if env == "qwen2_5_vl" else {}
    cache = {"HF_HOME": str(tmp_path / "cache"), "HF_TOKEN": ""}
    with hub(model, released.save(model, tmp_path / "repository"), beside=beside) as asked:
        from huggingface_hub import constants

        shown = run(env, project, f"data/{env}", HF_ENDPOINT=constants.ENDPOINT, **cache)
    assert f"(commit {COMMIT[:12]})" in shown
    assert not {"README.md", *released.RELEASED[model].beside} & set(asked)
    with counted() as requests:
        offline = {"HF_ENDPOINT": constants.ENDPOINT, "HF_HUB_OFFLINE": "1"}
        run(env, project, f"data/{env}-offline", **offline, **cache)
    assert requests == []
    assert digests(project / f"data/{env}") == digests(project / f"data/{env}-offline")
    facts = json.loads((project / f"data/{env}/06_models/adapters/training.json").read_text())
    assert facts["parameters"]["model"]["revision"] == COMMIT
    card = (project / f"data/{env}/06_models/adapters/README.md").read_text()
    assert f"`{model}` at commit `{COMMIT[:12]}`" in card
    assert f"kedro run --env={env} " in card
    assert "None yet" not in card
