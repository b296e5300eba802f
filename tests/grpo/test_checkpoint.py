from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from visual_grpo.errors import UserError
from visual_grpo.grpo import checkpoint

WRITER = """
import sys, torch
from pathlib import Path
from visual_grpo.grpo.checkpoint import save_checkpoint
for step in range(1, 100000):
    tensors = {f"t{i}": torch.full((20000,), float(step)) for i in range(8)}
    save_checkpoint(Path(sys.argv[1]), step, tensors, {"step": step})
"""


def test_a_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.get_rng_state(), "c": torch.randn(2).bfloat16()}
    checkpoint.save_checkpoint(tmp_path, 7, tensors, {"history": [{"x": 0.1 + 0.2}], "public": {"mlflow_run_id": "r"}})
    latest = checkpoint.latest_checkpoint(tmp_path)
    assert latest is not None
    loaded, facts = checkpoint.load_checkpoint(latest)
    assert all(torch.equal(loaded[k], v) for k, v in tensors.items())
    assert loaded.keys() == tensors.keys()
    assert facts["history"] == [{"x": 0.1 + 0.2}]
    assert json.loads((tmp_path / "latest.json").read_text())["mlflow_run_id"] == "r"


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 5, 12, 100):
        checkpoint.save_checkpoint(tmp_path, step, {"a": torch.zeros(1)}, {}, keep=2)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000012", "step-000100"]


def test_a_process_killed_while_writing_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "latest.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2 + random.random() / 5)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    latest = checkpoint.latest_checkpoint(tmp_path)
    assert latest is not None
    tensors, facts = checkpoint.load_checkpoint(latest)
    assert len(tensors) == 8
    assert all((value == facts["step"]).all() for value in tensors.values())


def test_a_pointer_to_nothing_is_explained(tmp_path: Path) -> None:
    (tmp_path / "latest.json").write_text('{"checkpoint": "step-000003"}')
    with pytest.raises(UserError, match="step-000003, which is not there"):
        checkpoint.latest_checkpoint(tmp_path)


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.latest_checkpoint(tmp_path / "nothing") is None


def test_every_generator_goes_on_where_it_was() -> None:
    tensors, facts = checkpoint.random_states()
    facts = json.loads(json.dumps(facts))
    want = random.random(), np.random.rand(), torch.rand(1).item()
    for _ in range(3):
        random.random(), np.random.rand(), torch.rand(1)
    checkpoint.restore_random_states(tensors, facts)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == want
