"""``python -m visual_grpo.tracking.deliver [OUTPUT ...]``: brings into MLflow what runs had to leave on disk.

Each run's records go to the server that the run had; ``--to URI`` sends them to another one, of runs whose server had
nothing of them yet. Without a folder of outputs it looks in ``data``. Exits with 1 if something still waits.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from visual_grpo.files import walked
from visual_grpo.third_party_output import silence_libraries
from visual_grpo.tracking.leftovers import deliver_leftovers
from visual_grpo.tracking.outbox import lock, outboxes
from visual_grpo.tracking.relocation import ARTIFACTS, default_artifacts, use_server
from visual_grpo.tracking.spool import FOLDER
from visual_grpo.tracking.store import Store, in_a_line, shown_server, unavailable


def deliver(outputs: list[Path], to: str | None = None) -> tuple[list[str], bool]:
    """Delivers everything that waits in ``outputs``, each spool to its own server.

    Args:
        to: only what belongs to this server.

    Returns:
        Lines that say what became of each, and whether all of it is in MLflow now.
    """
    lines, whole = [], True
    for root in _roots(outputs):
        waiting = outboxes(root)
        for server in sorted({outbox.head.server for outbox in waiting}):
            if to is not None and server != shown_server(to):
                continue
            own = {outbox.folder: str(outbox) for outbox in waiting if outbox.head.server == server}
            try:
                left = {other.outbox.folder: other.why for other in deliver_leftovers(root, _store(server, to))}
            except unavailable() as error:  # What waits for other servers can be delivered nevertheless.
                left = dict.fromkeys(own, f"MLflow ({server}) does not answer: {in_a_line(error)}")
            whole = whole and not left
            for folder, content in own.items():
                lines.append(f"{folder}: " + (f"waits, {left[folder]}" if folder in left else f"delivered {content}"))
    return lines or [f"Nothing waits for MLflow in {', '.join(map(str, outputs))}."], whole


def _store(server: str, to: str | None) -> Store:
    """With the password that ``to`` or the environment's address may have, which no file holds."""
    named = to or os.environ.get("MLFLOW_TRACKING_URI", "")
    uri = named if named and shown_server(named) == server else server
    use_server(uri, Path.cwd())
    return Store(uri)


def _redirect(outputs: list[Path], uri: str) -> list[str]:
    """Lets what waits in ``outputs`` belong to another server; a line for each spool that cannot."""
    server = shown_server(uri)
    lines = []
    for root in _roots(outputs):
        for outbox in outboxes(root):
            if outbox.head.server == server:
                continue
            journal = lock(outbox)
            if journal is None:
                lines.append(f"{outbox.folder}: waits, another process is at it")
                continue
            with journal:
                if outbox.offset:
                    lines.append(f"{outbox.folder}: waits, its beginning is in {outbox.head.server} already")
                else:
                    outbox.redirect(server, default_artifacts(uri, ARTIFACTS, Path.cwd()))
    return lines


def _roots(outputs: list[Path]) -> list[Path]:
    """The folders of spools."""
    return sorted({path for output in outputs for path in walked(output) if path.name == FOLDER})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m visual_grpo.tracking.deliver", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument("outputs", nargs="*", type=Path, help="folders of outputs; without any: data")
    parser.add_argument("--to", metavar="URI", help="another MLflow server or database than the runs had")
    return parser.parse_args()


def main() -> None:
    silence_libraries()
    given = _arguments()
    missing = [str(output) for output in given.outputs if not output.is_dir()]
    if missing:
        sys.exit(f"Error: there is no folder {', '.join(missing)}")
    outputs = given.outputs or [Path("data")]
    left = _redirect(outputs, given.to) if given.to else []
    lines, whole = deliver(outputs, given.to)
    print("\n".join([*left, *lines]))  # noqa: T201
    sys.exit(0 if whole and not left else 1)


if __name__ == "__main__":
    main()
