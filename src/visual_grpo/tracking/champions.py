"""The registered model that the parameters name, with its champion and the gates before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from visual_grpo.config import Parameters
from visual_grpo.tracking import gates, registry
from visual_grpo.tracking.versions import Registered


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
        import mlflow

        settings = config.promotion
        return cls(
            tracking_uri or mlflow.get_tracking_uri(), config.registered_model, settings.alias, settings.base_copy_mb
        )

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

    def note_gate(self, digest: str, *, promoted: bool) -> None:
        """Notes what the gate decided on the adapter with this digest."""
        gates.note_gate(self.tracking_uri, self.name, digest, promoted=promoted)

    def is_judged(self, digest: str) -> bool:
        """Whether the gate has decided on it."""
        return gates.is_judged(self.tracking_uri, self.name, digest)

    def gates_of_a_year(self, *, but: str) -> int:
        """How many other adapters asked within the last 365 days."""
        return gates.gates_of_a_year(self.tracking_uri, self.name, but=but)
