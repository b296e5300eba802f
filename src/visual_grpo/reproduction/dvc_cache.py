"""Files by their DVC hash, from the project's cache or its remote, whatever dvc.lock says today."""

from __future__ import annotations

import json
import sys
from configparser import RawConfigParser
from pathlib import Path

from visual_grpo.errors import UserError
from visual_grpo.reproduction.programs import ProgramError, output_of


def restore(project: Path, digest: str, path: str, folder: Path) -> Path:
    """The file or folder that DVC knows by ``digest``, below ``folder``.

    It is brought there by a separate DVC repository with the project's cache and remotes, so that neither the
    project's nor the worktree's entries for ``path`` matter.

    Raises:
        UserError: neither the cache nor the remote has it, or DVC is not installed.
    """
    repository = folder / f"dvc-{digest}"
    try:
        if not repository.is_dir():
            repository.mkdir()
            _set_up(repository, project)
        name = Path(path).name
        entry = {"outs": [{"md5": digest, "hash": "md5", "path": name}]}
        (repository / f"{name}.dvc").write_text(json.dumps(entry), encoding="utf-8")  # YAML contains JSON.
        _dvc(repository, "fetch", f"{name}.dvc")
        _dvc(repository, "checkout", f"{name}.dvc")
    except ProgramError as error:
        raise UserError(
            f"{path} of the run (DVC hash {digest}) is neither in DVC's cache nor in its remote: {_reason(error)}\n"
            "Bring it into the cache from a copy of the project that has it: `dvc push` there, `dvc pull` here."
        ) from error
    return repository / name


def _set_up(repository: Path, project: Path) -> None:
    """A DVC repository without git that has the project's settings; their relative paths are made absolute."""
    _dvc(repository, "init", "--quiet", "--no-scm")
    config = RawConfigParser()
    for line in _dvc(project, "config", "--list").splitlines():
        name, equals, value = line.partition("=")
        parts = name.split(".")
        if equals and len(parts) > 1:
            section = f"'remote \"{'.'.join(parts[1:-1])}\"'" if parts[0] == "remote" else parts[0]
            if not config.has_section(section):
                config.add_section(section)
            config.set(section, parts[-1], value)
    for section, option, value in (
        ("core", "no_scm", "true"),
        ("core", "analytics", "false"),
        ("cache", "dir", _dvc(project, "cache", "dir").strip()),
    ):
        if not config.has_section(section):
            config.add_section(section)
        config.set(section, option, value)
    with (repository / ".dvc/config").open("w", encoding="utf-8") as file:
        config.write(file)


def _dvc(at: Path, *words: str) -> str:
    return output_of(sys.executable, "-m", "dvc", *words, at=at)


def _reason(error: ProgramError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("ERROR")), lines[0] if lines else "")
