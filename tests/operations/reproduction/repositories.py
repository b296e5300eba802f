"""Small git repositories for tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def repository(folder: Path) -> str:
    """Makes a repository with ``src/code.py`` that says ``a = 1``, and returns its commit."""
    (folder / "src").mkdir(parents=True)
    (folder / "src/code.py").write_text("a = 1\n")
    git(folder, "init", "-q")
    return commit(folder)


def commit(folder: Path) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "state")
    return git(folder, "rev-parse", "HEAD")


def dvc(folder: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", *words], cwd=folder, check=True, capture_output=True)
