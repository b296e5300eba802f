"""The command that compares a family with its pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.families.flux import tiny
from tests.operations.plan.configurations import parameters_of
from visual_grpo.common.errors import UserError
from visual_grpo.models.run_spec import resolve
from visual_grpo.pipelines.check_model import check, require_equal


def asked(folder: Path | str, environment: str = "flux", **model: Any) -> Any:
    return parameters_of(environment, {"model": {"path": str(folder), "device": "cpu", "dtype": "float32", **model}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    tiny.pipeline().save_pretrained(folder)
    return folder


def test_a_model_is_checked_at_a_size_that_is_not_square(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = asked(folder, options={"max_sequence_length": 32})
    data = config.data.model_copy(update={"height": 96, "width": 128})
    found = check(resolve(config.model_copy(update={"data": data})))
    require_equal(found)
    assert (found["family"], found["size"]) == ("flux", (96, 64))
    assert [row["passed"] for row in found["checks"]] == [True] * 7
    shown = capsys.readouterr().out
    assert shown.count("equal") == 7
    assert "Comparing with the pipeline 8/8" in shown
    assert "The family flux generates, replays and saves what its pipeline does." in shown


@pytest.mark.parametrize(
    ("environment", "side", "size"),
    [("flux2_klein", 64, (96, 64)), ("flux2_klein", 96, (96, 64)), ("flux", 32, (64, 32))],
)
def test_a_small_size_is_not_square_and_one_that_a_source_may_have(
    environment: str, side: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("visual_grpo.pipelines.check_model.check_family", lambda *_: [])
    config = asked("unused", environment, family=environment)
    data = config.data.model_copy(update={"height": side, "width": side})
    assert check(resolve(config.model_copy(update={"data": data})))["size"] == size


def test_a_difference_ends_the_command_with_where_to_look() -> None:
    row = {"name": "pixels", "difference": None, "limit": 0, "hint": "pixels: their scale", "passed": False}
    with pytest.raises(
        UserError, match=r"The family mine does not generate what its pipeline generates.*\n  pixels: their scale"
    ):
        require_equal({"family": "mine", "model": "m", "size": (64, 32), "checks": [row, {**row, "passed": True}]})


def test_another_kind_of_model_is_refused(pipeline_folder: Path) -> None:
    with pytest.raises(UserError, match=r"compares a flow model of one module.*; glm_image has the modules"):
        check(resolve(asked(pipeline_folder, "glm_image")))
