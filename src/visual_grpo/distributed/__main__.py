"""``torchrun OPTIONS -m visual_grpo.distributed run ...`` on each host: ``kedro run`` by all of their processes."""

from __future__ import annotations

import importlib
import os
import sys

from visual_grpo import command, third_party_output

_LAUNCHER = ["torchrun", "OPTIONS", "-m", "visual_grpo.distributed"]

if __name__ == "__main__":
    if sys.argv[1:2] != ["run"] or "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(
            "Error: expected, on each host, torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d"
            " --rdzv-endpoint=HOST:29400 -m visual_grpo.distributed run and the options of kedro run"
        )
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # Torch reads it when it is imported.
    third_party_output.silence_libraries()
    command.use_launcher(_LAUNCHER)
    launch = importlib.import_module("visual_grpo.distributed.launch")
    launch.launched_by_torchrun(lambda: importlib.import_module("visual_grpo.__main__").main(sys.argv[2:]))
