"""``python -m visual_grpo.tracking.deliver [OUTPUT ...]``: brings into MLflow what runs had to leave on disk.

Without a folder of outputs it looks in ``data``. Exits with 1 if something still waits.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from visual_grpo.third_party_output import silence_libraries
from visual_grpo.tracking.leftovers import deliver_leftovers
from visual_grpo.tracking.outbox import outboxes
from visual_grpo.tracking.relocation import use_server
from visual_grpo.tracking.spool import FOLDER
from visual_grpo.tracking.store import Store, in_a_line, is_unavailable, shown_server


def deliver(outputs: list[Path]) -> tuple[list[str], bool]:
    """Delivers everything that waits in ``outputs``, each spool to its own server.

    Returns:
        Lines that say what became of each, and whether all of it is in MLflow now.
    """
    lines, whole = [], True
    for root in sorted({root for output in outputs for root in output.rglob(FOLDER)}):
        waiting = outboxes(root)
        for server in sorted({outbox.head.server for outbox in waiting}):
            own = {outbox.folder: str(outbox) for outbox in waiting if outbox.head.server == server}
            try:
                left = {other.outbox.folder: other.why for other in deliver_leftovers(root, _store(server))}
            except Exception as error:  # What waits for other servers can be delivered nevertheless.
                problem = f"MLflow ({server}) does not answer" if is_unavailable(error) else "it cannot be delivered"
                left = dict.fromkeys(own, f"{problem}: {in_a_line(error)}")
            whole = whole and not left
            for folder, content in own.items():
                lines.append(f"{folder}: " + (f"waits, {left[folder]}" if folder in left else f"delivered {content}"))
    return lines or [f"Nothing waits for MLflow in {', '.join(map(str, outputs))}."], whole


def _store(server: str) -> Store:
    """With the password that the environment's address may have, which no file holds."""
    named = os.environ.get("MLFLOW_TRACKING_URI", "")
    uri = named if named and shown_server(named) == server else server
    use_server(uri, Path.cwd())
    return Store(uri)


def main() -> None:
    silence_libraries()
    lines, whole = deliver([Path(name) for name in sys.argv[1:]] or [Path("data")])
    print("\n".join(lines))  # noqa: T201
    sys.exit(0 if whole else 1)


if __name__ == "__main__":
    main()
