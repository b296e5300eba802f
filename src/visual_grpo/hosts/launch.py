"""What torchrun tells each process that it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from visual_grpo.errors import UserError

SECRET, PORT, SECONDS = "VISUAL_GRPO_SECRET", "VISUAL_GRPO_PORT", "VISUAL_GRPO_JOIN_SECONDS"
"""Variables that a user may set."""
MODULE = "visual_grpo.hosts"
_LOOPBACK = ("127.", "localhost", "::1")
_DEFAULT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    rank: int
    local_rank: int
    here: int
    """Processes on this machine."""
    count: int
    """All of them."""
    address: str
    """Of the machine of rank 0."""
    port: int
    """There, of torchrun's own store."""
    has_store: bool
    run: str
    """torchrun's --rdzv-id."""
    folder: Path | None
    """torchrun's for this attempt, on this machine alone."""
    own_port: int | None
    """`PORT`; None = any."""
    seconds: float
    """`SECONDS`: how long all may take to connect."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launch:
        """Raises UserError where torchrun has not started this process, or a variable of the user is none."""
        missing = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in environment]
        if missing:
            raise UserError(
                f"torchrun starts python -m {MODULE}, but {', '.join(missing)} is not in the environment. Expected\n"
                f"torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 -m {MODULE} run"
                " --pipeline=train\non each of the hosts."
            )
        file = environment.get("TORCHELASTIC_ERROR_FILE")
        return cls(
            rank=int(environment["RANK"]),
            local_rank=int(environment["LOCAL_RANK"]),
            here=int(environment["LOCAL_WORLD_SIZE"]),
            count=int(environment["WORLD_SIZE"]),
            address=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            run=environment.get("TORCHELASTIC_RUN_ID", ""),
            folder=Path(file).parents[1] if file else None,
            own_port=_port(environment.get(PORT)),
            seconds=_seconds(environment.get(SECONDS)),
        )

    @property
    def on_one_host(self) -> bool:
        return self.here == self.count

    @property
    def first_host(self) -> str:
        """Where the processes find rank 0."""
        return "127.0.0.1" if self.on_one_host else self.address

    @property
    def interface(self) -> str:
        """Where rank 0 listens; "" = on all interfaces, of which others may reach any."""
        return "127.0.0.1" if self.first_host.startswith(_LOOPBACK) else ""


def launcher() -> list[str]:
    """The words before ``run``, as they are typed."""
    words = _words_of(os.getppid())
    if MODULE not in words:
        return ["torchrun", "OPTIONS", "-m", MODULE]
    words = words[: words.index(MODULE) + 1]
    if Path(words[0]).name.startswith("python") and len(words) > 1 and Path(words[1]).name == "torchrun":
        words = words[1:]  # The system has put the interpreter before a script.
    program = Path(words[0])
    return [str(program.relative_to(Path.cwd())) if program.is_relative_to(Path.cwd()) else words[0], *words[1:]]


def _words_of(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8").split("\0")
    except OSError:  # Not Linux.
        return []


def _port(given: str | None) -> int | None:
    if not given:
        return None
    if not given.isdecimal() or not 0 < int(given) < 65536:
        raise UserError(f"{PORT} is {given!r}; expected the number of a port that is free on the host of rank 0.")
    return int(given)


def _seconds(given: str | None) -> float:
    if not given:
        return _DEFAULT_SECONDS
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{SECONDS} is {given!r}; expected seconds, more than 0.")
    return seconds
