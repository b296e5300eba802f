"""Where adapters come from: command, commit, uncommitted changes, DVC hashes, versions of libraries."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from visual_grpo.common.errors import UserError
from visual_grpo.config.command import launcher

DECISIVE = ("src", "conf", "dvc.yaml", "pyproject.toml", "requirements.lock", "quantised.lock", ":(glob)*.py")
"""What results depend on. Changes elsewhere, such as a report written after the commit, do not count as dirty."""
_LIBRARIES = ("torch", "transformers", "diffusers", "peft", "kedro", "mlflow")
_DVC = "dvc."
_DVC_SECONDS = 60


def command() -> str:
    """The command line of this process, as it can be pasted into a terminal in the project's folder."""
    program = Path(sys.argv[0])
    is_kedro = "kedro" in (program.name, program.parent.name)
    words = launcher() or ([".venv/bin/kedro"] if is_kedro else [])
    return shlex.join([*words, *sys.argv[1:]] if words else ["python", *sys.orig_argv[1:]])


def tags(project: Path) -> dict[str, str]:
    """The lineage tags of a run that starts now in ``project``, and MLflow's own of its user and source."""
    from mlflow.tracking.context.git_context import GitRunContext
    from mlflow.tracking.context.registry import resolve_tags

    return {
        **resolve_tags(ignore=[GitRunContext]),  # type: ignore[list-item]
        "command": command(),
        **git_tags(project),
        **version_tags(),
    }


def version_tags() -> dict[str, str]:
    """``version.<library>`` of the libraries that numerical results depend on, and of Python."""
    versions = {f"version.{name}": metadata.version(name) for name in _LIBRARIES}
    return versions | {"version.python": platform.python_version()}


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


def git_tags(project: Path) -> dict[str, str]:
    """``git.commit`` and ``git.state`` (clean or dirty); empty without a git repository."""
    commit = _output(project, "git", "rev-parse", "HEAD")
    if commit is None:
        return {}
    changes = _output(project, "git", "status", "--porcelain", "--", *DECISIVE)
    return {"git.commit": commit.strip(), "git.state": "dirty" if changes else "clean"}


def changes(project: Path) -> str:
    """The difference to the commit, new files included, as a patch for ``git apply``; empty where clean or no git."""
    patch = _output(project, "git", "diff", "--binary", "HEAD", "--", *DECISIVE) or ""
    new = _output(project, "git", "ls-files", "--others", "--exclude-standard", "-z", "--", *DECISIVE) or ""
    for file in filter(None, new.split("\0")):
        # git's exit code is 1 where files differ.
        patch += _output(project, "git", "diff", "--binary", "--no-index", "/dev/null", file, codes=(0, 1)) or ""
    return patch


def dvc_tags(project: Path, inputs: Sequence[str]) -> dict[str, str]:
    """``dvc.<path>`` -> DVC's hash of what it tracks in ``inputs`` and is on disk as DVC recorded it.

    Empty where DVC is not used or not installed.
    """
    folders = set(map(Path, inputs))
    known = {Path(path): digest for path, digest in recorded(project).items()}
    known = {path: digest for path, digest in known.items() if {path, *path.parents} & folders}
    asked = (sys.executable, "-m", "dvc", "data", "status", "--json")
    status = _output(project, *asked, seconds=_DVC_SECONDS) if known else None
    if status is None:
        return {}
    changed = set(map(Path, _texts(json.loads(status).get("uncommitted", {}))))
    changed |= {folder for path in changed for folder in path.parents}
    return {f"{_DVC}{path.as_posix()}": digest for path, digest in known.items() if path not in changed}


def dvc_hashes(facts: Mapping[str, Any]) -> dict[str, str]:
    """Path -> DVC hash of what a training read, by its facts or a version's tags."""
    return {name.removeprefix(_DVC): str(value) for name, value in facts.items() if name.startswith(_DVC)}


def recorded(project: Path) -> dict[str, str]:
    """Path -> hash of all outputs in dvc.lock, also those of environments, and in the ``*.dvc`` files.

    Raises:
        UserError: a dvc.lock is damaged.
    """
    locks = [Path("dvc.lock"), *sorted(lock.relative_to(project) for lock in project.glob("conf/*/dvc.lock"))]
    stages = [stage for lock in locks for stage in stages_of(lock, project).values()]
    found = {out["path"]: out["md5"] for stage in stages for out in stage.get("outs", []) if "md5" in out}
    for file in dvc_files(project):
        for out in (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("outs", []):
            if "md5" in out:
                found[(file.parent / out["path"]).relative_to(project).as_posix()] = out["md5"]
    return found


def stages_of(lock: Path, project: Path) -> dict[str, Any]:
    """The stages in a dvc.lock, a path in ``project``; none where there is no such file.

    Raises:
        UserError: it is damaged, for example by a merge.
    """
    file = project / lock
    try:
        stages: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))["stages"]
        if all(out["path"] for stage in stages.values() for out in stage.get("outs", [])):
            return stages
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, TypeError, KeyError, AttributeError):
        pass
    raise UserError(f"{lock} is damaged. Put back the one that git has: git checkout {lock}")


def dvc_files(project: Path) -> list[Path]:
    """The ``*.dvc`` of what DVC tracks beside its stages, in the project's folder and anywhere in ``data``."""
    # In the outputs' folders others may be at work.
    # Skips what another process removes meanwhile, where `Path.rglob` would raise FileNotFoundError.
    files = (Path(folder, name) for folder, _, names in os.walk(project / "data") for name in names)
    inside = (file for file in files if file.suffix == ".dvc")
    return sorted(file for file in (*project.glob("*.dvc"), *inside) if file.is_file())  # DVC's own is a folder.


def _texts(tree: Any) -> list[str]:
    """All paths in DVC's ``{"modified": [...], "renamed": [{"old": ..., "new": ...}], ...}``."""
    if isinstance(tree, str):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [text for part in parts for text in _texts(part)]


def _output(folder: Path, *arguments: str, codes: tuple[int, ...] = (0,), seconds: float | None = None) -> str | None:
    """Returns the output of a command; None if it cannot be run or fails."""
    try:
        done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode in codes else None
