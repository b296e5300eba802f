"""``torchrun OPTIONS -m visual_grpo.distributed run ...`` on each host: ``kedro run`` by all of their processes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from visual_grpo import command, third_party_output

MODULE = "visual_grpo.distributed"


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] != ["run"] or "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(
            f"Error: expected, on each host, torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d"
            f" --rdzv-endpoint=HOST:29400 -m {MODULE} run and the options of kedro run"
        )
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # Torch reads it when it is imported.
    third_party_output.silence_libraries()
    from visual_grpo.distributed.launch import launched_by_torchrun

    command.use_launcher(_launcher())
    launched_by_torchrun(lambda: importlib.import_module("visual_grpo.__main__").main(list(arguments[1:])))


def _launcher() -> list[str]:
    """The words before ``run``, as they were typed."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8").split("\0")
        first = 1 if Path(words[0]).name.startswith("python") and Path(words[1]).name == "torchrun" else 0
        return [words[first].removeprefix(f"{Path.cwd()}/"), *words[first + 1 : words.index(MODULE) + 1]]
    except (OSError, ValueError):  # Not Linux.
        return ["torchrun", "OPTIONS", "-m", MODULE]


if __name__ == "__main__":
    main(sys.argv[1:])
