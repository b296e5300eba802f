"""Servers as processes, and what must not be left of them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.markdown import ROOT

HERE = Path(__file__).parent
WORKERS = ROOT / "workers"


@contextmanager
def served(script: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The process of a server."""
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env=_environment(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@dataclass
class Running:
    """A server that runs."""

    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> list[dict[str, Any]]:
        """The requests that it got."""
        with urllib.request.urlopen(f"{self.url}/log", timeout=5) as answer:
            return json.loads(answer.read())


@contextmanager
def running(plan: str = "ok", *, port: int = 0) -> Iterator[Running]:
    with served(HERE / "server.py", str(port), plan) as process:
        assert process.stdout is not None
        yield Running(process, int(process.stdout.readline()))


@contextmanager
def started(script: Path, **environment: str) -> Iterator[str]:
    """The address of a worker that has loaded its weights."""
    with served(script, "--port=0", **environment) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[1].rstrip(",")
        assert process.stdout.readline().endswith(": ready\n")
        yield url


def told_at_its_end(script: Path, **environment: str) -> str:
    """What a worker writes to stderr that ends by itself, with the exit code 1."""
    command = [sys.executable, str(script), "--port=0"]
    ended = subprocess.run(
        command, env=_environment(environment), capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    return ended.stderr


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(WORKERS), **added}


def module_of(worker: str, name: str) -> ModuleType:
    """A module beside a worker's script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(WORKERS / worker)
        return importlib.import_module(name)
