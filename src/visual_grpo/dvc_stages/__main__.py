"""The command ``python -m visual_grpo.dvc_stages``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kedro.framework.project import configure_project

from visual_grpo import dvc_stages, sources
from visual_grpo.dvc_stages.environment import BASE, CONF, Environment
from visual_grpo.dvc_stages.stages import stages_text
from visual_grpo.errors import UserError
from visual_grpo.third_party_output import silence_libraries

START_TEXT = """\
# For DVC's stage train alone: parameters that it is given beside those of parameters.yml, as --params has them, for
# example train_params: grpo.steps=100,seed=3. Kedro does not read this file.
train_params: ""
"""


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks the file; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m visual_grpo.dvc_stages", description=dvc_stages.__doc__)
    parser.add_argument("--env", help="the Kedro environment; without it the default")
    parser.add_argument("--check", action="store_true", help="only say whether the file is as it would be written")
    given = parser.parse_args(arguments)
    try:
        return _main(given.env, check=given.check)
    except UserError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1


def _main(name: str | None, *, check: bool) -> int:
    if not (CONF / BASE).is_dir():
        raise UserError(f"Run this in the project's folder: there is no {CONF / BASE} in {Path.cwd()}")
    silence_libraries()
    configure_project(sources.PACKAGE)
    environment = Environment.read(name)
    text = stages_text(environment)
    written = environment.file.read_text(encoding="utf-8") if environment.file.is_file() else None
    if check:
        if text != written:
            raise UserError(
                f"{environment.file} is not what the pipelines and parameters of this environment make it. Write it"
                f" again: make dvc-stages{'' if environment.name is None else f' ENV={environment.name}'}"
            )
        return 0
    if not environment.start.is_file():
        environment.start.write_text(START_TEXT, encoding="utf-8")
    if text != written:
        environment.file.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{environment.file} {'is up to date' if text == written else 'was written'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
