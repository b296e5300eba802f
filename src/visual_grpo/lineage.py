"""``python -m visual_grpo.lineage NAME``: where adapters come from, and whether that still holds.

NAME is a registered version (``visual_grpo@champion``, ``visual_grpo/3``), an MLflow run's id or name, a folder of
adapters, or ``latest``. Exits with 1 if something is not as it was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from visual_grpo.errors import UserError
from visual_grpo.third_party_output import silence_libraries


def show(named: str, folder: Path, environment: str | None = None) -> bool:
    """Prints the lineage; returns whether nothing differs.

    Raises:
        UserError: there is nothing of this name, or ``folder`` is no project.
    """
    from visual_grpo import console
    from visual_grpo.reproduction.checks import DIFFERS, lines
    from visual_grpo.retraining.project import read_project
    from visual_grpo.tracking.relocation import use_server
    from visual_grpo.tracking.subjects import find_subject

    project = read_project(folder, environment)
    use_server(project.tracking_uri, folder)
    subject = find_subject(named, Path(project.config.adapters_folder))
    found = lines(subject, folder)
    rows = [[line.what, line.value, line.state, line.why] for line in found]
    console.table(f"Lineage of {subject.title}", ["", "", "state", "by"], rows)
    differing = [line.what for line in found if line.state == DIFFERS]
    console.note(f"Differs: {', '.join(differing)}." if differing else "Nothing differs.")
    return not differing


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m visual_grpo.lineage", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", help="NAME@ALIAS, NAME/VERSION, a run's id or name, a folder of adapters, or latest")
    parser.add_argument("--env", help="Kedro's environment, whose adapters are the latest; without it the default")
    return parser.parse_args()


def main() -> None:
    silence_libraries()
    given = _arguments()
    try:
        same = show(given.name, Path.cwd(), given.env)
    except UserError as error:
        sys.exit(f"Error: {str(error).removeprefix('adapter: ')}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
