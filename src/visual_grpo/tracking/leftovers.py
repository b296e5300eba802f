"""Spools of processes that were killed, or that ended while MLflow was away."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from visual_grpo.tracking.delivery import Delivery
from visual_grpo.tracking.outbox import Outbox, lock, outboxes
from visual_grpo.tracking.store import Store, in_a_line, shown_server


@dataclass(frozen=True)
class Left:
    """A spool that still waits."""

    outbox: Outbox
    run_id: str | None
    why: str


def deliver_leftovers(root: Path, store: Store, own: Delivery | None = None) -> list[Left]:
    """Delivers what processes that have ended left in ``root`` for this store, oldest first, and closes their runs.

    Args:
        own: of this process. Its run is not closed.

    Returns:
        What could not be delivered. If it is of `own`'s run, `own` must wait for it, or steps would be missing.

    Raises:
        Exception: MLflow does not answer.
    """
    here = shown_server(store.tracking_uri)
    # A head that was written in another working folder names the same database by another path.
    same = [box for box in outboxes(root) if shown_server(box.head.server) == here]
    others = [box for box in same if own is None or box.folder != own.folder]
    with ExitStack() as locks:
        free, left = [], []
        for outbox in others:
            journal = lock(outbox)
            if journal is None:
                left.append(Left(outbox, _run_of(outbox, store), "another process is at it"))
            else:
                locks.enter_context(journal)
                free.append(outbox)
        busy = {other.run_id for other in left}
        for outbox in free:
            delivery = Delivery(outbox, store)
            delivery.open()
            if delivery.run_id in busy:
                left.append(Left(outbox, delivery.run_id, "another process is in its run and delivers it"))
                continue
            try:
                _deliver(delivery, stays_open=own is not None and delivery.run_id == own.run_id)
            except Exception as error:  # Others may be delivered nevertheless: an artifact may be unreadable.
                left.append(Left(outbox, delivery.run_id, in_a_line(error)))
                busy.add(delivery.run_id)
    return left


def _deliver(delivery: Delivery, stays_open: bool) -> None:
    outbox = delivery.outbox
    delivery.deliver(stays_open=stays_open)
    if not delivery.ended and not stays_open:
        delivery.store.close_killed(delivery.run_id, outbox.last_time())
    outbox.remove()


def _run_of(outbox: Outbox, store: Store) -> str | None:
    run = store.find(outbox.head.run, outbox.head.experiment)
    return None if run is None else str(run.info.run_id)
