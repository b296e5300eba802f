"""What a pipeline has loaded is gone before the next one loads its own, as on a GPU it must be."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.small_project import paste, small_project

LIVE = '''

import gc

import torch
from kedro.framework.hooks import hook_impl


class LiveTensors:
    """Notes the bytes of all tensors before each node and after each pipeline, as they are: it frees nothing."""

    def note(self, when):
        storages = [found.untyped_storage() for found in gc.get_objects() if type(found) in KINDS]
        live = {storage.data_ptr(): storage.nbytes() for storage in storages}
        with open("live.txt", "a") as file:
            file.write(f"{when} {sum(live.values())}\\n")

    @hook_impl(trylast=True)
    def before_node_run(self, node):
        gc.disable()
        self.note(node.name)

    @hook_impl(tryfirst=True)
    def after_pipeline_run(self):
        self.note("end")


KINDS = (torch.Tensor, torch.nn.Parameter)
HOOKS += (LiveTensors(),)
'''


@pytest.mark.slow
def test_after_each_pipeline_no_more_tensors_live_than_before(tmp_path: Path) -> None:
    project = small_project(tmp_path / "project")
    (project / "conf/local/parameters.yml").write_text(yaml.safe_dump({"policy": {"train": "all"}}))
    with (project / "src/visual_grpo/settings.py").open("a") as file:
        file.write(LIVE)
    done = paste(".venv/bin/kedro run", project)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.rsplit(maxsplit=1) for line in (project / "live.txt").read_text().splitlines()]
    named = {"baseline.generate_baseline", "train.train", "evaluate.generate_trained", "end"}
    assert named <= {name for name, _ in lines}
    assert {name: int(size) for name, size in lines if int(size) > 1000} == {}
