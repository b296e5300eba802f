"""Workflows of GitHub Actions, and their steps' scripts run as a runner would."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.small_project import ROOT

RETRAIN = ROOT / "schedules/github-actions.yml"
UPGRADE = ROOT / ".github/workflows/upgrade.yml"


def read(file: Path) -> dict[str, Any]:
    """YAML 1.1 takes the key ``on`` for true."""
    tree: dict[Any, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {"on" if key is True else key: value for key, value in tree.items()}


def steps(file: Path) -> list[dict[str, Any]]:
    [job] = read(file)["jobs"].values()
    found: list[dict[str, Any]] = job["steps"]
    return found


def script(file: Path, name: str) -> str:
    """Of the step with this name."""
    [found] = [step["run"] for step in steps(file) if step.get("name") == name]
    return str(found)


def run(text: str, folder: Path, variables: Mapping[str, str], **values: str) -> subprocess.CompletedProcess[str]:
    """Runs a step's script in ``folder``, with ``shell: bash``.

    Args:
        values: of expressions ``${{ steps.retrain.outputs.NAME }}``.
    """
    filled = re.sub(r"\$\{\{ steps\.retrain\.outputs\.(\w+) \}\}", lambda match: values[match[1]], text)
    assert "${{" not in filled
    words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", filled]
    return subprocess.run(
        words, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
