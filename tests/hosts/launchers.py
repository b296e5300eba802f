"""Several hosts on this machine: a torchrun for each, which know each other by 127.0.0.1 only."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.small_project import environment

SECRET = "b61f0e4c9d7a4b0c8f3e"
HOST = "HOST:29400"
"""What stands in the pages for the address of the first host."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Hosts:
    """The command ``line`` on each of ``count`` hosts; a context at whose end nothing of them is left."""

    def __init__(self, line: str, project: Path, secrets: Sequence[str | None] = (SECRET, SECRET)) -> None:
        words = shlex.split(line.replace(HOST, f"127.0.0.1:{free_port()}"))
        self.launchers: list[subprocess.Popen[str]] = []
        self._groups: set[int] = set()
        for secret in secrets:
            kept = {name: value for name, value in environment(project).items() if name != "VISUAL_GRPO_SECRET"}
            added = {"OMP_NUM_THREADS": "1"} | ({} if secret is None else {"VISUAL_GRPO_SECRET": secret})
            self.launchers.append(
                subprocess.Popen(
                    words,
                    cwd=project,
                    env=kept | added,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks():
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.kill()
            launcher.communicate()

    def ranks(self) -> dict[int, int]:
        """pid -> rank of the processes that the launchers have started."""
        own = {launcher.pid for launcher in self.launchers}
        found = {}
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError, ValueError, IndexError):
                parent = int((file.parent / "stat").read_text(encoding="utf-8").rpartition(") ")[2].split()[1])
                variables = dict(line.split("=", 1) for line in file.read_text().split("\0") if "=" in line)
                if parent in own and "RANK" in variables:
                    found[int(file.parent.name)] = int(variables["RANK"])
        return found

    def leader(self) -> int:
        """Which launcher has rank 0."""
        rank_0 = next(pid for pid, rank in self.ranks().items() if rank == 0)
        parent = int(Path(f"/proc/{rank_0}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()[1])
        return [launcher.pid for launcher in self.launchers].index(parent)

    def wait_for(self, there: Callable[[], object], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not there():
            ended = [launcher for launcher in self.launchers if launcher.poll() is not None]
            assert not ended, ended[0].communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def outputs(self, seconds: float) -> list[tuple[str, str]]:
        """What each has written, when all have ended: (stdout, stderr).

        Raises:
            subprocess.TimeoutExpired: they have not within ``seconds``.
        """
        deadline = time.monotonic() + seconds
        return [launcher.communicate(timeout=max(0.1, deadline - time.monotonic())) for launcher in self.launchers]
