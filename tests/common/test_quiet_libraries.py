from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from visual_grpo.common.quiet_libraries import silence_libraries
silence_libraries()
print("torch" in sys.modules, os.environ.get("GOMP_SPINCOUNT"))
"""
NO_HOME = """
import os, pathlib
from visual_grpo.common.quiet_libraries import silence_libraries
os.environ.pop("HOME", None)
os.setuid(54321)
silence_libraries()
print(pathlib.Path.home())
"""


@pytest.mark.parametrize(
    ("given", "count"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")]
)
def test_torch_will_spin_for_a_short_time_unless_the_user_says_otherwise(given: dict[str, str], count: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=clean | given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", count]


@pytest.mark.skipif(os.getuid() != 0, reason="Only root may become another user.")
def test_a_user_without_a_name_has_a_home() -> None:
    """A container may run as any number; MLflow cannot be imported without a home."""
    done = subprocess.run(
        [sys.executable, "-c", NO_HOME],
        env=os.environ | {"TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "/tmp"
