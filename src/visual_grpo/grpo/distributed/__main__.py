"""``torchrun OPTIONS -m visual_grpo.grpo.distributed run ...`` on each host: ``kedro run`` in all processes."""

from __future__ import annotations

import os
import sys

from visual_grpo.common import quiet_libraries
from visual_grpo.config import command


def _run() -> None:
    from kedro.framework.cli.utils import find_run_command
    from kedro.framework.project import configure_project

    from visual_grpo.grpo.distributed import launch

    configure_project("visual_grpo")
    launch.launched_by_torchrun(lambda: find_run_command("visual_grpo")(sys.argv[2:]))


if __name__ == "__main__":
    if sys.argv[1:2] != ["run"] or "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(
            "Error: expected, on each host, torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d"
            " --rdzv-endpoint=HOST:29400 -m visual_grpo.grpo.distributed run and the options of kedro run"
        )
    quiet_libraries.silence_libraries()
    command.use_launcher(["torchrun", "OPTIONS", "-m", "visual_grpo.grpo.distributed"])
    _run()
