"""MLflow's registry: adapters become versions of a registered model, and an alias points to the champion.

Each call may be repeated after a crash: files are uploaded before a version names them, and the alias moves last.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.config.adapter_folder import FACTS, adapter_digest, check_weights, modules_of, read_facts
from visual_grpo.config.pipelines import CHAMPION
from visual_grpo.tracking import api
from visual_grpo.tracking.lineage import model_card

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion

SCHEME = "models:/"
DIGEST = "adapter.digest"
"""Tag of a version: `config.adapter_folder.adapter_digest`."""
ADAPTERS = "data/visual_grpo/adapters"
"""The adapters among a version's files (`served_model`)."""
OVER, DATE, ROLLED_BACK = "promotion.over", "promotion.date", "promotion.rolled_back"
"""Tags of a promoted version: the version that it replaced, or `NOTHING`; when; and when that was undone."""
NOTHING = "none"
RETRAINED = "retrained.for"
"""Tag of a run that the retrain command judged: the registered model."""
GATE = "gate."
"""Beginning of the registered model's tags that say which adapters the gate has judged, and when."""
_LONGEST_TEXT = 5000
_DECISION = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00) .+")
_URI = re.compile(r"models:/(?P<name>[^/]+?)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")


@dataclass(frozen=True)
class Registered:
    """A version of a registered model: the adapters of one training."""

    name: str
    version: int
    tags: Mapping[str, str]

    @classmethod
    def of(cls, found: ModelVersion) -> Registered:
        return cls(found.name, int(found.version), dict(found.tags))

    @property
    def digest(self) -> str | None:
        """The digest of the weights; None for a version that something else registered."""
        return self.tags.get(DIGEST)

    @property
    def uri(self) -> str:
        """The name that MLflow's functions and the parameter ``adapter`` take."""
        return f"{SCHEME}{self.name}/{self.version}"

    def adapters(self, *, check: bool = True) -> Path:
        """The folder of the adapters on this machine; a temporary copy where MLflow keeps them elsewhere.

        Raises:
            UserError: the files are gone or, with ``check``, are not those that were registered.
        """
        with api.mlflow_client() as client:
            folder = on_this_machine(client.get_model_version_download_uri(self.name, str(self.version)), ADAPTERS)
        remedy = "Put them back, or name another version."
        if not (folder / FACTS).is_file():
            raise UserError(f"The files of {self.uri} are gone: {folder} has no {FACTS}. {remedy}")
        if check and self.digest is not None and adapter_digest(folder) != self.digest:
            raise UserError(f"The weights of {self.uri} in {folder} are not those that were registered. {remedy}")
        return folder


@dataclass(frozen=True)
class Registry:
    """A registered model and the alias of its champion. Each method raises UserError where MLflow does not answer."""

    name: str
    alias: str = CHAMPION
    base_copy_mb: float = 200.0
    """Largest base model in a local folder (MB, 10^6 bytes) that is copied into a version."""

    @classmethod
    def of(cls, config: Parameters) -> Registry:
        return cls(config.registered_model, config.promotion.alias, config.promotion.base_copy_mb)

    def champion(self) -> Registered | None:
        """None before the first promotion."""
        return _find(self.name, alias=self.alias)

    def register(self, adapters: Path, result: Sequence[str] = (), tags: Mapping[str, str] | None = None) -> Registered:
        """Makes adapters a version; the same weights again give the version that they have.

        Args:
            adapters: the folder that a training left. Its ``best`` and ``last`` are left out: one of them is the rest.
            result: the evaluation in words, for the card and the description; () = the result that the run has.
            tags: further tags of the version.

        Raises:
            UserError: the adapters or their base model are damaged or gone. No version was made then.
        """
        from mlflow.entities import LoggedModelOutput

        from visual_grpo.tracking.served_model import package

        check_weights(adapters)
        facts, digest = read_facts(adapters), adapter_digest(adapters)
        if (known := self._with_digest(digest)) is not None:
            return known
        run = training_run(facts)
        run_id, run_tags = (None, {}) if run is None else (run.info.run_id, run.data.tags)
        lines = list(result) or [run_tags[tag] for tag in ("result",) if tag in run_tags]
        about = {DIGEST: digest, **_origin(facts, run_id), **(tags or {})}
        about = {tag: text[:_LONGEST_TEXT] for tag, text in about.items()}
        with api.mlflow_client() as client, tempfile.TemporaryDirectory() as folder:
            card = model_card(facts, modules_of(adapters), lines)
            package(adapters, Path(folder), card=card, about=about, base_copy_mb=self.base_copy_mb)
            self._make()
            experiment = api.experiment_id(client) if run is None else run.info.experiment_id
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
                description="\n\n".join(lines)[:_LONGEST_TEXT],
                await_creation_for=0,
            )
        return Registered.of(made)

    def promote(self, version: int) -> None:
        """Points the alias to a version, which notes the version that it replaces."""
        number, present = str(version), self.champion()
        if present is not None and present.version == version:
            return
        with api.mlflow_client() as client:
            client.set_model_version_tag(self.name, number, OVER, NOTHING if present is None else str(present.version))
            client.set_model_version_tag(self.name, number, DATE, _now())
            client.delete_model_version_tag(self.name, number, ROLLED_BACK)
            client.set_registered_model_alias(self.name, self.alias, number)

    def rollback(self) -> tuple[int, int]:
        """Points the alias back to the version that the present one replaced; returns both numbers, from and to.

        Raises:
            UserError: there is no champion, it replaced none, or that one was deleted.
        """
        present, alias = self.champion(), f"{self.name}@{self.alias}"
        if present is None:
            raise UserError(_nothing(self.name, alias))
        replaced = present.tags.get(OVER, NOTHING)
        if not replaced.isdecimal():
            raise UserError(
                f"{alias} is version {present.version}, which replaced no other (its tag {OVER} is {replaced})."
            )
        with api.mlflow_client() as client:
            client.get_model_version(self.name, replaced)  # Raises if it was deleted.
            client.set_model_version_tag(self.name, str(present.version), ROLLED_BACK, _now())
            client.set_registered_model_alias(self.name, self.alias, replaced)
        return present.version, int(replaced)

    def rolled_back(self, digest: str) -> tuple[int, str] | None:
        """The version of these weights and when its promotion was undone; None if it was not."""
        found = self._with_digest(digest)
        return None if found is None or ROLLED_BACK not in found.tags else (found.version, found.tags[ROLLED_BACK])

    def keep_report(self, run_id: str | None, folder: Path) -> None:
        """Puts the gate's page and numbers among the artifacts of the candidate's run, if it has one."""
        with api.mlflow_client() as client:
            run = None if run_id is None else api.find_run(client, run_id)
            for name in ("evaluation.html", "evaluation.json"):
                if run is not None and (folder / name).is_file():
                    client.log_artifact(run.info.run_id, str(folder / name), "promotion")

    def note_gate(self, digest: str, settings: str, *, promoted: bool) -> None:
        """Notes the decision on the adapter with ``digest``; the same gate again keeps the first date."""
        self._make()
        key = _gate(digest, settings)
        date = self._gates().get(key, datetime.now(UTC)).isoformat(timespec="seconds")
        decision = f"{date} {'promoted' if promoted else 'not promoted'}"
        with api.mlflow_client() as client:
            client.set_registered_model_tag(self.name, f"{GATE}{key}", decision)

    def is_judged(self, digest: str, settings: str = "") -> bool:
        """Returns True if the gate has decided on this adapter; with these settings, where they are given."""
        return any(key.startswith(_gate(digest, settings)) for key in self._gates())

    def gates_of_a_year(self, *, but: tuple[str, str]) -> int:
        """Counts the gates within the last 365 days, beside that of this digest and settings.

        The error of a year is divided among its gates. The same adapter with the same settings comes to the same
        decision, and is one gate.
        """
        since = datetime.now(UTC) - timedelta(days=365)
        return sum(date >= since for key, date in self._gates().items() if key != _gate(*but))

    def delete_old_versions(self, keep: int) -> list[int]:
        """Deletes all but the newest ``keep`` versions, those with an alias, and that which the champion replaced."""
        present = self.champion()
        with api.mlflow_client() as client:
            versions = {int(found.version): found for found in client.search_model_versions(f"name = '{self.name}'")}
            needed = set(sorted(versions)[-keep:])
            if versions:
                needed |= {int(number) for number in client.get_registered_model(self.name).aliases.values()}
            if present is not None and (replaced := present.tags.get(OVER, NOTHING)).isdecimal():
                needed.add(int(replaced))
            old = sorted(versions.keys() - needed)
            for number in old:
                client.delete_model_version(self.name, str(number))
                logged = api.get(client.get_logged_model, str(versions[number].source).removeprefix(SCHEME))
                if logged is not None:
                    client.delete_logged_model(logged.model_id)
                    _delete_folder(logged.artifact_location)
        return old

    def delete_old_runs(self, keep: int) -> list[str]:
        """Deletes all but the newest ``keep`` runs of retrainings for this model, and those of its versions."""
        with api.mlflow_client() as client:
            needed = {version.run_id for version in client.search_model_versions(f"name = '{self.name}'")}
            runs = api.search(client, f"tags.`{RETRAINED}` = '{self.name}'")[keep:]
            old = [run for run in runs if run.info.run_id not in needed]
            for run in old:
                client.delete_run(run.info.run_id)
                _delete_folder(run.info.artifact_uri)
        return [run.info.run_id for run in old]

    def mark_run(self, run_id: str) -> None:
        """Notes that a run is of a retraining, so that `delete_old_runs` may delete it in time."""
        with api.mlflow_client() as client:
            api.get(client.set_tag, run_id, RETRAINED, self.name)

    def _with_digest(self, digest: str) -> Registered | None:
        """The first version with these weights."""
        same = [found for found in versions_with(digest) if found.name == self.name]
        return min(same, key=lambda one: one.version, default=None)

    def _make(self) -> None:
        about = f"LoRA adapters of Visual GRPO, a version for each training; {CHAMPION} is the alias of the one in use."
        with api.mlflow_client() as client:
            if api.get(client.get_registered_model, self.name) is None:
                client.create_registered_model(self.name, description=about)

    def _gates(self) -> dict[str, datetime]:
        """Key -> when it was decided; tags in another form, which somebody else has set, are none."""
        with api.mlflow_client() as client:
            model = api.get(client.get_registered_model, self.name)
        tags = {} if model is None else model.tags
        found = {tag.removeprefix(GATE): _DECISION.fullmatch(tags[tag]) for tag in tags if tag.startswith(GATE)}
        return {key: datetime.fromisoformat(match[1]) for key, match in found.items() if match is not None}


def named_version(uri: str) -> Registered:
    """The version that ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION`` names.

    Raises:
        UserError: another form, or no such version or alias; the message says which there are.
    """
    parts = _URI.fullmatch(uri)
    if parts is None:
        raise UserError(f"adapter is {uri!r}. Expected {SCHEME}NAME@ALIAS or {SCHEME}NAME/VERSION")
    found = _find(**parts.groupdict())
    if found is None:
        raise UserError(f"adapter: {_nothing(parts['name'], uri)}")
    return found


def versions_with(digest: str) -> list[Registered]:
    """The versions of all registered models that have these weights."""
    with api.mlflow_client() as client:
        return [Registered.of(found) for found in client.search_model_versions(f"tags.`{DIGEST}` = '{digest}'")]


def training_run(facts: Mapping[str, Any]) -> Run | None:
    """The MLflow run of a training; None if it had none, or it was deleted."""
    if facts.get("mlflow_run_id") is None:
        return None
    with api.mlflow_client() as client:
        run = api.find_run(client, facts["mlflow_run_id"])
    return run if run is not None and api.is_active(run) else None


@cache
def on_this_machine(location: str, path: str) -> Path:
    """A folder of artifacts; where MLflow keeps them elsewhere, a copy that is removed when the command ends."""
    import mlflow

    if (here := api.local_folder(location)) is not None:
        return here / path
    copy = tempfile.mkdtemp(prefix="visual_grpo_adapters_")
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    return Path(mlflow.artifacts.download_artifacts(f"{location}/{path}", dst_path=copy))


def _find(name: str, alias: str | None = None, version: str | None = None) -> Registered | None:
    with api.mlflow_client() as client:
        if version is None:
            found = api.get(client.get_model_version_by_alias, name, str(alias))
        else:
            found = api.get(client.get_model_version, name, version)
    return None if found is None else Registered.of(found)


def _nothing(name: str, wanted: str) -> str:
    """Says that MLflow does not have ``wanted``, and what it has: versions and aliases, or other models."""
    with api.mlflow_client() as client:
        model = api.get(client.get_registered_model, name)
        if model is None:
            names = ", ".join(other.name for other in client.search_registered_models())
            return f"MLflow ({api.shown()}) has no {wanted}. Registered models are: {names or 'none'}."
        numbers = sorted(int(version.version) for version in client.search_model_versions(f"name = '{name}'"))
    aliases = ", ".join(f"{alias} (version {version})" for alias, version in sorted(model.aliases.items()))
    versions = ", ".join(map(str, numbers))
    there = f"{name} has the versions {versions or 'none'} and the aliases {aliases or 'none'}"
    return f"MLflow ({api.shown()}) has no {wanted}. {there}."


def _origin(facts: Mapping[str, Any], run_id: str | None) -> dict[str, str]:
    """Tags that say where the adapters come from."""
    found = {
        "training.run": run_id,
        "dataset.digest": facts["data"],
        "base.model": facts["model"],
        "base.digest": facts.get("model_digest"),
        "base.content": facts.get("model_content"),
        "command": facts.get("command"),
        **{tag: value for tag, value in facts.items() if tag.startswith(("git.", "resumed.", "dvc."))},
    }
    return {tag: str(value) for tag, value in found.items() if value is not None}


def _delete_folder(location: str) -> None:
    """Deletes files on this machine, which MLflow keeps; those on a server are the server's to delete (`mlflow gc`)."""
    if (folder := api.local_folder(location)) is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _gate(digest: str, settings: str) -> str:
    return f"{digest[:32]}.{settings[:8]}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
