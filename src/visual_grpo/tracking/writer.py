"""The background thread that brings this process's spool into MLflow, through every outage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from visual_grpo.tracking.delivery import Delivery
from visual_grpo.tracking.leftovers import deliver_leftovers
from visual_grpo.tracking.outbox import Outbox
from visual_grpo.tracking.spool import Spool
from visual_grpo.tracking.store import Store, in_a_line, shown_server

COMMAND = ".venv/bin/python -m visual_grpo.tracking.deliver"
EVERY = 5.0
"""Seconds between two deliveries: many steps in one request cost little more than one."""
NOTICED = 5.0
"""Seconds after which a request that is not answered is told; with `EVERY`, an outage is noticed in 10."""
START = 10.0
"""Most seconds that the start of a run waits for its id."""
LAST_CHANCE, LAST_CHANCE_AWAY = 60.0, 5.0
"""Most seconds that the end of a run waits for a store that takes what waits, and for one that does not answer."""
_PAUSES = (1.0, 30.0)
"""Seconds between two attempts during an outage: the first, doubled each time, and the longest."""


@dataclass(frozen=True)
class Opened:
    """What MLflow said about the run."""

    run_id: str
    name: str
    existed: bool


class Writer:
    """Delivers until the end of the run is in MLflow, or until it is given up."""

    def __init__(self, spool: Spool, store: Store, say: Callable[[str], None]) -> None:
        """
        Args:
            say: shows a line to the user, from any thread.
        """
        self._spool, self._store, self._say = spool, store, say
        self._delivery = Delivery(Outbox(spool.folder), store, self._watched)
        self._thread = threading.Thread(target=self._run, name="mlflow writer", daemon=True)
        self._written, self._closing, self._done = threading.Event(), threading.Event(), threading.Event()
        self._answered, self._given_up = threading.Event(), threading.Event()
        self._opened: Opened | None = None
        self._away = False
        self._earlier_first = True
        self._patience = NOTICED

    def start(self, patience: float) -> Opened | None:
        """Opens the run; None if MLflow has not answered after ``patience`` seconds, which is no error."""
        self._patience = patience
        self._thread.start()
        self._answered.wait(patience)
        return self._opened

    def written(self) -> None:
        """Says that there is something to deliver."""
        self._written.set()

    def close(self) -> bool:
        """After the spool's last event: waits until all is in MLflow, at most `LAST_CHANCE` seconds.

        Returns whether it is. If not, it says who brings the rest.
        """
        self._closing.set()
        self._written.set()
        began = time.monotonic()
        while time.monotonic() - began < (LAST_CHANCE_AWAY if self._away else LAST_CHANCE) and not self._done.wait(0.1):
            pass
        self._given_up.set()
        self._thread.join(_PAUSES[0])  # Others may deliver the rest, unless a request hangs.
        if self._done.is_set():
            return True
        left = Outbox(self._spool.folder)
        output = left.folder.parent.parent
        self._say(
            f"Not yet in MLflow: {left}. They wait in {left.folder} and are delivered by the next run that writes into"
            f" {output}, or by: {COMMAND} {output}"
        )
        return False

    def _run(self) -> None:
        pause, longest = _PAUSES
        while not self._given_up.is_set():
            self._written.clear()
            try:
                if self._deliver():
                    self._done.set()
                    break
            except Exception as error:
                self._is_away(in_a_line(error))
                if self._closing.is_set():
                    self._given_up.wait(_PAUSES[0])
                else:
                    self._closing.wait(pause)
                pause = min(2 * pause, longest)
                continue
            pause = _PAUSES[0]
            self._written.wait(_PAUSES[0] if self._earlier_first else None)
            self._closing.wait(EVERY)
        self._spool.close()

    def _deliver(self) -> bool:
        """One round; returns whether everything up to the end of the run is in MLflow."""
        delivery = self._delivery
        if not delivery.run_id:
            self._open()
        if self._earlier_first:
            left = deliver_leftovers(self._spool.folder.parent, self._store, delivery)
            if any(other.run_id == delivery.run_id for other in left):
                return False
            self._earlier_first = False
        self._spool.flush()
        delivery.deliver()
        if delivery.ended:
            delivery.outbox.remove()
        return delivery.ended

    def _open(self) -> None:
        with self._watched():
            existed = self._delivery.open()
            self._store.reopen(self._delivery.run_id)
        self._opened = self._opened or Opened(self._delivery.run_id, self._delivery.name, existed)
        self._patience = NOTICED
        self._answered.set()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Notices a request that hangs, and one that succeeds after an outage."""
        timer = threading.Timer(self._patience, self._is_away, [f"no answer in {self._patience:g} s"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if self._away:
            self._away = False
            self._say("MLflow is back and gets what waited.")

    def _is_away(self, reason: str) -> None:
        if not self._away:
            self._away = True
            self._answered.set()
            self._say(
                f"MLflow ({shown_server(self._store.tracking_uri)}) is away: {reason}. The run goes on; what it logs"
                f" waits in {self._spool.folder}"
            )
