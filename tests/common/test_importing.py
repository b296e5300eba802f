"""The digest of a user's own function: what counts as its code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from visual_grpo.common.importing import code_digest, option_code

FILES = {
    "digested_judge.py": "import json, torch\nfrom digested_helper import score\n\n"
    "def judge(p, i):\n    from digested_parts import late\n    return score(i)\n",
    "digested_helper.py": "import digested_constants as c\n\ndef score(i):\n    return [c.HIGH]\n",
    "digested_constants.py": "import digested_judge\nHIGH = 1.0\n",  # A circle.
    "digested_parts/__init__.py": "",
    "digested_parts/late.py": "from . import deeper\n",
    "digested_parts/deeper.py": "X = 1\n",
    "digested_other.py": "Y = 1\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "digested_parts", raising=False)  # Of another test's folder.
    return tmp_path


@pytest.mark.parametrize("name", [name for name in FILES if name != "digested_other.py"])
def test_an_edit_of_what_the_function_imports_is_an_edit_of_it(folder: Path, name: str) -> None:
    before = code_digest("digested_judge:judge")
    (folder / name).write_text(FILES[name] + "# edited\n")
    assert code_digest("digested_judge:judge") != before


def test_other_files_packages_and_this_package_are_not_its_code(folder: Path) -> None:
    before = code_digest("digested_judge:judge")
    (folder / "digested_other.py").write_text("Y = 2\n")
    (folder / "visual_grpo_notes.txt").write_text("x")
    assert code_digest("digested_judge:judge") == before
    judge = folder / "digested_other.py"
    alone = code_digest("digested_other:judge")
    judge.write_text("Y = 2\n# \n")
    assert code_digest("digested_other:judge") != alone
    assert len(before) == 12


def test_a_module_without_a_file_has_no_digest_and_one_that_does_not_parse_has(folder: Path) -> None:
    assert code_digest("no_such_module_at_all:judge") == "unknown"
    assert code_digest("no_such_module_at_all:judge") == "unknown"
    (folder / "digested_judge.py").write_text("def judge(:\n")
    assert len(code_digest("digested_judge:judge")) == 12


def test_functions_that_options_name_have_digests_and_other_texts_none(folder: Path) -> None:
    options = {
        "detector": "digested_other:judge",
        "segmenter": {"function": "digested_parts.late:Class.method", "cache": "digested_other:cached"},
        "model": "no_such_model:latest",
        "url": "http://127.0.0.1:8765",
        "rubric": "Is it a cat: yes or no?",
        "parts": ["digested_other:", "digested_other", ":judge", "digested_other:7b", "digested_other:a b"],
        "count": 3,
    }
    before = option_code(options)
    assert before == {
        "detector": code_digest("digested_other:judge"),
        "segmenter.function": code_digest("digested_parts.late:Class.method"),
    }
    (folder / "digested_parts/deeper.py").write_text("X = 2\n")
    assert {name for name, digest in option_code(options).items() if digest != before[name]} == {"segmenter.function"}
