"""Each notebook runs from top to bottom on a finished project, and is stored without outputs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from tests.pipelines.painted import Project
from tests.toys import CountingScorer, ToyTokenPolicy, records
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.grpo.two_stage import AlternatingTrainer
from visual_grpo.pipeline_registry import register_pipelines

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
CLIPPED = "dit/clip_fraction"


def history() -> pd.DataFrame:
    """As training.csv has it, of real trainers on toy policies."""
    batch: dict[str, Any] = {"prompts_per_step": 3, "group_size": 6, "updates_per_rollout": 2}
    config = GRPOConfig(steps=8, learning_rate=0.05, kl_weight=0.01, **batch)
    policies = {name: ToyTokenPolicy() for name in ("ar", "dit")}
    trainers = {name: GRPOTrainer(policy, CountingScorer(), config, module=name) for name, policy in policies.items()}
    steps = AlternatingTrainer(trainers, 8, 0).fit(records(6))
    table = pd.DataFrame([{"step": float(step.step), **step.values} for step in steps])
    return table.assign(**{"eval/total": table["step"].map({4: 0.5, 8: 0.5})})


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a project whose pipelines have run, where conf/base/catalog.yml has them.

    One trained sample could not be scored, and much was clipped.
    """
    project = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        painted = Project(project, patch)
        painted.run(register_pipelines()["baseline"])
        painted.train()
        painted.run(register_pipelines()["evaluate"])
    places = dict.fromkeys(("baseline", "trained"), "07_model_output")
    places |= {"records.parquet": "05_model_input", "evaluation_report": "08_reporting"}
    for name, folder in places.items():
        (project / "data" / folder).mkdir(parents=True, exist_ok=True)
        (project / name).rename(project / "data" / folder / name)
    history().assign(**{CLIPPED: 0.5}).to_csv(project / "data/08_reporting/training.csv", index=False)
    scores = project / "data/07_model_output/trained/scores.parquet"
    table = pd.read_parquet(scores)
    lost = table.index[(table["sampler"] == "eval") & (table["split"] == "held_out")][0]
    table.loc[lost, ["total", "reward/brightness"]] = float("nan")
    table.to_parquet(scores)
    (project / "dvc.yaml").touch()
    (project / "notebooks").mkdir()
    return project


@pytest.fixture(scope="module")
def shown(project: Path) -> dict[str, str]:
    """Everything that each notebook printed and showed as text.

    One kernel runs all, without what an earlier one has defined: it imports libraries for seconds.
    """
    import nbformat
    from nbclient import NotebookClient  # Seconds, in each of xdist's processes.

    notebooks: dict[str, Any] = {name: nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4) for name in NAMES}
    together = nbformat.v4.new_notebook()
    for name, notebook in notebooks.items():
        folder = project / "notebooks" if name == "explore" else project
        together.cells += [nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {folder}"), *notebook.cells]
    with pytest.MonkeyPatch.context() as patch:
        # The kernel imports the code that is tested, and draws without a display.
        source = str(NOTEBOOKS.parent / "src")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])))
        patch.delenv("MPLBACKEND", raising=False)
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        NotebookClient(together, timeout=120, resources={"metadata": {"path": str(project)}}).execute()
    return {name: _text(notebook) for name, notebook in notebooks.items()}


def _text(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    return "\n".join([*texts, f"{pictures} pictures"])


def test_write_a_reward(project: Path, shown: dict[str, str]) -> None:
    baseline_folder = project / "data/07_model_output/baseline"
    table = pd.read_parquet(baseline_folder / "scores.parquet").query("sampler == 'eval'")
    pixels = [np.asarray(Image.open(baseline_folder / file)).astype(float) / 255 for file in table["file"]]
    redness = pd.Series([p[..., 0].mean() - p[..., 1:].mean() for p in pixels], index=table.index)
    printed = shown["write_a_reward"]
    assert "10 images of 5 prompts, 0 unscored" in printed
    spread = redness.groupby(table["id"]).std().mean()
    assert f"standard deviation inside a prompt: {spread:.3f} on average" in printed
    assert "prompts whose samples all score the same: 0%" in printed
    [agreement] = [line for line in printed.splitlines() if line.startswith("reward/brightness")]
    assert float(agreement.split()[-1]) == pytest.approx(redness.corr(table["reward/brightness"], "spearman"), abs=0.01)
    assert "3 pictures" in printed


def test_explore(shown: dict[str, str]) -> None:
    printed = shown["explore"]
    assert "held_out prompt 0" in printed
    assert "1 of 6 pairs" in printed
    [total] = [line for line in printed.splitlines() if line.startswith("total")]
    assert [float(number) for number in total.split()[3:]] == [0.2, 1, 1], "difference, wins, unscored"
    assert "no losses" in printed
    assert "3 pictures" in printed


def test_inspect_training(shown: dict[str, str]) -> None:
    printed = shown["inspect_training"]
    assert "8 steps" in printed
    [finding] = [line for line in printed.splitlines() if "much is clipped" in line]
    assert CLIPPED in finding
    assert "eval/total" not in printed, "it did not fall"
    assert "reward/count" in printed
    assert "1 pictures" in printed


@pytest.mark.parametrize("name", NAMES)
def test_no_outputs_are_stored(name: str) -> None:
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
