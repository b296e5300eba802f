"""Servers as processes, and what must not be left of them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.markdown import ROOT

HERE = Path(__file__).parent


@dataclass
class Running:
    """A server that runs."""

    process: subprocess.Popen
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
def running(plan: str = "ok", *, port: int = 0, script: str = "server.py") -> Iterator[Running]:
    process = subprocess.Popen(
        [sys.executable, str(HERE / script), str(port), plan],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield Running(process, int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    end = time.monotonic() + 2
    while (left := [t for t in threading.enumerate() if t not in before]) and time.monotonic() < end:
        time.sleep(0.01)
    assert left == []


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
