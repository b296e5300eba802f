"""MLflow's registry: adapters become versions of a registered model, and an alias points to the champion.

Each call may be repeated after a crash: files are uploaded before a version names them, and the alias moves last.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from visual_grpo.adapter_folder import adapter_digest, check_weights, modules_of, read_facts, weights_digest
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import require_no_links
from visual_grpo.config import EvaluationConfig, PromotionConfig
from visual_grpo.config.pipelines import CHAMPION
from visual_grpo.tracking import mlflow_api
from visual_grpo.tracking.adapter_lookup import SCHEME, WEIGHTS, Registered, find_version, own_run, versions_with
from visual_grpo.tracking.model_card import model_card
from visual_grpo.tracking.sync import DIGEST

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel

PROMOTED, ROLLED_BACK = "promoted.", "rolled_back."
"""Prefixes of a registered model's tags: ``promoted.ALIAS`` -> the numbers of the versions that a promotion brought,
each once, the latest promotion last; ``rolled_back.ALIAS.DIGEST`` of weights -> version and date."""
_MOST_PROMOTED = 100
_OVER, _UNDONE, _NOTHING = "promotion.over", "promotion.rolled_back", "none"
"""Tags of a version that earlier versions of this project wrote: the version that it replaced, or `_NOTHING`; the date
of its rollback."""
RETRAINED = "retrained.for"
"""Tag of a run that a retraining made: the registered model."""
GATE = "gate."
"""Prefix of a registered model's tags for the gate: ``gate.DIGEST.SETTINGS`` -> date, `UNDATED` or `REFUSED`."""
UNDATED, REFUSED = "when the clock was wrong", "refused before any sample"
_NEVER = datetime.min.replace(tzinfo=UTC)
NOT_PROMOTED = 3
"""Exit code of a gate that did not promote its candidate."""
_TOLERANCE = timedelta(hours=1)
"""Largest difference of the clocks of several machines."""
FROM_FACTS = {
    "dataset.digest": "data",
    "base.model": "model",
    "base.digest": "model_digest",
    "base.content": "model_content",
    "command": "command",
}
"""Tag of a version -> the fact of the training that it repeats."""


def gate_settings(promotion: PromotionConfig, evaluation: EvaluationConfig) -> str:
    """Returns a digest (64 hex digits) of the parameters that decide a gate, and of an alias that is not the usual."""
    usual = {"alias"} if promotion.alias == CHAMPION else set()
    rule = promotion.model_dump(mode="json", exclude={"candidate", "model", "base_copy_mb", *usual})
    generated = evaluation.model_dump(mode="json", include={"seed", "images_per_prompt"})
    return hashlib.sha256(json.dumps([rule, generated], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Registry:
    """A registered model and the alias of its champion. Each method raises UserError where MLflow does not answer."""

    name: str
    alias: str = CHAMPION
    base_copy_mb: float = 200.0
    """Largest base model in a local folder (10^6 bytes) that is copied into a version."""

    @classmethod
    def of(cls, settings: PromotionConfig, output: str) -> Registry:
        """Returns the registered model of the results in the folder ``output``."""
        return cls(settings.name(output), settings.alias, settings.base_copy_mb)

    def champion(self) -> Registered | None:
        """Returns the champion; None before the first promotion."""
        with mlflow_api.mlflow_client() as client:
            version = mlflow_api.get(client.get_model_version_by_alias, self.name, self.alias)
        return None if version is None else Registered.of(version)

    def register(self, adapters: Path, result: Sequence[str] = (), tags: Mapping[str, str] | None = None) -> Registered:
        """Makes the adapters of a training a version; the same weights again give the version that they have,
        unless its files are gone.

        Raises UserError if the adapters or their base model are damaged or gone, or the adapters have links. Of the
        version, ``result`` is the evaluation in words, and ``tags`` are further tags.
        """
        from mlflow.entities import LoggedModelOutput

        from visual_grpo.tracking.served_model import package  # Imports torch and MLflow.

        check_weights(adapters)
        facts, weights = read_facts(adapters), weights_digest(adapters)
        if (version := self._with_weights(weights)) is not None:
            with suppress(UserError):  # Its files are gone: they are registered again.
                version.adapters()
                return version
        run = own_run(adapters)
        run_id = None if run is None else run.info.run_id
        known = {DIGEST: adapter_digest(adapters), WEIGHTS: weights, "training.run": run_id, **(tags or {})}
        known |= {tag: facts.get(name) for tag, name in FROM_FACTS.items()}
        known |= {tag: text for tag, text in facts.items() if tag.startswith(("git.", "resumed.", "dvc."))}
        about = {tag: str(text) for tag, text in known.items() if text is not None}
        with mlflow_api.mlflow_client() as client, tempfile.TemporaryDirectory() as folder:
            card = model_card(facts, modules_of(adapters), result)
            package(adapters, Path(folder), card=card, about=about, base_copy_mb=self.base_copy_mb)
            self._make()
            experiment = mlflow_api.experiment_id(client) if run is None else run.info.experiment_id
            model = client.create_logged_model(experiment, name=self.name, source_run_id=run_id, model_type="adapter")
            client.log_model_artifacts(model.model_id, folder)
            client.finalize_logged_model(model.model_id, "READY")
            if run_id is not None:
                client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
            made = client.create_model_version(
                self.name,
                source=f"{SCHEME}{model.model_id}",
                run_id=run_id,
                model_id=model.model_id,
                tags=about,
                description="\n\n".join(result)[:5000],
                await_creation_for=0,
            )
        return Registered.of(made)

    def promote(self, version: int) -> None:
        """Points the alias to a version, notes it as the latest promotion, and deletes the mark of a rollback."""
        present = self.champion()
        if present is not None and present.version == version:
            return
        before = [] if present is None else self._promoted(present)
        with mlflow_api.mlflow_client() as client:
            weights = Registered.of(client.get_model_version(self.name, str(version))).weights
            self._note_promoted(client, [*(number for number in before if number != version), version])
            client.delete_registered_model_tag(self.name, self._mark(weights))
            client.delete_model_version_tag(self.name, str(version), _UNDONE)
            client.set_registered_model_alias(self.name, self.alias, str(version))

    def rollback(self) -> tuple[int, int]:
        """Points the alias back to the version promoted before the present one; returns both numbers, from and to."""
        present = find_version(f"{SCHEME}{self.name}@{self.alias}")
        promoted = self._promoted(present)
        if len(promoted) == 1:
            raise UserError(f"{self.name}@{self.alias} is version {present.version}, which did not replace a version.")
        before = promoted[-2]
        with mlflow_api.mlflow_client() as client:
            Registered.of(client.get_model_version(self.name, str(before))).adapters()  # Raises if they are gone.
            self._note_promoted(client, promoted)
            undone = f"version {present.version}, {_now()}"
            client.set_registered_model_tag(self.name, self._mark(present.weights), undone)
            client.set_registered_model_alias(self.name, self.alias, str(before))
        return present.version, before

    def rolled_back(self, weights: str) -> str | None:
        """Returns version and date of the alias's rollback from these weights; None if there was none."""
        if (undone := self._tags().get(self._mark(weights))) is not None:
            return undone
        version = self._with_weights(weights)
        return f"version {version.version}, {version.tags[_UNDONE]}" if version and _UNDONE in version.tags else None

    def keep_report(self, adapters: Path, folder: Path) -> None:
        """Adds the gate's page and numbers to the artifacts of the run that made the candidate, if there is one."""
        require_no_links(folder)
        if (run := own_run(adapters)) is not None:
            with mlflow_api.mlflow_client() as client:
                for file in folder.glob("evaluation.*"):
                    client.log_artifact(run.info.run_id, str(file), "promotion")

    def note_gate(self, digest: str, settings: str, *, refused: bool = False) -> None:
        """Notes that the gate has decided on the adapter with ``digest``; the same gate again keeps the first date.

        A decision that was ``refused`` before any sample was judged does not count among the gates of a year. By a
        clock that is wrong (`ahead_of_clock`), the gate gets no date. It gets the date of the next gate whose clock is
        right, which is the latest that it can have.
        """
        gates, key = self._gates(), _gate(digest, settings)
        if key in gates and (refused or gates[key] != _NEVER):
            return
        self._make()
        is_wrong = self.ahead_of_clock() is not None
        undated = [] if is_wrong or refused else [earlier for earlier, date in gates.items() if date is None]
        value = REFUSED if refused else UNDATED if is_wrong else _now()
        with mlflow_api.mlflow_client() as client:
            for each in (*undated, key):
                client.set_registered_model_tag(self.name, f"{GATE}{each}", value)

    def is_judged(self, digest: str, settings: str = "") -> bool:
        """Returns True if the gate has decided on this adapter: with these settings or, without any, by its samples."""
        gates = {key: date for key, date in self._gates().items() if settings or date != _NEVER}
        return any(key.startswith(_gate(digest, settings)) for key in gates)

    def gates_in_last_year(self, *, excluding: tuple[str, str]) -> int:
        """Counts the gates that may be of the last 365 days, including those with a future date or none.

        One that is asked again is left out (its digest and settings).
        """
        since = datetime.now(UTC) - timedelta(days=365)
        gates = {key: date for key, date in self._gates().items() if key != _gate(*excluding)}
        return sum(date is None or date >= since for date in gates.values())

    def ahead_of_clock(self) -> datetime | None:
        """Returns the latest date that MLflow has of this model if the clock is behind it: one of the two is wrong."""
        model = self._find()
        if model is None:
            return None
        dates = [datetime.fromtimestamp((model.last_updated_timestamp or 0) / 1000, UTC)]
        latest = max([*dates, *(date for date in self._gates().values() if date is not None)])
        return latest if latest > datetime.now(UTC) + _TOLERANCE else None

    def delete_old_versions(self, keep: int) -> list[int]:
        """Deletes all but the newest ``keep`` versions, those with an alias, and those that its rollback goes to."""
        with mlflow_api.mlflow_client() as client:
            versions = {int(entity.version): entity for entity in client.search_model_versions(f"name = '{self.name}'")}
            needed = {*sorted(versions)[-keep:], *(number for number in versions if _UNDONE in versions[number].tags)}
            for alias, number in client.get_registered_model(self.name).aliases.items() if versions else ():
                needed |= {*replace(self, alias=alias)._promoted(Registered.of(versions[int(number)]))[-2:]}
            old = [number for number in sorted(versions) if number not in needed]
            for number in old:
                client.delete_model_version(self.name, str(number))
                model_id = str(versions[number].source).removeprefix(SCHEME)
                if (logged := mlflow_api.get(client.get_logged_model, model_id)) is not None:
                    client.delete_logged_model(logged.model_id)
                    _delete_folder(logged.artifact_location)
        return old

    def delete_old_runs(self, keep: int) -> list[str]:
        """Deletes all but the newest ``keep`` runs of retrainings for this model, and its versions' runs."""
        with mlflow_api.mlflow_client() as client:
            needed = {version.run_id for version in client.search_model_versions(f"name = '{self.name}'")}
            runs = mlflow_api.search(client, f"tags.`{RETRAINED}` = '{self.name}'")[keep:]
            old = [run for run in runs if run.info.run_id not in needed]
            for run in old:
                client.delete_run(run.info.run_id)
                _delete_folder(run.info.artifact_uri)
        return [run.info.run_id for run in old]

    def mark_run(self, run_id: str) -> None:
        """Tags the run of a retraining, which `delete_old_runs` may delete later."""
        with mlflow_api.mlflow_client() as client:
            mlflow_api.get(client.set_tag, run_id, RETRAINED, self.name)

    def _promoted(self, present: Registered) -> list[int]:
        """Returns the versions that rollbacks would go to, the next one last, then the present one."""
        numbers = [int(number) for number in re.findall(r"\d+", self._tags().get(f"{PROMOTED}{self.alias}", ""))]
        if present.version in numbers:
            return numbers[: numbers.index(present.version) + 1]
        chain: list[int] = []
        version: Registered | None = present
        with mlflow_api.mlflow_client() as client:
            while version is not None and version.version not in chain:
                chain.insert(0, version.version)
                over = version.tags.get(_OVER, _NOTHING)
                found = None if over == _NOTHING else mlflow_api.get(client.get_model_version, self.name, over)
                version = None if found is None else Registered.of(found)
        return chain

    def _note_promoted(self, client: MlflowClient, numbers: Sequence[int]) -> None:
        text = ", ".join(map(str, numbers[-_MOST_PROMOTED:]))
        client.set_registered_model_tag(self.name, f"{PROMOTED}{self.alias}", text)

    def _mark(self, weights: str | None) -> str:
        return f"{ROLLED_BACK}{self.alias}.{str(weights)[:32]}"

    def _with_weights(self, weights: str) -> Registered | None:
        versions = [version for version in versions_with(weights, WEIGHTS) if version.name == self.name]
        return max(versions, key=lambda version: version.version, default=None)

    def _make(self) -> None:
        about = f"LoRA adapters of Visual GRPO, a version for each training; {CHAMPION} is the alias of the one in use."
        with mlflow_api.mlflow_client() as client:
            if self._find() is None:
                client.create_registered_model(self.name, description=about)

    def _find(self) -> RegisteredModel | None:
        with mlflow_api.mlflow_client() as client:
            return mlflow_api.get(client.get_registered_model, self.name)

    def _tags(self) -> Mapping[str, str]:
        model = self._find()
        return {} if model is None else model.tags

    def _gates(self) -> dict[str, datetime | None]:
        """Returns key -> date of the decision; None if it is not known, `_NEVER` if it was refused."""
        dates = {tag: date for tag, date in self._tags().items() if tag.startswith(GATE)}
        said = {UNDATED: None, REFUSED: _NEVER}
        return {
            tag[len(GATE) :]: said[date] if date in said else datetime.fromisoformat(date)
            for tag, date in dates.items()
        }


def _delete_folder(location: str) -> None:
    """Deletes local artifacts, which MLflow keeps; a server deletes its own (`mlflow gc`)."""
    if (folder := mlflow_api.local_folder(location)) is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _gate(digest: str, settings: str) -> str:
    return f"{digest[:32]}.{settings[:8]}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
