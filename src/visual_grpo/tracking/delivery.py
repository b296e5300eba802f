"""Brings one spool into MLflow, each of its events once, however often it is begun again.

An event may already be in MLflow: the process was killed, or the answer lost, before that could be noted. Sending it
again changes nothing, because metrics are rows that are told apart by everything they consist of, also by the time at
which they were logged, and everything else replaces what it was before. What cannot be told apart in this way are the
steps that a resumed training does again. So a run that is not new is asked which steps it has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.tracking.description import resumed_name
from visual_grpo.tracking.outbox import Event, Outbox, read_head
from visual_grpo.tracking.store import Store, image_of, is_missing, is_refusal

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

CURVES = "curves"
"""Event of metrics of which every step has one value: the first one stays."""
RESULTS = "results"
"""Event of metrics that may be logged again at the same step."""
_BATCH = 100
"""Maximum number of parameters or tags that MLflow accepts in one request."""
_METRICS = 1000
"""Of values, likewise."""
_STEPS = 100
"""Events of metrics that are noted as delivered together."""
_THUMBNAIL = 256

Item = tuple[int, Event]

log = logging.getLogger(__name__)


class Delivery:
    """One spool's way to its run."""

    def __init__(
        self, outbox: Outbox, store: Store, watched: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """
        Args:
            watched: is entered for every request that should be short.
        """
        self.outbox, self.store, self._watched = outbox, store, watched
        self.folder = outbox.folder
        self.run_id = self.name = ""
        """Empty until `open`."""
        self.ended = False
        """Whether the spool's last event, the end of its process's part of the run, has been delivered."""

    def open(self) -> bool:
        """Finds the run, or makes it and delivers to it from the beginning; returns whether it was there."""
        head = self.outbox.head = read_head(self.folder)  # It has the id as soon as there is one.
        run = self.store.find(head.run, head.experiment)
        existed = run is not None
        if run is None:
            run = self.store.make(head)
            self.outbox.delivered(0)
        self.run_id, self.name = run.info.run_id, run.info.run_name
        self._steps: dict[str, set[int]] | None = {} if existed else None
        self._images: dict[tuple[str, int], str] | None = None if existed else {}
        return existed

    def deliver(self, *, stays_open: bool = False) -> None:
        """Delivers everything that waits.

        Args:
            stays_open: whether another process is in this run, so that it may not be closed.

        Raises:
            Exception: whatever MLflow raises; what was delivered before it is noted.
        """
        from mlflow.exceptions import MlflowException

        try:
            for items in _together(self.outbox.waiting()):
                self._deliver(items, stays_open)
        except MlflowException as error:
            if is_missing(error):
                self.run_id = ""  # Deleted meanwhile: the next attempt makes it again.
            raise

    def _deliver(self, items: list[Item], stays_open: bool) -> None:
        from mlflow.exceptions import MlflowException

        events = [event for _, event in items]
        try:
            if events[0]["op"] in (CURVES, RESULTS):
                self._metrics(events)
            elif events[0]["op"] != "end" or not stays_open:
                with nullcontext() if "files" in events[0] else self._watched():
                    _APPLY[events[0]["op"]](self, events[0])
        except MlflowException as error:
            if not is_refusal(error):
                raise
            if len(items) > 1:
                for item in items:
                    self._deliver([item], stays_open)
                return
            log.warning("MLflow refuses what was logged as %s, which is left out: %s", _shown(events[0]), error)
        self.outbox.delivered(items[-1][0])
        for event in events:
            self.outbox.forget(event)
        self.ended = events[-1]["op"] == "end"

    def _metrics(self, events: list[Event]) -> None:
        entities = [metric for event in events for metric in self._new(event)]
        for start in range(0, len(entities), _METRICS):
            with self._watched():
                self._client.log_batch(self.run_id, metrics=entities[start : start + _METRICS])

    def _new(self, event: Event) -> Iterator[Metric]:
        from mlflow.entities import Metric

        for name, value in event["values"].items():
            if event["op"] == RESULTS or event["step"] not in self._known_steps(name):
                yield Metric(name, value, event["at"], event["step"])

    def _known_steps(self, metric: str) -> set[int]:
        """The steps that a curve had when this delivery began."""
        if self._steps is None:
            return set()
        if metric not in self._steps:
            self._steps[metric] = self.store.logged_steps(self.run_id, metric)
        return self._steps[metric]

    def _image(self, event: Event) -> None:
        folder = self._files(event)
        if folder is None:
            return
        [file] = (folder / "images").glob("*.png")
        series, step, distinct = image_of(file.name)
        if self._images is None:
            self._images = self.store.logged_images(self.run_id)
        if self._images.get((series, step), distinct) != distinct:
            return  # The training was resumed and did the step again.
        _write_thumbnail(file)
        self._client.log_artifacts(self.run_id, str(folder))
        self._client.set_tag(self.run_id, "mlflow.loggedImages", True)

    def _artifacts(self, event: Event) -> None:
        if (folder := self._files(event)) is not None:
            self._client.log_artifacts(self.run_id, str(folder), event["to"] or None)

    def _model(self, event: Event) -> None:
        from mlflow.entities import LoggedModelOutput

        folder = self._files(event)
        if folder is None:
            return
        experiment = self._client.get_run(self.run_id).info.experiment_id
        mark = {"spool": f"{self.outbox.folder.name}/{event['files']}"}
        begun = self._client.search_logged_models([experiment], f"source_run_id = '{self.run_id}'")
        model = next((model for model in begun if mark.items() <= model.tags.items()), None)
        if model is None:
            model = self._client.create_logged_model(
                experiment,
                name=event["name"],
                source_run_id=self.run_id,
                tags=mark,
                params=event["params"],
                model_type="adapter",
            )
        self._client.log_model_artifacts(model.model_id, str(folder))
        self._client.finalize_logged_model(model.model_id, "READY")
        linked = self._client.get_run(self.run_id).outputs
        if linked is None or model.model_id not in {output.model_id for output in linked.model_outputs}:
            self._client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step=0)])

    def _tags(self, event: Event) -> None:
        from mlflow.entities import RunTag

        for batch in _batches([RunTag(name, value) for name, value in event["tags"].items()]):
            self._client.log_batch(self.run_id, tags=batch)

    def _untag(self, event: Event) -> None:
        for name in sorted(self._client.get_run(self.run_id).data.tags.keys() & set(event["names"])):
            self._client.delete_tag(self.run_id, name)

    def _params(self, event: Event) -> None:
        """A parameter can be logged once: another value of a resumed run becomes the tag ``resumed.NAME``."""
        from mlflow.entities import Param, RunTag

        before = self._client.get_run(self.run_id).data.params
        params = [Param(name, value) for name, value in event["params"].items() if name not in before]
        tags = [RunTag(f"resumed.{n}", v) for n, v in event["params"].items() if before.get(n, v) != v]
        for batch in _batches(params):
            self._client.log_batch(self.run_id, params=batch)
        for batch in _batches(tags):
            self._client.log_batch(self.run_id, tags=batch)

    def _rename(self, event: Event) -> None:
        self._client.update_run(self.run_id, name=event["name"])

    def _extend(self, event: Event) -> None:
        """Gives the run's name, which only MLflow knows, the number of steps that a resumed training goes on to."""
        name = self._client.get_run(self.run_id).info.run_name or ""
        self._client.update_run(self.run_id, name=resumed_name(name, event["steps"]))

    def _dataset(self, event: Event) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        entity = Dataset(name=event["name"], digest=event["digest"], source_type="local", source=event["source"])
        context = InputTag(key="mlflow.data.context", value="training")
        self._client.log_inputs(self.run_id, datasets=[DatasetInput(entity, tags=[context])])

    def _end(self, event: Event) -> None:
        self._client.set_terminated(self.run_id, event["status"], event["at"])

    def _files(self, event: Event) -> Path | None:
        """None where they are in MLflow already: only the note of that was lost."""
        folder = self.outbox.folder / event["files"]
        return folder if folder.is_dir() else None

    @property
    def _client(self) -> MlflowClient:
        return self.store.client


_APPLY = {
    "image": Delivery._image,
    "artifacts": Delivery._artifacts,
    "model": Delivery._model,
    "tags": Delivery._tags,
    "untag": Delivery._untag,
    "params": Delivery._params,
    "name": Delivery._rename,
    "extend": Delivery._extend,
    "dataset": Delivery._dataset,
    "end": Delivery._end,
}


def _together(items: Iterator[Item]) -> Iterator[list[Item]]:
    """What one request may bring: metrics of many steps, but one event of any other kind."""
    for are_metrics, group in groupby(items, lambda item: item[1]["op"] in (CURVES, RESULTS)):
        while part := list(islice(group, _STEPS if are_metrics else 1)):
            yield part


def _write_thumbnail(file: Path) -> None:
    """What MLflow's interface shows first."""
    from PIL import Image

    with Image.open(file) as image:
        small = image.copy()
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    small.save(file.with_name(f"{file.stem}+compressed.webp"))


def _batches(entities: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(entities), _BATCH):
        yield entities[start : start + _BATCH]


def _shown(event: Event) -> str:
    names = event.get("values") or event.get("tags") or event.get("params") or event.get("to") or event.get("name")
    return f"{event['op']} {', '.join(names) if isinstance(names, dict) else names or ''}".strip()
