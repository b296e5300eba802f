"""Workers of workers/ as processes, and their modules in this one."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.markdown import ROOT

WORKERS = ROOT / "workers"


@contextmanager
def started(script: Path, *, stderr: Any = subprocess.DEVNULL, **environment: str) -> Iterator[str]:
    """The address of a worker that has loaded its weights."""
    process = subprocess.Popen(
        [sys.executable, str(script), "--port=0"],
        env={**os.environ, "PYTHONPATH": str(WORKERS), **environment},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().split()[1].rstrip(",")
        assert process.stdout.readline().endswith(": ready\n")
        yield url
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def run_to_its_end(script: Path, *, port: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """A worker that ends by itself, with the exit code 1."""
    ended = subprocess.run(
        [sys.executable, str(script), f"--port={port}"],
        env={**os.environ, "PYTHONPATH": str(WORKERS), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    return ended


def module_of(worker: str, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(WORKERS / worker))
    return importlib.import_module(name)
