"""Live logging to the MLflow run that ``kedro run`` started.

MLflow is imported inside the functions: importing takes seconds, and a run without tracking does not need it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from PIL.Image import Image

Scalar = str | int | float | bool | None
Item = TypeVar("Item")

_BATCH = 100
"""Maximum number of parameters or tags that MLflow accepts in one request."""
_LONGEST_TAG = 5000
_LONGEST_PARAM = 6000
_LONGEST_DIGEST = 36
EVALUATION = "evaluate.status"
"""Tag of the evaluation of a run that had ended: running, finished, failed or killed."""


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """Writes to one MLflow run, or to nothing when ``run_id`` is None.

    Every call writes before it returns, so that the run can be watched live and nothing is lost if the process is
    killed.
    """

    run_id: str | None = None
    """The MLflow run; None if MLflow is off."""
    tracking_uri: str | None = None

    @classmethod
    def active(cls) -> Self:
        """A tracker of the active MLflow run, or one that does nothing if no run is active."""
        if "mlflow" not in sys.modules:
            return cls()
        import mlflow

        run = mlflow.active_run()
        if run is None:
            return cls()
        return cls(run_id=run.info.run_id, tracking_uri=mlflow.get_tracking_uri())

    @classmethod
    def of(cls, run_id: str | None) -> Self:
        """A tracker of the run with this id in the current store; it does nothing if that is None."""
        import mlflow

        return cls(run_id=run_id, tracking_uri=mlflow.get_tracking_uri())

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Logs all ``values`` at ``step`` (1 = the first) in one write."""
        if self.run_id is None or not values:
            return
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entities = [Metric(name, float(value), now, step) for name, value in values.items()]
        self._client().log_batch(self.run_id, metrics=entities)

    def image(self, image: Image, key: str, step: int) -> None:
        """Logs an image under ``key``; MLflow shows the steps of one key as a series."""
        if self.run_id is not None:
            self._client().log_image(self.run_id, image, key=key, step=step, synchronous=True)

    def file(self, path: Path, artifact_path: str = "") -> None:
        """Copies one file to the run's artifacts, into the folder ``artifact_path``."""
        if self.run_id is not None:
            self._client().log_artifact(self.run_id, str(path), artifact_path or None)

    def folder(self, path: Path, artifact_path: str) -> None:
        """Copies the contents of ``path`` to the folder ``artifact_path`` of the run's artifacts."""
        if self.run_id is not None:
            self._client().log_artifacts(self.run_id, str(path), artifact_path)

    def text(self, text: str, file: str) -> None:
        """Logs ``text`` as the artifact ``file``; an earlier one is replaced."""
        if self.run_id is not None:
            self._client().log_text(self.run_id, text, file)

    def table(self, rows: Sequence[Mapping[str, Any]], file: str) -> None:
        """Logs rows of equal keys as the JSON artifact ``file``, which MLflow shows as a table; replaces an earlier."""
        if self.run_id is None or not rows:
            return
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self._client().log_dict(self.run_id, table, file)

    def model(self, folder: Path, name: str, params: Mapping[str, str]) -> None:
        """Logs ``folder`` as a model that this run made; MLflow lists it under Models, with the run's metrics."""
        if self.run_id is None:
            return
        from mlflow.entities import LoggedModelOutput

        client = self._client()
        experiment = client.get_run(self.run_id).info.experiment_id
        model = client.create_logged_model(
            experiment, name=name, source_run_id=self.run_id, params=dict(params), model_type="adapter"
        )
        client.log_model_artifacts(model.model_id, str(folder))
        client.finalize_logged_model(model.model_id, "READY")
        client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step=0)])

    def tags(self, mapping: Mapping[str, Scalar]) -> None:
        """Sets tags; existing tags are replaced."""
        if self.run_id is None:
            return
        from mlflow.entities import RunTag

        for batch in _batches(mapping.items(), _BATCH):
            entities = [RunTag(name, str(value)[:_LONGEST_TAG]) for name, value in batch]
            self._client().log_batch(self.run_id, tags=entities)

    def name(self) -> str | None:
        """``NAME (the beginning of the id)``; None without a run."""
        if self.run_id is None:
            return None
        return f"{self._client().get_run(self.run_id).info.run_name} ({self.run_id[:8]})"

    def all_tags(self) -> dict[str, str]:
        """The run's tags; none without a run."""
        return {} if self.run_id is None else dict(self._client().get_run(self.run_id).data.tags)

    def remove_tags(self, names: Iterable[str]) -> None:
        """Removes those of the tags that the run has."""
        if self.run_id is not None:
            for name in sorted(self.all_tags().keys() & set(names)):
                self._client().delete_tag(self.run_id, name)

    def params(self, mapping: Mapping[str, Any]) -> None:
        """Logs parameters.

        MLflow cannot overwrite a parameter: if a resumed run has a different value, it is logged as the tag
        ``resumed.<name>``.
        """
        if self.run_id is None:
            return
        from mlflow.entities import Param

        before = self._client().get_run(self.run_id).data.params
        values = {name: str(value)[:_LONGEST_PARAM] for name, value in mapping.items()}
        for batch in _batches(((n, v) for n, v in values.items() if n not in before), _BATCH):
            self._client().log_batch(self.run_id, params=[Param(name, value) for name, value in batch])
        self.tags({f"resumed.{n}": v for n, v in values.items() if before.get(n, v) != v})

    def dataset(self, name: str, digest: str, source: str) -> None:
        """Records that the run read the dataset ``name`` from ``source`` (a path or URL).

        MLflow keeps the first 36 characters of ``digest``.
        """
        if self.run_id is None:
            return
        from mlflow.entities import Dataset, DatasetInput, InputTag

        where = json.dumps({"uri": source})
        entity = Dataset(name=name, digest=digest[:_LONGEST_DIGEST], source_type="local", source=where)
        context = InputTag(key="mlflow.data.context", value="training")
        self._client().log_inputs(self.run_id, datasets=[DatasetInput(entity, tags=[context])])

    def evaluation_begins(self, command: str) -> None:
        """Says that the run, which has ended before, is evaluated now; if that fails, the training is still good."""
        self.remove_tags({"evaluate.error", "evaluate.error.node"})
        self.tags({"evaluate.command": command, EVALUATION: "running"})

    def evaluation_ends(self) -> None:
        """The evaluation succeeded."""
        self.tags({EVALUATION: "finished"})

    @property
    def evaluates(self) -> bool:
        """Whether the run's evaluation is going on, in a run that had ended before."""
        return self.all_tags().get(EVALUATION) == "running"

    def killed(self) -> None:
        """Ends the run with status KILLED (stopped from outside). Raise KeyboardInterrupt afterwards."""
        self._end("KILLED")

    def failed(self) -> None:
        """Ends the run with status FAILED."""
        self._end("FAILED")

    def _end(self, status: Literal["KILLED", "FAILED", "FINISHED"]) -> None:
        if self.run_id is None:
            return
        import mlflow

        if self.evaluates:
            self.tags({EVALUATION: status.lower()})
            status = "FINISHED"
        while (active := mlflow.active_run()) is not None and active.info.run_id == self.run_id:
            mlflow.end_run(status)
        self._client().set_terminated(self.run_id, status)

    def _client(self) -> MlflowClient:
        from mlflow import MlflowClient

        return MlflowClient(self.tracking_uri)


def run_exists(run_id: str, tracking_uri: str) -> bool:
    """Whether the store has a run ``run_id`` that is not deleted."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        return bool(MlflowClient(tracking_uri).get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException:
        return False


def _batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
