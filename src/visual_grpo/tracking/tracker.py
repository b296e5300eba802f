"""What the code logs to MLflow, at the cost of a line in a file: a background thread brings it there.

MLflow is imported inside the functions: importing takes seconds, and a run without tracking does not need it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from visual_grpo.tracking import writer as background
from visual_grpo.tracking.delivery import CURVES, RESULTS
from visual_grpo.tracking.description import ended_name, resumed_name
from visual_grpo.tracking.outbox import Outbox
from visual_grpo.tracking.spool import FOLDER, Head, Spool
from visual_grpo.tracking.store import EVALUATION, Store, image_name, is_new, shown_server
from visual_grpo.tracking.writer import Writer

if TYPE_CHECKING:
    from PIL.Image import Image

Scalar = str | int | float | bool | None

MOST_IMAGE_BYTES = 2 * 2**30
"""Of images that wait for MLflow. Other files are links to the run's own outputs and take no space."""
_NEW_DATABASE_SECONDS = 60.0
"""For making MLflow's tables."""
_LONGEST_TAG = 5000
_LONGEST_PARAM = 6000
_LONGEST_DIGEST = 36
_RUN_ID = "MLFLOW_RUN_ID"
"""By this variable MLflow's own functions, called by a reward for example, find the run."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunToLog:
    """The MLflow run of a command."""

    name: str
    earlier: str | None
    """The run that it continues: its id, or the key that stands for it."""
    experiment: str
    artifacts: str | None
    """Where a new experiment keeps its artifacts; None = the server's default."""
    tracking_uri: str
    output: Path
    """The folder of outputs; the spool is in it until everything is delivered."""
    trains: bool = False
    """Whether it trains an adapter, so that its name says so if it ends before the first step."""


class Tracker:
    """Logs to one MLflow run, or to nothing.

    Whatever is wrong with MLflow, no call raises, and none waits for it but `start` and the end, each for seconds.
    """

    _active: Tracker | None = None

    def __init__(self, spool: Spool | None = None, writer: Writer | None = None, *, run_id: str | None = None) -> None:
        self._spool, self._writer = spool, writer
        self.run_id = run_id
        """The MLflow run's id; its key, if MLflow was away when the run began; None if MLflow is off."""
        self.continues = False
        """Whether it goes on in an earlier run."""
        self.evaluates = False
        """Whether it evaluates, in a run that had ended before."""
        self.run_name = ""
        """As MLflow shows it."""
        self._untrained = False
        """Whether it trains, and no step is done yet."""
        self._images_left_out = False
        self._run_id_before = os.environ.get(_RUN_ID)

    @classmethod
    def active(cls) -> Tracker:
        """The tracker of the command that is running, or one that does nothing."""
        return Tracker._active or cls()

    @classmethod
    def start(cls, run: RunToLog, say: Callable[[str], None]) -> Self:
        """Begins to log to a run, which is active until it ends.

        Args:
            say: shows a line to the user, from any thread.
        """
        key = run.earlier or uuid.uuid4().hex
        head = Head(
            run=key,
            name=run.name,
            experiment=run.experiment,
            artifacts=run.artifacts,
            server=shown_server(run.tracking_uri),
            began=int(time.time() * 1000),
        )
        try:
            spool = Spool(run.output / FOLDER, head)
        except OSError as error:
            log.warning("MLflow will lack this run, because nothing can be written to %s: %s", run.output, error)
            return cls()
        writer = Writer(spool, Store(run.tracking_uri), say)
        tracker = cls(spool, writer, run_id=key)
        opened = writer.start(_patience(run.tracking_uri))
        tracker.run_name = opened.name if opened else run.name
        tracker.continues = run.earlier is not None and (opened is None or opened.existed)
        tracker._untrained = run.trains and not tracker.continues
        if opened is not None:
            tracker.run_id = os.environ[_RUN_ID] = opened.run_id
            spool.belongs_to(opened.run_id)
        Tracker._active = tracker
        return tracker

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Logs ``values`` of a training's ``step`` (1 = the first). A step that is logged again changes nothing."""
        self._untrained = False
        self._write_metrics(CURVES, values, step)

    def results(self, values: Mapping[str, float], step: int) -> None:
        """Logs ``values`` measured after ``step``; those of a later measurement replace them."""
        self._write_metrics(RESULTS, values, step)

    def image(self, image: Image, key: str, step: int) -> None:
        """Logs an image under ``key``; MLflow shows the steps of one key as a series."""
        if self._spool is None or self._images_fill_the_disk():
            return
        png = io.BytesIO()
        image.save(png, "PNG")
        name = image_name(key, step, int(time.time() * 1000), uuid.uuid4().hex)
        self._write_files("image", self._spool.attach_bytes(png.getvalue(), name))

    def folder(self, path: Path, artifact_path: str) -> None:
        """Logs the contents of ``path`` as artifacts, in the folder ``artifact_path``."""
        if self._spool is not None:
            self._write_files("artifacts", self._spool.attach(path), to=artifact_path)

    def text(self, text: str, file: str) -> None:
        """Logs ``text`` as the artifact ``file``; an earlier one is replaced."""
        if self._spool is not None:
            self._write_files("artifacts", self._spool.attach_bytes(text.encode(), file), to="")

    def table(self, rows: Sequence[Mapping[str, Any]], file: str) -> None:
        """Logs rows of equal keys as the JSON artifact ``file``, which MLflow shows as a table; replaces an earlier."""
        if rows:
            table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
            self.text(json.dumps(table, indent=2), file)

    def model(self, folder: Path, name: str, params: Mapping[str, str]) -> None:
        """Logs ``folder`` as a model that this run made; MLflow lists it under Models, with the run's metrics."""
        if self._spool is not None:
            self._write_files("model", self._spool.attach(folder), name=name, params=dict(params))

    def tags(self, mapping: Mapping[str, Scalar]) -> None:
        """Sets tags; existing tags are replaced."""
        if mapping:
            self._write("tags", tags={name: str(value)[:_LONGEST_TAG] for name, value in mapping.items()})

    def remove_tags(self, names: Iterable[str]) -> None:
        """Removes those of the tags that the run has."""
        self._write("untag", names=sorted(names))

    def params(self, mapping: Mapping[str, Any]) -> None:
        """Logs parameters.

        MLflow cannot overwrite a parameter: if a resumed run has a different value, it is logged as the tag
        ``resumed.<name>``.
        """
        self._write("params", params={name: str(value)[:_LONGEST_PARAM] for name, value in mapping.items()})

    def dataset(self, name: str, digest: str, source: str) -> None:
        """Records that the run read the dataset ``name`` from ``source`` (a path or URL).

        MLflow keeps the first 36 characters of ``digest``.
        """
        self._write("dataset", name=name, digest=digest[:_LONGEST_DIGEST], source=json.dumps({"uri": source}))

    def name(self) -> str | None:
        """``NAME (the beginning of the id)``; None without a run."""
        return None if self.run_id is None else f"{self.run_name} ({self.run_id[:8]})"

    def rename(self, name: str) -> None:
        """Changes the run's name."""
        if name != self.run_name:
            self.run_name = name
            self._write("name", name=name)

    def goes_on_to(self, steps: int) -> None:
        """Gives the name of a resumed training its present number of steps; what else the name says stays."""
        self.run_name = resumed_name(self.run_name, steps)
        self._write("extend", steps=steps)

    def evaluation_begins(self, command: str) -> None:
        """Says that the run, which has ended before, is evaluated now; if that fails, the training is still good."""
        self.evaluates = True
        self.remove_tags({"evaluate.error", "evaluate.error.node"})
        self.tags({"evaluate.command": command, EVALUATION: "running"})

    def finished(self) -> None:
        """Ends the run with status FINISHED."""
        self._end("FINISHED")

    def killed(self) -> None:
        """Ends the run with status KILLED (stopped from outside). Raise KeyboardInterrupt afterwards."""
        self._end("KILLED")

    def failed(self) -> None:
        """Ends the run with status FAILED."""
        self._end("FAILED")

    def _end(self, status: Literal["KILLED", "FAILED", "FINISHED"]) -> None:
        if self._spool is None or self._writer is None:
            return
        if self.evaluates:
            self.tags({EVALUATION: status.lower()})
            status = "FINISHED"
        if self._untrained and status != "FINISHED":
            self.rename(ended_name(self.run_name, "stopped" if status == "KILLED" else "failed"))
        self._write("end", status=status)
        self._spool = None
        Tracker._active = None
        if self._run_id_before is None:
            os.environ.pop(_RUN_ID, None)
        else:
            os.environ[_RUN_ID] = self._run_id_before
        self._writer.close()

    def _write_metrics(self, op: str, values: Mapping[str, float], step: int) -> None:
        if values:
            self._write(op, values={name: float(value) for name, value in values.items()}, step=step)

    def _write_files(self, op: str, place: str | None, **arguments: Any) -> None:
        if place is not None:
            self._write(op, files=place, **arguments)

    def _write(self, op: str, **arguments: Any) -> None:
        if self._spool is not None and self._writer is not None:
            self._spool.append(op, **arguments)
            self._writer.written()

    def _images_fill_the_disk(self) -> bool:
        assert self._spool is not None
        full = Outbox(self._spool.folder).image_bytes() > MOST_IMAGE_BYTES
        if full and not self._images_left_out:
            self._images_left_out = True
            log.warning("Images that wait for MLflow fill %s: further ones are left out.", self._spool.folder)
        return full


def _patience(tracking_uri: str) -> float:
    """Seconds in which MLflow should answer a new run."""
    return _NEW_DATABASE_SECONDS if is_new(tracking_uri) else background.START
