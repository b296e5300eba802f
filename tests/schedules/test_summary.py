"""The summary of a retraining in Markdown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.schedules.standin import SCHEDULES
from visual_grpo.retraining.outcome import Code, Outcome

PROMOTED = Outcome(
    code=Code.DONE,
    sentence="Better than the base model | by 0.05.",
    reason="train: conf/local modified",
    model="visual_grpo",
    version=3,
    run_id="0123abcd",
    seconds={"train": 61.26, "gate": 4.0},
)


def summary(folder: Path, outcome: Outcome | None, code: int) -> str:
    file = folder / "retraining.json"
    if outcome is not None:
        file.write_text(json.dumps(outcome.as_json()))
    words = [sys.executable, str(SCHEDULES / "summary.py"), str(file), str(code)]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def test_all_that_is_known_is_in_the_table(tmp_path: Path) -> None:
    assert summary(tmp_path, PROMOTED, Code.DONE) == (
        "## Promoted, or nothing to do\n\nBetter than the base model | by 0.05.\n\n| | |\n|---|---|\n"
        "| reason | train: conf/local modified |\n| model | visual_grpo |\n| promoted version | 3 |\n"
        "| MLflow run | 0123abcd |\n| train (s) | 61.3 |\n| gate (s) | 4.0 |\n"
    )


@pytest.mark.parametrize("code", [*Code, 143])
def test_every_exit_code_has_a_heading(tmp_path: Path, code: int) -> None:
    outcome = Outcome(code=code, sentence="It ended.", model="visual_grpo")
    heading, _, sentence = summary(tmp_path, outcome, code).splitlines()[:3]
    assert sentence == "It ended."
    assert heading.startswith("## ")
    assert (heading == "## Failed") == (code in (Code.FAILED, 143))


def test_a_retraining_without_a_summary_gets_none_of_an_earlier_one(tmp_path: Path) -> None:
    said = "## Another retraining is running\n\nExit code 4; the log says why.\n"
    assert summary(tmp_path, None, Code.BUSY) == said
    assert summary(tmp_path, PROMOTED, Code.BUSY) == said
