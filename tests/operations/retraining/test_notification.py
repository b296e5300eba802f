"""The summary of a retraining, who is told, and the score that somebody else measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from visual_grpo.common.errors import UserError
from visual_grpo.config import MonitorConfig, RetrainConfig
from visual_grpo.operations.retraining.job import is_due, monitored, notify

SUMMARY = {"code": 0, "sentence": "promoted", "reason": "data changed"}


def test_a_command_gets_the_summary_as_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    notify(RetrainConfig(notify="cat > told.json"), SUMMARY)
    assert json.loads((tmp_path / "told.json").read_text()) == SUMMARY
    notify(RetrainConfig(notify="echo no mail >&2; exit 7"), SUMMARY)
    assert capsys.readouterr().out == "Warning: the command of retrain.notify failed: no mail\n"


@pytest.mark.parametrize(
    ("when", "code", "reason", "due"),
    [
        ("work", 0, None, False),
        ("work", 0, "data", True),
        ("work", 3, "data", True),
        ("work", 1, None, True),
        ("always", 0, None, True),
        ("failure", 0, "data", False),
        ("failure", 3, "data", False),
        ("failure", 6, "data", True),
    ],
)
def test_when_somebody_is_told(when: Any, code: int, reason: str | None, due: bool) -> None:
    assert is_due(RetrainConfig(notify_when=when), {"code": code, "reason": reason}) is due


def test_a_score_is_the_last_line_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert monitored(MonitorConfig()) is None
    assert monitored(MonitorConfig(command="printf '\\377\\n0.5\\n'")) == 0.5
    for command, said in {
        "echo broken >&2; exit 3": "must print a number last: echo broken >&2; exit 3\nbroken",
        "echo nan": "printed nan, which is not a number: echo nan",
        "true": "must print a number last: true\n",
    }.items():
        with pytest.raises(UserError) as told:
            monitored(MonitorConfig(command=command))
        assert said in str(told.value)
