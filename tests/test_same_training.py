"""`resume=same`: on from a checkpoint of the very same training, else from step 1; with a model that takes no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_resuming import damage, finished, stopped
from tests.test_training import parameters
from visual_grpo import resuming
from visual_grpo.config import Parameters
from visual_grpo.grpo.checkpoint import FACTS, SUMS, _line
from visual_grpo.resuming import mark_finished, why_another

COMPUTED: dict[str, str] = {"source.digest": "a", "numerics": "torch 1"}


def note_lineage(folder: Path, **changes: Any) -> None:
    """As the train pipeline has it in its checkpoints."""
    for path in (folder / "checkpoints").glob("step-*"):
        facts = json.loads((path / FACTS).read_text()) | {"lineage": COMPUTED} | changes
        (path / FACTS).write_text(json.dumps(facts))
        (path / SUMS).write_text("".join(_line(path / name) for name in (FACTS, "state.safetensors")))


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """What a training leaves that was stopped after five of six steps."""
    stopped(tmp_path, 5)
    note_lineage(tmp_path)
    return tmp_path


def why(folder: Path, computed: dict[str, str] | None = None, **changes: Any) -> str | None:
    config: Parameters = parameters(folder, **changes)
    return why_another(config, {}, COMPUTED if computed is None else computed)


def test_the_same_training_goes_on_and_changes_nothing(killed: Path) -> None:
    before = sorted(killed.rglob("*"))
    assert why(killed) is None
    assert sorted(killed.rglob("*")) == before
    damage(killed / "checkpoints" / "step-000005")
    assert why(killed) is None, "the one before is intact"
    damage(killed / "checkpoints" / "step-000004")
    assert why(killed) == f"{killed / 'checkpoints'} has no intact checkpoint"
    assert why(killed / "other") == f"{killed / 'other/checkpoints'} has no checkpoint"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 4}, "seed (was 3, is 4)"),
        ({"grpo": {"steps": 7}}, "grpo.steps (was 6, is 7)"),
        ({"evaluation": {"every": 3}}, "evaluation.every (was 2, is 3)"),
        ({"grpo": {"micro_batch_size": 2}}, "grpo.micro_batch_size (was None, is 2)"),
        ({"computed": COMPUTED | {"source.digest": "b"}}, "source files of this project"),
        ({"computed": COMPUTED | {"numerics": "torch 2"}}, "versions of libraries, or kind of processor"),
    ],
)
def test_another_training_is_named_by_what_differs(killed: Path, changes: dict[str, Any], named: str) -> None:
    assert str(why(killed, **changes)).endswith(f"/checkpoints are of a training with another {named}")


@pytest.mark.parametrize(
    "changes",
    [{"tracking": {"images_every": 3}}, {"generate": {"samples": 3}}, {"evaluation": {"bootstrap_samples": 100}}],
)
def test_what_changes_no_result_may_be_another(killed: Path, changes: dict[str, Any]) -> None:
    changes = {"tracking": {}, **changes}
    assert why(killed, **changes) is None


def test_other_data_or_code_in_between_make_another_training(killed: Path) -> None:
    note_lineage(killed, identity={"data": "x", "model_digest": "y"})
    config = parameters(killed)
    assert why_another(config, {"data": "x", "model_digest": "y"}, COMPUTED) is None
    found = why_another(config, {"data": "z", "model_digest": "y"}, COMPUTED)
    assert str(found).endswith("are of a training with another data")
    note_lineage(killed, lineage=COMPUTED | {"resumed.source.digest": "b"}, identity={})
    assert str(why(killed)).endswith("with another source files of this project")


def test_a_finished_training_is_done_again_and_one_whose_adapters_were_not_saved_is_not(tmp_path: Path) -> None:
    finished(tmp_path)
    note_lineage(tmp_path)
    assert why(tmp_path) is None, "killed between its last checkpoint and its adapters"
    mark_finished(tmp_path / "checkpoints")
    assert why(tmp_path) == f"the training of the checkpoints in {tmp_path / 'checkpoints'} is finished"
    (tmp_path / "checkpoints" / resuming.FINISHED).write_text("{")
    assert why(tmp_path) is None, "a damaged note says nothing; the result is the same"
