"""The registered model that the parameters name, with its champion and the gates before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from visual_grpo.config import Parameters
from visual_grpo.tracking import gates, registry, registry_client
from visual_grpo.tracking.registry_client import Server
from visual_grpo.tracking.runs import find_run
from visual_grpo.tracking.sync import experiment_name
from visual_grpo.tracking.versions import Registered

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True)
class Champions:
    """A registered model and the alias of its champion; every call may raise UserError where MLflow does not answer."""

    tracking_uri: str
    name: str
    alias: str
    base_copy_mb: float

    @classmethod
    def of(cls, config: Parameters, tracking_uri: str | None = None) -> Champions:
        """Those of the parameters, at the address that is in use."""
        uri, settings = tracking_uri or registry_client.tracking_uri(), config.promotion
        return cls(uri, config.registered_model, settings.alias, settings.base_copy_mb)

    def champion(self) -> Registered | None:
        """None before the first promotion."""
        return registry.champion(self.tracking_uri, self.name, self.alias)

    def register(self, adapters: Path, result: Sequence[str], tags: Mapping[str, str]) -> int:
        """The version of these weights, which is made if there is none."""
        made = registry.register(
            self.tracking_uri, self.name, adapters, result=result, tags=tags, base_copy_mb=self.base_copy_mb
        )
        return made.version

    def promote(self, version: int) -> None:
        """Moves the alias."""
        registry.promote(self.tracking_uri, self.name, version, self.alias)

    def rollback(self) -> tuple[int, int]:
        """Moves the alias back; the version before and after."""
        return registry.rollback(self.tracking_uri, self.name, self.alias)

    def rolled_back(self, digest: str) -> tuple[int, str] | None:
        """The version of these weights and when its promotion was undone; None if it was not."""
        return registry.rolled_back(self.tracking_uri, self.name, digest)

    def keep_report(self, run_id: str | None, folder: Path) -> None:
        """Puts the gate's page and numbers among the artifacts of the candidate's run, if it has one."""
        files = [file for file in (folder / "evaluation.html", folder / "evaluation.json") if file.is_file()]
        if run_id is None or not files:
            return
        server = Server.registry(self.tracking_uri)
        run = server.ask(lambda client: find_run(client, run_id, experiment_name()))
        if run is not None:
            for file in files:
                server.transfer(partial(_log, run_id=run.info.run_id, file=file))

    def note_gate(self, digest: str, settings: str, *, promoted: bool) -> None:
        """Notes what the gate decided on the adapter with this digest, with these settings."""
        gates.note_gate(self.tracking_uri, self.name, digest, settings, promoted=promoted)

    def is_judged(self, digest: str, settings: str = "") -> bool:
        """Whether the gate has decided on it; with these settings, where they are given."""
        return gates.is_judged(self.tracking_uri, self.name, digest, settings)

    def gates_of_a_year(self, *, but: tuple[str, str]) -> int:
        """How many gates there were within the last 365 days, beside that of this digest and settings."""
        return gates.gates_of_a_year(self.tracking_uri, self.name, but=but)


def _log(client: MlflowClient, *, run_id: str, file: Path) -> None:
    client.log_artifact(run_id, str(file), "promotion")
