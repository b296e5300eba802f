"""`model.offload`: networks that take turns on a pretend GPU train as those that are all there do, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.pretend.accelerator import Accelerator
from tests.pretend.test_policies import CASES
from tests.pretend.trained import assert_equal, config_of, records_of, train
from visual_grpo.hardware import turns
from visual_grpo.plan.replaced import replaced

FAST = ["sd3", "qwen_image"]
SLOW = ["ar", "dit", "alternating", "joint", "checkpointed"]


def offloaded(folder: Path, changes: Any) -> Any:
    return config_of(folder, "cuda:0", **{**changes, "model": {"offload": "phases"}})


@contextmanager
def watched() -> Iterator[list[int]]:
    """How many networks were on the device whenever one had come."""
    together: list[int] = []

    def counting(real: Callable[..., None]) -> Callable[..., None]:
        def come(self: Any) -> None:
            real(self)
            together.append(len(self._turns.there))

        return come

    with replaced(turns._Turn, "come", counting):
        yield together


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_networks_that_take_turns_are_trained_as_if_all_were_there(
    request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    fixture, changes = CASES[name]
    folder, records = request.getfixturevalue(fixture), records_of()
    expected = train(config_of(tmp_path, "cpu", **changes), folder, records)
    with Accelerator() as gpu, watched() as together:
        found = train(offloaded(tmp_path, changes), folder, records)
    assert_equal(expected, found)
    assert max(together) == 1
    assert gpu.pinned > 0


@pytest.mark.slow
def test_edits_are_drawn_as_if_all_were_there(pipeline_folder: Path, tmp_path: Path, source_images: list[Path]) -> None:
    changes = {**CASES["joint"][1], "data": {"task": "i2i"}}
    records = records_of(source_images)
    expected = train(config_of(tmp_path, "cpu", **changes), pipeline_folder, records)
    with Accelerator(), watched() as together:
        found = train(offloaded(tmp_path, changes), pipeline_folder, records)
    assert_equal(expected, found)
    assert max(together) == 2, "the tokens of the first stage are drawn after a source is encoded by the VAE"
