"""Which folder a run writes to, and that no two datasets share one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from visual_grpo.config.defaults import with_output_folders


def folders(tree: dict[str, Any], environment: str | None = None) -> tuple[str, str, str, str, str]:
    """Of the outputs, the records, the drawn dataset, the pretrained model, the checkpoints."""
    filled = with_output_folders(tree, environment)
    starter = filled["starter"]
    return (
        filled["output"],
        filled["data"]["path"],
        starter["dataset"],
        starter["model"],
        filled["tracking"]["checkpoints"],
    )


DEFAULT = ("data", "data/01_raw/shapes", "data/01_raw/shapes", "data/06_models/base", "data/06_models/checkpoints")


@pytest.mark.parametrize("environment", [None, "base", "local"])
def test_the_default_writes_into_data(environment: str | None) -> None:
    assert folders({}, environment) == DEFAULT
    assert folders({"output": None, "data": {"path": None, "task": "t2i"}}, environment) == DEFAULT


def test_an_environment_and_another_task_have_folders() -> None:
    words = {"starter": {"world": "words"}}
    assert folders(words, "text")[:3] == ("data/text", "data/text/01_raw/words", "data/text/01_raw/words")
    assert folders({"data": {"task": "i2i"}})[:2] == ("data/i2i", "data/i2i/01_raw/shapes")
    scenes = {"starter": {"world": "scenes"}, "data": {"task": "segmentation"}}
    assert folders(scenes, "negative_points")[3] == "data/negative_points/06_models/base"


def test_own_data_has_a_folder_and_shares_the_pretrained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output, path, dataset, model, checkpoints = folders({"data": {"path": "a/my photos"}})
    assert output.startswith("data/my_photos-")
    assert checkpoints == f"{output}/06_models/checkpoints"
    assert (path, dataset, model) == ("a/my photos", *DEFAULT[2:4])


def test_spellings_of_one_folder_are_one_and_folders_of_one_name_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spellings = ["a/photos", "./a/photos/", "a/../a/photos", str(tmp_path / "a/photos")]
    assert len({folders({"data": {"path": path}})[0] for path in spellings}) == 1
    assert len({folders({"data": {"path": path}})[0] for path in ["a/photos", "b/photos"]}) == 2
    models = [None, "models/a", "./models/a", "models/b", "someone/model"]
    assert len({folders({"data": {"path": "a/photos"}, "model": {"path": model}})[0] for model in models}) == 4


def test_a_folder_that_is_given_stays() -> None:
    assert folders({"output": "data/try"}, "text")[0] == "data/try"
    given = {"output": "data/try", "tracking": {"checkpoints": "elsewhere"}, "starter": {"model": "m", "dataset": "d"}}
    assert folders(given) == ("data/try", "d", "d", "m", "elsewhere")


def test_a_section_that_is_none_is_left_to_the_validation() -> None:
    assert with_output_folders({"data": 3}, None) == {"data": 3}
