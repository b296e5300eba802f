"""``python -m visual_grpo``: the same as ``kedro run`` from the project's root."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def main(*args: Any, **kwargs: Any) -> Any:
    """Runs the project's pipelines; takes the options of ``kedro run``."""
    from visual_grpo import third_party_output

    third_party_output.silence_libraries()
    from kedro.framework.cli.utils import find_run_command
    from kedro.framework.project import configure_project

    configure_project(Path(__file__).parent.name)
    return find_run_command(Path(__file__).parent.name)(*args, **kwargs)


if __name__ == "__main__":
    main()
