"""The units of systemd: what they say, and that a real user manager runs them."""

from __future__ import annotations

import os
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.schedules.standin import PATH, SCHEDULES, StandIn, is_possible, run_apart
from visual_grpo.retraining.job import PATIENCE
from visual_grpo.retraining.outcome import Code

NAME = "visual-grpo-retrain"
MANAGER = Path("/lib/systemd/systemd")


def read(file: Path) -> ConfigParser:
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(file.read_text(encoding="utf-8"))
    return unit


def install(project: StandIn, home: Path) -> Path:
    """The folder of the units, as `make schedule-systemd` writes them."""
    units = home / ".config/systemd/user"
    units.mkdir(parents=True)
    for file in (SCHEDULES / "systemd").iterdir():
        (units / file.name).write_text(file.read_text(encoding="utf-8").replace(PATH, str(project.folder)))
    return units


def test_the_service_knows_the_commands_exit_codes_and_patience() -> None:
    service = read(SCHEDULES / f"systemd/{NAME}.service")["Service"]
    assert [int(code) for code in service["SuccessExitStatus"].split()] == [Code.NOT_PROMOTED, 128 + 15]
    assert float(service["TimeoutStopSec"]) > PATIENCE
    assert (service["Type"], service["KillMode"]) == ("oneshot", "mixed")
    assert service["TimeoutStartSec"] == "infinity", "a training takes longer than systemd waits for other services"
    assert service["WorkingDirectory"] == PATH


@pytest.mark.skipif(not is_possible("systemd-analyze"), reason="needs systemd")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    units = install(StandIn.make(tmp_path / "a project"), tmp_path / "home")
    env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path / "home")}
    files = sorted(str(file) for file in units.iterdir())
    words = ["systemd-analyze", "verify", "--user", "--man=no", *files]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(not is_possible("systemctl") or not MANAGER.exists(), reason="needs root and systemd")
def test_the_timer_fires_in_a_real_systemd(tmp_path: Path) -> None:
    project, home = StandIn.make(tmp_path / "a project"), tmp_path / "home"
    project.ends_with(Code.NOT_PROMOTED)
    units = install(project, home)
    often = "[Timer]\nOnCalendar=\nOnCalendar=*:*:0/5\nRandomizedDelaySec=0\nAccuracySec=1s\n"
    (units / f"{NAME}.timer.d").mkdir()
    (units / f"{NAME}.timer.d/often.conf").write_text(often)
    (home / ".config/visual-grpo").mkdir()
    (home / ".config/visual-grpo/retrain.env").write_text("MLFLOW_TRACKING_URI=sqlite:///mine.db\n")
    result = f"systemctl --user show {NAME}.service -p Result -p ExecMainStatus --value\n"
    done = run_apart(
        f"{_manager(tmp_path, home)}\n"
        f"systemctl --user enable --now --quiet {NAME}.timer; sleep 13; systemctl --user stop {NAME}.timer\n{result}"
        # Stopped in the middle.
        f"echo 60 > '{project.folder}/seconds'; systemctl --user start --no-block {NAME}.service; sleep 3\n"
        f"systemctl --user stop {NAME}.service\n{result}"
        f"echo 0 > '{project.folder}/seconds'; echo 1 > '{project.folder}/code'\n"
        f"systemctl --user start {NAME}.service || true\n{result}",
        cgroup=f"visual-grpo-test-{os.getpid()}",
    )
    assert done.stdout.split() == ["success", "3", "success", "143", "exit-code", "1"], done
    calls = project.calls()
    assert calls.count("stopped") == 1
    assert calls.count(f"-m visual_grpo.retraining in {project.folder} with sqlite:///mine.db") >= 4


def _manager(tmp_path: Path, home: Path) -> str:
    """Bash lines that start a user manager, which believes that systemd booted the machine."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    return (
        "mount -t tmpfs tmpfs /run; mkdir -p /run/systemd/system\n"
        f"export HOME='{home}' XDG_RUNTIME_DIR='{runtime}'; unset XDG_CONFIG_HOME DBUS_SESSION_BUS_ADDRESS\n"
        "unset MLFLOW_TRACKING_URI\n"
        f"{MANAGER} --user --unit=basic.target > '{tmp_path}/manager.log' 2>&1 &\n"
        "for try in {1..50}; do systemctl --user is-active --quiet basic.target && break; sleep 0.2; done"
    )
