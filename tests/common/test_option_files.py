"""What the options of a reward name on disk counts by its content."""

from __future__ import annotations

from pathlib import Path

import pytest

from visual_grpo.common.digests import option_files

OUTPUT = "data"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_have_digests_of_their_content_wherever_the_option_is(project: Path) -> None:
    (project / "words.txt").write_text("a")
    options = {"words": "words.txt", "judge": {"rubrics": ["words.txt", "?"]}, "mode": "cosine", "count": 3}
    before = option_files(options, OUTPUT)
    assert before == {"words": "ca978112ca1b", "judge.rubrics.0": "ca978112ca1b"}, "12 digits of the sha256 of a"
    (project / "words.txt").write_text("bb")
    after = option_files(options, OUTPUT)
    assert {name for name in before if before[name] != after[name]} == set(before)


def test_texts_that_are_no_paths_have_none() -> None:
    assert option_files({"long": "x" * 10_000, "zero": "a\0b", "none": "", "nobody": "~nobody/x"}, OUTPUT) == {}


@pytest.mark.parametrize("how", ["changed", "added", "renamed"])
def test_a_folder_is_another_if_anything_in_it_is(project: Path, how: str) -> None:
    file = project / "rubrics/deep/one.txt"
    file.parent.mkdir(parents=True)
    file.write_text("a")
    before = option_files({"folder": "rubrics"}, OUTPUT)
    assert option_files({"folder": "rubrics"}, OUTPUT) == before
    if how == "changed":
        file.write_text("bb")
    elif how == "added":
        file.with_name("two.txt").write_text("")
    else:
        file.rename(file.with_name("other.txt"))
    assert option_files({"folder": "rubrics"}, OUTPUT) != before


def test_what_a_run_itself_writes_does_not_count(project: Path) -> None:
    (project / "data/mine").mkdir(parents=True)
    (project / "answers").mkdir()
    options = {"cache": "answers", "parts": [{"cache": "answers"}], "here": ".", "above": "..", "kind": "data"}
    assert option_files(options, OUTPUT) == {}
    assert option_files(options, "data/mine") == {}
    assert list(option_files(options, "elsewhere")) == ["kind"]
