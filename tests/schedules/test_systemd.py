"""The units of systemd: what they say, and that systemd accepts them."""

from __future__ import annotations

import os
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.schedules.standin import PATH, SCHEDULES, StandIn
from visual_grpo.retraining.job import PATIENCE
from visual_grpo.retraining.outcome import Code


def test_the_service_knows_the_commands_exit_codes_and_patience() -> None:
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((SCHEDULES / "systemd/visual-grpo-retrain.service").read_text(encoding="utf-8"))
    service = unit["Service"]
    assert [int(code) for code in service["SuccessExitStatus"].split()] == [Code.NOT_PROMOTED, 128 + 15]
    assert float(service["TimeoutStopSec"]) > PATIENCE
    assert (service["Type"], service["KillMode"]) == ("oneshot", "mixed")
    assert service["TimeoutStartSec"] == "infinity", "a training takes longer than systemd waits for other services"
    assert service["WorkingDirectory"] == PATH


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    project, units = StandIn.make(tmp_path / "a project"), tmp_path / "units"
    units.mkdir()
    for file in (SCHEDULES / "systemd").iterdir():  # As `make schedule-systemd` writes them.
        (units / file.name).write_text(file.read_text(encoding="utf-8").replace(PATH, str(project.folder)))
    env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    words = ["systemd-analyze", "verify", "--user", "--man=no", *sorted(map(str, units.iterdir()))]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
