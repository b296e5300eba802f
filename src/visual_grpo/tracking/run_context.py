"""Facts of a command: its line, commit, uncommitted changes, DVC hashes, versions of libraries.

A node gets it as a `RunContext`, and asks neither git nor DVC nor MLflow itself.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from visual_grpo.common import console
from visual_grpo.common.errors import UserError
from visual_grpo.common.processes import under_torchrun
from visual_grpo.tracking.tracker import Tracker

DECISIVE = (
    *("src", "conf", "examples", "workers", ":(glob)**/*.py", ":(exclude)tests", ":(exclude)benchmarks"),
    *(":(exclude)env", ":(exclude)venv"),
    *("dvc.yaml", "pyproject.toml", "requirements.lock", "quantised.lock"),
)
"""Paths that results depend on. Changes elsewhere, such as a report written after the commit, do not count as dirty."""
_LIBRARIES = ("torch", "transformers", "diffusers", "peft", "kedro", "mlflow")
_DVC = "dvc."


@dataclass(frozen=True)
class RunContext:
    """The context that a node may read: the project's folder and the MLflow run (by default none)."""

    project: Path = field(default_factory=Path.cwd)
    tracker: Tracker = field(default_factory=Tracker)

    def facts(self, read: Sequence[str | Path]) -> dict[str, str]:
        """Returns the command line, commit, versions and DVC's hashes of what is ``read``, by their names in a
        provenance."""
        code = git_tags(self.project)
        if code:
            patch = changes(self.project)
            code["git.changes"] = hashlib.sha256(patch).hexdigest() if patch else "none"
        return {"command": command(), **code, **version_tags(), **dvc_tags(self.project, read)}


def command() -> str:
    """The command line of this process, as it can be pasted into a terminal in the project's folder."""
    called = Path(sys.argv[0])
    if "kedro" not in (called.name, called.parent.name):
        return shlex.join(["python", *sys.orig_argv[1:]])
    program = ["torchrun", "OPTIONS", "-m", "kedro"] if under_torchrun() else [".venv/bin/kedro"]
    return shlex.join([*program, *sys.argv[1:]])


def tags(project: Path) -> dict[str, str]:
    """The lineage tags of a run that starts now in ``project``, and MLflow's own of its user and source."""
    from mlflow.tracking.context.git_context import GitRunContext
    from mlflow.tracking.context.registry import resolve_tags

    of_mlflow = resolve_tags(ignore=[GitRunContext])  # type: ignore[list-item]
    return {**of_mlflow, "command": command(), **git_tags(project), **version_tags()}


def version_tags() -> dict[str, str]:
    """``version.<library>`` of the libraries that numerical results depend on, and of Python."""
    versions = {f"version.{name}": metadata.version(name) for name in _LIBRARIES}
    return versions | {"version.python": platform.python_version()}


def git_tags(project: Path) -> dict[str, str]:
    """``git.commit`` and ``git.state`` (clean or dirty); empty without a git repository."""
    commit = _git(project, "rev-parse", "HEAD")
    if commit is None:
        return {}
    is_dirty = _diff(project, "HEAD", "--", *DECISIVE) or _new(project)
    return {"git.commit": commit.decode().strip(), "git.state": "dirty" if is_dirty else "clean"}


def changes(project: Path) -> bytes:
    """The difference to the commit, new files included, for ``git apply`` in the root; empty where clean or no git."""
    patch = _diff(project, "HEAD", "--", *DECISIVE)
    below = os.fsdecode(_git(project, "rev-parse", "--show-prefix") or b"").rstrip("\n")
    return patch + b"".join(_diff(project, "--no-index", "/dev/null", file, below=below) for file in _new(project))


def _diff(project: Path, *words: str, below: str = "") -> bytes:
    """Returns a patch, which is the same whatever the user has set for git."""
    fixed = ["--binary", "--no-ext-diff", "--no-textconv", "--no-color", "--unified=3"]
    prefixes = [f"--src-prefix=a/{below}", f"--dst-prefix=b/{below}"]
    # With --no-index, git's exit code is 1 where files differ.
    settings = ["-c", "diff.relative=false", "-c", "core.quotePath=true"]
    return _git(project, *settings, "diff", *fixed, *prefixes, *words, codes=(0, 1)) or b""


def _new(project: Path) -> list[str]:
    """The files that git neither tracks nor ignores."""
    found = _git(project, "ls-files", "--others", "--exclude-standard", "-z", "--", *DECISIVE) or b""
    return [os.fsdecode(file) for file in filter(None, found.split(b"\0"))]


def dvc_tags(project: Path, inputs: Sequence[str | Path]) -> dict[str, str]:
    """``dvc.<path>`` -> DVC's hash of what it tracks in ``inputs`` and is on disk as DVC recorded it."""
    folders = set(map(Path, inputs))
    tracked = {path: out for path, out in _outputs(project).items() if {path, *path.parents} & folders}
    return {f"{_DVC}{path}": out.hash_info.value for path, out in tracked.items() if not out.workspace_status()}


def dvc_hashes(facts: Mapping[str, Any]) -> dict[str, str]:
    """Path -> DVC hash of what a training read, by its facts or a version's tags."""
    return {name.removeprefix(_DVC): str(value) for name, value in facts.items() if name.startswith(_DVC)}


def recorded(project: Path) -> dict[str, str]:
    """Path -> hash of everything that DVC tracks. Raises UserError if a file of DVC's is damaged."""
    return {path.as_posix(): out.hash_info.value for path, out in _outputs(project).items()}


def dvc_imports(project: Path) -> list[str]:
    """The files of what ``dvc import`` and ``dvc import-url`` brought."""
    if _git(project, "ls-files", "--cached", "--others", "--exclude-standard", "*.dvc") == b"":
        return []  # Without DVC, whose import takes long. Outside a repository, git has no answer.
    return [os.path.relpath(stage.path, project) for stage in _dvc_stages(project) if stage.is_import]


def _outputs(project: Path) -> dict[Path, Any]:
    """Path in the project -> DVC's output, if it has a hash."""
    outputs = [out for stage in _dvc_stages(project) for out in stage.outs if out.hash_info]
    return {Path(os.path.relpath(out.fs_path, project)): out for out in outputs}


def _dvc_stages(project: Path) -> Sequence[Any]:
    """The stages and ``*.dvc`` files of all folders; empty where DVC is not used or not installed, or without git."""
    try:
        from dvc import exceptions, repo, scm
    except ImportError:
        return ()
    try:
        stages: Sequence[Any] = repo.Repo(project).index.stages
    except (exceptions.NotDvcRepoError, scm.SCMError):
        return ()
    except exceptions.DvcException as error:  # For example, a merge has damaged a file.
        raise UserError(f"DVC: {error}. Put the file back as git has it: git checkout FILE") from error
    except OSError as error:  # DVC makes folders before it reads.
        _warn("DVC's hashes are not known, since DVC cannot work here", str(error))
        return ()
    return stages


def _git(folder: Path, *words: str, codes: tuple[int, ...] = (0,)) -> bytes | None:
    """Returns what git prints, files in whatever encoding they have; None if it cannot be run or fails."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, env=os.environ | {"LC_ALL": "C"}, capture_output=True)
    except OSError:
        return None
    if b"dubious ownership" in done.stderr:  # A different user owns the checkout, as in many containers.
        refused = "neither the commit nor uncommitted changes are recorded, since git refuses"
        _warn(refused, done.stderr.decode(errors="replace"))
    return done.stdout if done.returncode in codes else None


@cache
def _warn(what: str, why: str) -> None:
    console.note(f"Warning: {what}: {' '.join(why.split())}")
