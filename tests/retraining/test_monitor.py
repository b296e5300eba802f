"""The score that starts a retraining when it falls."""

from __future__ import annotations

from pathlib import Path

import pytest

from visual_grpo.config import MonitorConfig
from visual_grpo.errors import UserError
from visual_grpo.retraining.monitor import fallen_score


@pytest.mark.parametrize(("floor", "found"), [(0.5, 0.4), (0.4, None), (0.3, None)])
def test_only_a_score_below_the_floor_counts(tmp_path: Path, floor: float, found: float | None) -> None:
    monitor = MonitorConfig(command="echo measured 12 pictures; echo 0.4", floor=floor)
    assert fallen_score(monitor, tmp_path) == found


def test_nothing_is_monitored_without_a_command(tmp_path: Path) -> None:
    assert fallen_score(MonitorConfig(floor=9.0), tmp_path) is None


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo nan", "as its last line, but printed 'nan': echo nan"),
        ("true", "but printed 'nothing': true"),
        ("echo 3; echo done", "but printed 'done'"),
        ("echo broken >&2; exit 2", r"exit code 2: echo broken >&2; exit 2\nbroken"),
    ],
)
def test_what_is_no_score_is_an_error_and_not_a_fall(tmp_path: Path, command: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        fallen_score(MonitorConfig(command=command, floor=1.0), tmp_path)
