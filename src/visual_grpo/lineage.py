"""The origin of a run as MLflow tags: commit, DVC hashes and library versions."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

_DECISIVE = ("src", "conf", "dvc.yaml", "pyproject.toml", "requirements.lock")
"""Paths that results depend on. Changes elsewhere, such as a report written after the commit, do not count as dirty."""
_LIBRARIES = ("torch", "transformers", "diffusers", "peft", "kedro", "mlflow")


def tags(project_path: Path) -> dict[str, str]:
    """All lineage tags of a run that starts now in ``project_path``."""
    return {**git_tags(project_path), **dvc_tags(project_path), **version_tags()}


def git_tags(project_path: Path) -> dict[str, str]:
    """``git.commit`` and ``git.state`` (clean or dirty); empty without a git repository."""
    commit = _git(project_path, "rev-parse", "HEAD")
    if commit is None:
        return {}
    changes = _git(project_path, "status", "--porcelain", "--", *_DECISIVE)
    return {"git.commit": commit, "git.state": "dirty" if changes else "clean"}


def dvc_tags(project_path: Path) -> dict[str, str]:
    """``dvc.<path>`` -> the hash that DVC recorded for each output in dvc.lock and each ``*.dvc`` file."""
    return {f"dvc.{path}": digest for path, digest in _dvc_outputs(project_path)}


def version_tags() -> dict[str, str]:
    """``version.<library>`` of the libraries that numerical results depend on, and of Python."""
    versions = {f"version.{name}": metadata.version(name) for name in _LIBRARIES}
    return versions | {"version.python": platform.python_version()}


def _dvc_outputs(project_path: Path) -> Iterator[tuple[str, str]]:
    stages = _yaml(project_path / "dvc.lock").get("stages", {})
    for stage in stages.values():
        for out in stage.get("outs", []):
            if "md5" in out:
                yield out["path"], out["md5"]
    for file in sorted((project_path / "data").rglob("*.dvc")):
        for out in _yaml(file).get("outs", []):
            if "md5" in out:
                yield (file.parent / out["path"]).relative_to(project_path).as_posix(), out["md5"]


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        return {}
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def _git(project_path: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(project_path), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
