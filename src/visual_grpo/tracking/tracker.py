"""Logs a command's run to MLflow from a background thread: no call waits for MLflow, and no failure ends the command.

MLflow's own asynchronous logging cannot do this: its threads keep the process from ending while a request hangs, it
prints a traceback for each failed batch, and it does not say that one failed. What a failure leaves out is on disk, and
`sync` adds it.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, Self

from visual_grpo.tracking.client import SQLITE, connect, in_a_line, shown, tracking_uri
from visual_grpo.tracking.description import resumed_name
from visual_grpo.tracking.runs import (
    EVALUATION,
    OUTPUT,
    close_killed,
    find_run,
    is_active,
    log_metrics,
    log_pictures,
    make_run,
    output_tag,
    remove_tags,
    set_params,
    set_tags,
)
from visual_grpo.tracking.sync import sync_output

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from PIL.Image import Image

Scalar = str | int | float | bool | None
Item = Callable[["MlflowClient", str], Any] | list[Any]
"""A request about the run with this id, or metrics, of which many go into one request."""

WAIT, WAIT_FOR_TABLES = 10.0, 60.0
"""Most seconds that the start of a run waits for MLflow, and for a database that must be made first."""
EVERY = 5.0
"""Seconds between two requests: many steps in one cost little more than one."""
PAUSE = 60.0
"""Seconds after a failure in which nothing is sent."""
LAST_CHANCE = 60.0
"""Most seconds that the end of a run waits for what is still to be sent."""
_RUN_ID = "MLFLOW_RUN_ID"
"""By this variable MLflow's own functions, called by a reward for example, find the run."""


class Tracker:
    """Logs to one MLflow run, or to nothing."""

    _active: Tracker | None = None

    def __init__(self, sender: _Sender | None = None) -> None:
        self.run_id: str | None = None
        """The MLflow run's id; its key, if MLflow was away when the run began; None if MLflow is off."""
        self.run_name = ""
        """As MLflow shows it."""
        self.continues = False
        """Whether it goes on in an earlier run."""
        self.evaluates = False
        """Whether it evaluates, in a run that had ended before."""
        self._sender, self._run_id_before = sender, os.environ.get(_RUN_ID)

    @classmethod
    def active(cls) -> Tracker:
        """The tracker of the command that is running, or one that does nothing."""
        return Tracker._active or cls()

    @classmethod
    def start(cls, name: str, output: Path, say: Callable[[str], None], *, earlier: str | None = None) -> Self:
        """Begins to log to a run at the address in use, which is active until it ends.

        Args:
            output: the folder of outputs that the command writes to.
            say: shows a line to the user, from any thread.
            earlier: the run that it continues: its id, or the key that stands for it.
        """
        sender = _Sender(name, output, say, earlier)
        tracker, opened = cls(sender), sender.open()
        tracker.run_id = sender.key if opened is None else opened.info.run_id
        tracker.run_name = name if opened is None else opened.info.run_name
        tracker.continues = earlier is not None and (opened is None or sender.existed)
        if opened is not None:
            os.environ[_RUN_ID] = opened.info.run_id
        Tracker._active = tracker
        return tracker

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Logs ``values`` of a training's ``step`` (1 = the first). A step that is logged again changes nothing."""
        if self._sender is not None and values:
            from mlflow.entities import Metric

            at = int(time.time() * 1000)
            self._sender.put([Metric(name, float(value), at, step) for name, value in values.items()])

    def image(self, image: Image, key: str, step: int) -> None:
        """Logs an image under ``key``; MLflow shows the steps of one key as a series."""
        self._put(lambda client, run: log_pictures(client, run, {(key, step): lambda: image}))

    def tags(self, mapping: Mapping[str, Scalar]) -> None:
        """Sets tags; existing tags are replaced."""
        self._put(lambda client, run: set_tags(client, run, mapping))

    def params(self, mapping: Mapping[str, Any]) -> None:
        """Logs parameters. MLflow cannot overwrite one: another value of a resumed run is the tag ``resumed.NAME``."""
        self._put(lambda client, run: set_params(client, run, mapping))

    def name(self) -> str | None:
        """``NAME (the beginning of the id)``; None without a run."""
        return None if self.run_id is None else f"{self.run_name} ({self.run_id[:8]})"

    def goes_on_to(self, steps: int) -> None:
        """Gives the name of a resumed training its present number of steps; what else the name says stays."""
        self.run_name = resumed_name(self.run_name, steps)
        self._put(
            lambda client, run: client.update_run(run, name=resumed_name(client.get_run(run).info.run_name, steps))
        )

    def evaluation_begins(self, command: str) -> None:
        """Says that the run, which has ended before, is evaluated now; if that fails, the training is still good."""
        self.evaluates = True
        self._put(lambda client, run: remove_tags(client, run, {"evaluate.error", "evaluate.error.node"}))
        self.tags({"evaluate.command": command, EVALUATION: "running"})

    def finished(self) -> None:
        """Ends the run with status FINISHED, and adds what it lacks of the results on disk."""
        self._end("FINISHED")

    def killed(self) -> None:
        """Ends the run with status KILLED (stopped from outside). Raise KeyboardInterrupt afterwards."""
        self._end("KILLED")

    def failed(self) -> None:
        """Ends the run with status FAILED."""
        self._end("FAILED")

    def _put(self, request: Callable[[MlflowClient, str], Any]) -> None:
        if self._sender is not None:
            self._sender.put(request)

    def _end(self, status: Literal["KILLED", "FAILED", "FINISHED"]) -> None:
        sender, self._sender = self._sender, None
        if sender is None:
            return
        Tracker._active = None
        if self._run_id_before is None:
            os.environ.pop(_RUN_ID, None)
        else:
            os.environ[_RUN_ID] = self._run_id_before

        def end(client: MlflowClient, run: str) -> None:
            sync_output(client, sender.output, open_run=run)
            if self.evaluates:
                client.set_tag(run, EVALUATION, status.lower())
            client.set_terminated(run, "FINISHED" if self.evaluates else status)

        sender.close(end)


class _Sender:
    """Sends items in their order. After a failure it drops them for a while, and says so once."""

    def __init__(self, name: str, output: Path, say: Callable[[str], None], earlier: str | None) -> None:
        self.name, self.output, self._say = name, output, say
        self.key, self.existed = earlier or uuid.uuid4().hex, False
        self._client: MlflowClient | None = None
        self._opened: Run | None = None
        self._known_steps: dict[str, set[int]] | None = None
        self._items: SimpleQueue[Item] = SimpleQueue()
        self._answered, self._closing = threading.Event(), threading.Event()
        self._said = False
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def open(self) -> Run | None:
        """Finds or makes the run; None if MLflow does not answer in time, which is no error."""
        uri = tracking_uri()
        is_new = uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).is_file()
        patience = WAIT_FOR_TABLES if is_new else WAIT
        self._thread.start()
        if not self._answered.wait(patience):
            self._fails(f"no answer in {patience:g} s")
        return self._opened

    def put(self, item: Item) -> None:
        self._items.put(item)

    def close(self, last: Callable[[MlflowClient, str], Any]) -> None:
        """Sends what is left, and ``last`` even if that fails."""
        self._last = last
        self._closing.set()
        self._thread.join(LAST_CHANCE)
        if self._thread.is_alive():
            self._fails("no answer")

    def _work(self) -> None:
        works, again = self._send([]), time.monotonic() + PAUSE
        self._answered.set()
        while not self._closing.wait(EVERY):
            items = self._waiting()
            if items and (works or time.monotonic() >= again):
                works, again = self._send(items), time.monotonic() + PAUSE
        if works:
            self._send(self._waiting())
        self._send([self._last])

    def _waiting(self) -> list[Item]:
        items: list[Item] = []
        try:
            while True:
                items.append(self._items.get_nowait())
        except Empty:
            return items

    def _send(self, items: list[Item]) -> bool:
        """Returns whether MLflow took all."""
        try:
            client = self._client = self._client or connect()
            run = (self._opened or self._open(client)).info.run_id
            log_metrics(
                client, run, [one for item in items if isinstance(item, list) for one in item], self._known_steps
            )
            for item in items:
                if not isinstance(item, list):
                    item(client, run)
        except Exception as error:
            self._fails(in_a_line(error))
            return False
        return True

    def _open(self, client: MlflowClient) -> Run:
        found = find_run(client, self.key)
        if found is not None and is_active(found):
            self.existed, self._known_steps = True, {}
            client.update_run(found.info.run_id, status="RUNNING")  # Whatever ended it.
        else:
            found = make_run(client, self.key, self.name, int(time.time() * 1000))
        run_id = found.info.run_id
        client.set_tag(run_id, OUTPUT, output_tag(self.output))
        self._opened = found
        self._answered.set()
        close_killed(client, self.output, run_id)
        if not self.existed:
            sync_output(client, self.output, run_id)
        return found

    def _fails(self, why: str) -> None:
        self._answered.set()
        if not self._said:
            self._said = True
            self._say(
                f"MLflow ({shown()}) fails: {why.rstrip('.')}. The run goes on; what MLflow lacks"
                " of its results is on disk, and the next command or `make sync` adds it."
            )
