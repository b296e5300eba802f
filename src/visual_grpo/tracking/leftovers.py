"""Spools of processes that were killed, or that ended while MLflow was away."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from visual_grpo.tracking.delivery import Delivery
from visual_grpo.tracking.outbox import Outbox, lock, outboxes
from visual_grpo.tracking.store import Store, shown_server


def deliver_leftovers(root: Path, store: Store, own: Delivery | None = None) -> list[Outbox]:
    """Delivers what processes that have ended left in ``root`` for this store, oldest first, and closes their runs.

    Args:
        own: of this process. Its run is not closed.

    Returns:
        Spools that are not delivered, because another process is at them or is in their run. Of `own`'s run they must
        be delivered before it, or steps would be missing.

    Raises:
        Exception: whatever MLflow raises; what was delivered before it is noted.
    """
    here = shown_server(store.tracking_uri)
    others = [box for box in outboxes(root) if box.head.server == here and (own is None or box.folder != own.folder)]
    with ExitStack() as locks:
        free, held = [], []
        for outbox in others:
            journal = lock(outbox)
            if journal is None:
                held.append(outbox)
            else:
                locks.enter_context(journal)
                free.append(outbox)
        busy = {_run_of(outbox, store) for outbox in held}
        for outbox in free:
            delivery = Delivery(outbox, store)
            delivery.open()
            if delivery.run_id in busy:
                held.append(outbox)
            else:
                _deliver(delivery, stays_open=own is not None and delivery.run_id == own.run_id)
    return held


def of_run(outboxes: list[Outbox], run_id: str, store: Store) -> bool:
    """Whether any of the spools is of this run."""
    return any(_run_of(outbox, store) == run_id for outbox in outboxes)


def _deliver(delivery: Delivery, stays_open: bool) -> None:
    outbox = delivery.outbox
    delivery.deliver(stays_open=stays_open)
    if not delivery.ended and not stays_open:
        delivery.store.close_killed(delivery.run_id, outbox.last_time())
    outbox.remove()


def _run_of(outbox: Outbox, store: Store) -> str | None:
    run = store.find(outbox.head.run, outbox.head.experiment)
    return None if run is None else run.info.run_id
