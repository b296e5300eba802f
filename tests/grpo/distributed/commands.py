"""Commands by several processes of a small project, on one host or on two network namespaces of this machine."""

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

from safetensors.torch import load_file
from torch import Tensor

from tests.grpo.distributed.test_toys import is_there
from tests.small_project import environment, paste, small_project
from tests.test_kill import KINDS

COMMON = "grpo.steps=3,grpo.prompts_per_step=3,grpo.group_size=4"
LEARNED = "starter.vae_steps=150,starter.dit_steps=300,starter.ar_steps=100,starter.vl_steps=150"
"""A base model that has learned something: where samples tell nothing, what is left of their gradients is rounding."""
ROW_BY_ROW = "policy.denoise_batch=1,policy.decode_batch=1,policy.rollout_batch=1,grpo.micro_batch_size=1"
"""Matrix products of another number of rows are rounded in another way, and AdamW makes much of little."""
REPRODUCIBLE = "MKL_CBWR=AVX2"
"""Else MKL rounds a product of one row by where the weights lie in memory, which gathering sharded layers changes."""
LONG = f"{COMMON},grpo.steps=200,grpo.schedule=constant,tracking.checkpoint_every=1,evaluation.every=0"


def command(kind: str, pipelines: str, more: str = "", program: str = ".venv/bin/kedro") -> str:
    env, params = KINDS[kind]
    given = ",".join(filter(None, [COMMON, params, more]))
    return f"{program} run{f' --env={env}' if env else ''} --pipelines={pipelines} --params={given}"


def prepare(project: Path, kind: str, more: str = "") -> Path:
    """The folder of outputs of a project that can be trained."""
    small_project(project)
    done = paste(command(kind, "starter,data_preparation,baseline", more), project)
    assert done.returncode == 0, done.stderr[-2000:]
    return max((folder.parent for folder in project.glob("data/**/05_model_input")), key=lambda own: len(own.parts))


def weights(output: Path) -> dict[str, Tensor]:
    """The tensors of the last adapters."""
    files = sorted((output / "06_models/adapters/last").rglob("*.safetensors"))
    return {f"{file}/{name}": value for file in files for name, value in load_file(file).items()}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Running:
    """Commands in the background; a context at whose end nothing of them is left."""

    def __init__(self, lines: Sequence[str], project: Path) -> None:
        self.commands = [
            subprocess.Popen(
                shlex.split(line),
                cwd=project,
                env=environment(project) | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for line in lines
        ]
        self.seen: set[int] = set()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self.seen, *(own.pid for own in self.commands)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for own in self.commands:
            own.communicate()

    def below(self, pid: int) -> list[int]:
        """The Python processes that ``pid`` has started and that compute, or start such."""
        found = []
        for file in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, IndexError, ValueError):
                parent = int(file.read_text(encoding="utf-8").rpartition(") ")[2].split()[1])
                words = (file.parent / "cmdline").read_bytes()
                if parent == pid and b"kedro" in words:
                    found.append(int(file.parent.name))
        self.seen |= set(found)
        return sorted(found)

    def wait_for(self, there: Callable[[], object], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not there():
            ended = [own for own in self.commands if own.poll() is not None]
            assert not ended, ended[0].communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def ended(self, seconds: float) -> list[tuple[str, str]]:
        """(stdout, stderr) of each, when they and all that they have started are gone; raises if not in time."""
        deadline = time.monotonic() + seconds
        said = [own.communicate(timeout=max(0.1, deadline - time.monotonic())) for own in self.commands]
        while any(is_there(pid) for pid in self.seen):
            assert time.monotonic() < deadline, "a process is left"
            time.sleep(0.1)
        return said
