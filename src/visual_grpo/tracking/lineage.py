"""Where a run comes from: command, commit, uncommitted changes, DVC's hashes, versions."""

from __future__ import annotations

import getpass
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from visual_grpo.command import launched_by
from visual_grpo.files import walked
from visual_grpo.tracking.dvc_lock import stages_of

DECISIVE = ("src", "conf", "dvc.yaml", "pyproject.toml", "requirements.lock", "quantised.lock", ":(glob)*.py")
"""What results depend on. Changes elsewhere, such as a report written after the commit, do not count as dirty."""
_LIBRARIES = ("torch", "transformers", "diffusers", "peft", "kedro", "mlflow")
_DVC_SECONDS = 60
_KEDRO = ".venv/bin/kedro"


def command() -> str:
    """The command line of this process, as it can be pasted into a terminal in the project's folder."""
    if launcher := launched_by():
        return shlex.join([*launcher, *sys.argv[1:]])
    if _is_kedro():
        return shlex.join([_KEDRO, *sys.argv[1:]])
    return shlex.join(["python", *sys.orig_argv[1:]])


def _is_kedro() -> bool:
    program = Path(sys.argv[0])
    return program.name == "kedro" or program.parent.name == "kedro"


def tags(project_path: Path) -> dict[str, str]:
    """All lineage tags of a run that starts now in ``project_path``."""
    return {
        "command": command(),
        **origin_tags(),
        **git_tags(project_path),
        **dvc_tags(project_path),
        **version_tags(),
    }


def origin_tags() -> dict[str, str]:
    """What MLflow shows in its columns Created by and Source: the user, and the program without its folders."""
    source = {
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": _KEDRO if _is_kedro() or launched_by() else Path(sys.argv[0]).name,
    }
    try:
        return {"mlflow.user": getpass.getuser(), **source}
    except (OSError, KeyError, ImportError):  # As in a container, where nobody has the number of this user.
        return source


def resumed(earlier: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """The tags of a run that goes on: its first ones stay, and what is another now is a line of ``resumed.NAME``.

    Args:
        earlier: the tags that this returned for the part before, or those of a run that was never resumed.
    """
    tags = {**now, **earlier}
    for name, value in now.items():
        before = earlier.get(f"resumed.{name}", "")
        if tags[name] != value and not before.endswith(value):
            tags[f"resumed.{name}"] = f"{before}\n{value}".lstrip("\n")
    return tags


def commands(tags: Mapping[str, str]) -> str:
    """The line that started a run, and those that resumed it."""
    return "\n".join(tags[name] for name in ("command", "resumed.command") if name in tags)


def git_tags(project_path: Path) -> dict[str, str]:
    """``git.commit`` and ``git.state`` (clean or dirty); empty without a git repository."""
    commit = _output(project_path, "git", "rev-parse", "HEAD")
    if commit is None:
        return {}
    changes = _output(project_path, "git", "status", "--porcelain", "--", *DECISIVE)
    return {"git.commit": commit.strip(), "git.state": "dirty" if changes else "clean"}


def changes(project_path: Path) -> str:
    """What differs from the commit, new files included, as a patch for ``git apply``; empty where clean or no git."""
    known = _output(project_path, "git", "diff", "--binary", "HEAD", "--", *DECISIVE) or ""
    new = _output(project_path, "git", "ls-files", "--others", "--exclude-standard", "-z", "--", *DECISIVE) or ""
    return known + "".join(_as_new(project_path, file) for file in new.split("\0") if file)


def dvc_tags(project_path: Path) -> dict[str, str]:
    """``dvc.<path>`` -> DVC's hash of each tracked file or folder that is on disk as DVC recorded it.

    What has changed since, or is missing, has no tag. Empty where DVC is not used or not installed.
    """
    known = recorded(project_path)
    if not known:
        return {}
    status = _output(project_path, sys.executable, "-m", "dvc", "data", "status", "--json", seconds=_DVC_SECONDS)
    if status is None:
        return {}
    differing = {Path(path.rstrip("/")) for path in _paths(json.loads(status).get("uncommitted", {}))}
    return {
        f"dvc.{path}": digest
        for path, digest in known.items()
        if not any(other == Path(path) or Path(path) in other.parents for other in differing)
    }


def version_tags() -> dict[str, str]:
    """``version.<library>`` of the libraries that numerical results depend on, and of Python."""
    versions = {f"version.{name}": metadata.version(name) for name in _LIBRARIES}
    return versions | {"version.python": platform.python_version()}


def recorded(project_path: Path) -> dict[str, str]:
    """Path -> hash of all outputs in dvc.lock, also those of environments, and in the ``*.dvc`` files.

    Raises:
        UserError: a dvc.lock is damaged.
    """
    locks = [Path("dvc.lock"), *sorted(lock.relative_to(project_path) for lock in project_path.glob("conf/*/dvc.lock"))]
    stages = [stage for lock in locks for stage in stages_of(lock, project_path).values()]
    found = {out["path"]: out["md5"] for stage in stages for out in stage.get("outs", []) if "md5" in out}
    for file in dvc_files(project_path):
        for out in _yaml(file).get("outs", []):
            if "md5" in out:
                found[(file.parent / out["path"]).relative_to(project_path).as_posix()] = out["md5"]
    return found


def dvc_files(project_path: Path) -> list[Path]:
    """The ``*.dvc`` of what DVC tracks beside its stages, in the project's folder and anywhere in ``data``."""
    # In the outputs' folders others may be at work.
    inside = (path for path in walked(project_path / "data") if path.suffix == ".dvc")
    return sorted(file for file in (*project_path.glob("*.dvc"), *inside) if file.is_file())  # DVC's own is a folder.


def _paths(tree: Any) -> list[str]:
    """All paths in DVC's ``{"modified": [...], "renamed": [{"old": ..., "new": ...}], ...}``."""
    if isinstance(tree, str):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [path for part in parts for path in _paths(part)]


def _as_new(project_path: Path, file: str) -> str:
    # git's exit code is 1 where files differ.
    return _output(project_path, "git", "diff", "--binary", "--no-index", "/dev/null", file, codes=(0, 1)) or ""


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        return {}
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def _output(folder: Path, *arguments: str, codes: tuple[int, ...] = (0,), seconds: float | None = None) -> str | None:
    """What a command prints; None if it cannot be run or fails."""
    try:
        done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode in codes else None
