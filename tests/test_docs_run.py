"""Every block of commands of README and docs is run as it stands, each in a small project in which `make demo` has run.

The project is a copy of this one whose configurations ask for little work. Those of the released models name small
models of the same classes, on the CPU. So the commands themselves need not be changed.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from examples.scenes.small_qwen2_5_vl import build_model, build_processor
from tests.markdown import Block, blocks, files_before
from tests.models.families.sd3 import tiny
from tests.rewards.segmentation.small_sam2 import save_sam2
from tests.small_project import kept, paste, restored, small_project
from visual_grpo.operations.retraining.job import Code

NOT_RUN = {
    "make": "its targets' commands are checked, and `make setup` would change the environment",
    ".venv/bin/kedro run --pipeline=reproduce": "needs a git repository; test_reproduce.py runs it",
    ".venv/bin/kedro run --pipeline=rollback": "needs two promotions; test_promote.py runs it",
    ".venv/bin/kedro run --pipeline=vote": "waits for somebody; tests/pipelines/test_vote.py chooses",
    ".venv/bin/kedro run --pipeline=plan --env=qwen_image": "of full size; test_released.py plans it",
    ".venv/bin/kedro run --env=qwen2_5_vl --params=data.path=FOLDER,model.base_weights": "needs bitsandbytes;"
    " tests/quantised trains every family so",
    ".venv/bin/kedro run --pipelines=baseline,train,evaluate --params=reward=null,rewards.votes": "needs somebody's"
    " choices; tests/pipelines/test_vote.py trains on some",
    ".venv/bin/torchrun --nnodes=2": "needs two hosts; tests/grpo/distributed/test_hosts.py starts two on this machine",
    ".venv/bin/python -m visual_grpo.operations.retraining": "needs DVC; run in tests/operations/retraining",
    ".venv/bin/dvc": "needs a git repository; run in test_dvc_repro.py",
    ".venv/bin/python benchmarks/": "hours; its arguments are checked in test_docs.py",
    ".venv/bin/pytest": "these tests",
    ".venv/bin/pre-commit": "changes the repository",
}
OF_THE_HUB = {"own_model.md"}
"""Its Python names a model of the hub; test_add_a_flow_model.py runs it on a small one."""


def is_run(line: str) -> bool:
    return not line.startswith(tuple(NOT_RUN))


RUN = [block for block in blocks("console") if any(is_run(" ".join(words)) for words in block.commands)]
PYTHON = [b for b in blocks("python") if b.file is None and b.page.name not in OF_THE_HUB]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small project after its first whole run."""
    project = small_project(tmp_path_factory.mktemp("finished") / "project")
    save_small_models(project)
    shell(".venv/bin/kedro run", project)
    return kept(project)


@pytest.fixture
def project(finished: Path) -> Path:
    return restored(finished)


@pytest.mark.slow
@pytest.mark.parametrize("block", RUN, ids=[block.where for block in RUN])
def test_a_block_of_commands_runs_alone(block: Block, project: Path) -> None:
    for name, text in files_before(block).items():
        (project / name).write_text(text, encoding="utf-8")
    for line in block.text.splitlines():
        command = line.removeprefix("$ ")
        if not line.startswith("$ ") or not is_run(command):
            continue
        if "FOLDER" in command:
            source = "control" if "columns.source=control" in command else "source_image"
            write_records(project, source if "task=i2i" in command else None, queries="env=qwen2_5_vl" in command)
        before = time.time()
        shown = shell(command, project)
        for result in results_of(command):
            if result == "scores.parquet" and "Kept the baseline" in shown:
                continue
            newest = max((file.stat().st_mtime for file in project.glob(f"data/**/{result}")), default=0)
            assert newest > before - 1, f"{command} left no {result}"


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON, ids=[block.where for block in PYTHON])
def test_a_block_of_python_runs_alone(block: Block, project: Path) -> None:
    (project / "block.py").write_text(block.text, encoding="utf-8")
    shell(".venv/bin/python block.py", project)


def results_of(command: str) -> list[str]:
    """Files that the command must have written."""
    results = {
        "data_preparation": "records.parquet",
        "baseline": "scores.parquet",
        "train": "training.csv",
        "evaluate": "evaluation.html",
    }
    whole = "kedro run" in command and "--pipeline" not in command
    return [file for name, file in results.items() if whole or f"kedro run --pipeline={name}" in command]


def shell(command: str, project: Path) -> str:
    """What a command shows."""
    done = paste(command, project)
    ends = {0, Code.NOT_PROMOTED} if "--pipeline=promote" in command else {0}
    assert done.returncode in ends, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout


def write_records(project: Path, source: str | None, *, queries: bool) -> None:
    """FOLDER: drawn shapes that every reward can judge, with a target and quoted text; for edits, in the column
    ``source``, a picture to edit; for ``queries`` the shapes are the masks."""
    drawn = project / "data/01_raw/shapes"
    rows = [json.loads(line) for line in (drawn / "records.jsonl").read_text(encoding="utf-8").splitlines()]
    folder = project / "FOLDER"
    shutil.copytree(drawn / "target_images", folder / "target_images", dirs_exist_ok=True)
    chosen = [row | {"prompt": f'{row["prompt"]}, with the word "cat"'} for row in rows[::4]]
    if source:
        chosen = [row | {source: row["target_image"]} for row in chosen]
    if queries:
        chosen = [query_of(row, folder) for row in chosen]
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")


def query_of(row: dict[str, Any], folder: Path) -> dict[str, str]:
    """About the drawn picture of a row, whose mask is written beside it."""
    image = row["target_image"]
    mask = f"{image}.mask.png"
    with Image.open(folder / image) as picture:
        picture.convert("L").point(lambda grey: 255 * (grey > 40)).save(folder / mask)
    return {"image": image, "query": row["prompt"], "mask": mask}


def save_small_models(project: Path) -> None:
    """Those that the small configurations of the released models name."""
    tiny.pipeline().save_pretrained(project / "small_sd3")
    processor = build_processor(64, 64)
    build_model(processor, seed=1).save_pretrained(project / "small_qwen2_5_vl")
    processor.save_pretrained(project / "small_qwen2_5_vl")
    save_sam2(project / "small_sam2")


def test_what_is_not_run_is_little_and_said() -> None:
    lines = [" ".join(words) for block in blocks("console") for words in block.commands]
    assert all(any(line.startswith(prefix) for line in lines) for prefix in NOT_RUN), "all reasons are in use"
    assert len([line for line in lines if "kedro run" in line]) >= 20
    left_out = ["--pipeline=reproduce", "--pipeline=rollback", "--pipeline=vote", "rewards.votes.options.head="]
    left_out += ["--pipeline=plan --env=qwen_image", "model.base_weights=4bit", "torchrun"]
    assert all(is_run(line) or any(name in line for name in left_out) for line in lines if "kedro run" in line)
