"""MLflow's registry: adapters become versions of a registered model, and an alias points to the champion.

A version is made in an order in which a crash leaves nothing that the next attempt does not find: the model with its
files, its link to the training's run, and last the version with all of its tags. The alias is moved last of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from visual_grpo.config.promotion import CHAMPION
from visual_grpo.errors import UserError
from visual_grpo.model_card import model_card
from visual_grpo.tracking.registry_client import EXPERIMENT, Server, artifact_location, local_folder
from visual_grpo.tracking.runs import find_run, is_active
from visual_grpo.tracking.versions import (
    ADAPTERS,
    DIGEST,
    Registered,
    find_version,
    registered,
    those_there_are,
    versions_of,
)
from visual_grpo.trained_adapters import FACTS, adapter_digest, check_weights, modules_of, read_facts

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

OVER, DATE = "promotion.over", "promotion.date"
"""Tags of a version that was promoted: the version that it replaced, or `NOTHING`; and when."""
ROLLED_BACK = "promotion.rolled_back"
"""Tag of a version whose promotion was undone: when."""
NOTHING = "none"
MODEL = "promoted_adapter"
"""Name of the versions' models among those that MLflow lists for a run."""
_LONGEST_TAG, _LONGEST_DESCRIPTION = 5000, 5000


def register(
    tracking_uri: str,
    name: str,
    adapters: Path,
    *,
    result: Sequence[str] = (),
    tags: Mapping[str, str] | None = None,
    base_copy_mb: float = 200,
    experiment: str = EXPERIMENT,
) -> Registered:
    """Makes adapters a version of the registered model ``name``; the same weights again give the version they have.

    Args:
        adapters: the folder that a training left. Its ``best`` and ``last`` are left out: one of them is the rest.
        result: the evaluation in words, for the card and the version's description; () = what the run says.
        tags: further tags of the version.
        base_copy_mb: largest base model in a local folder (MB, 10^6 bytes) that is copied into the version.
        experiment: where MLflow lists the model of a training that has no run there.

    Raises:
        UserError: the adapters or their base model are damaged or gone, the name is none that MLflow takes, or MLflow
            does not answer. No version was made then.
    """
    server, facts = Server.registry(tracking_uri), read_facts(adapters)
    if "parameters" not in facts:
        raise UserError(f"{adapters} is of an older version, which did not store the parameters. Train again.")
    check_weights(adapters)
    digest = adapter_digest(adapters)
    present = _with_digest(server, name, digest)
    if present is not None:
        return registered(server, present)
    run = server.ask(lambda client: _run_of(client, facts, experiment))
    about = {DIGEST: digest, **_origin(facts, run), **(tags or {})}
    lines = list(result) or ([] if run is None else [run.data.tags[tag] for tag in ("result",) if tag in run.data.tags])
    card = model_card(facts, modules_of(adapters), lines)
    with _global_server(tracking_uri):
        model_id = _uploaded_model(server, adapters, card, about, run, experiment, base_copy_mb)
        _link(server, run, model_id)
        make_registered_model(server, name)
        made = server.ask(
            lambda client: client.create_model_version(
                name,
                source=f"models:/{model_id}",
                run_id=None if run is None else run.info.run_id,
                model_id=model_id,
                tags={key: value[:_LONGEST_TAG] for key, value in about.items()},
                description="\n\n".join(lines)[:_LONGEST_DESCRIPTION],
                await_creation_for=0,
            )
        )
    return registered(server, made)


def champion(tracking_uri: str, name: str, alias: str = CHAMPION) -> Registered | None:
    """The version that ``alias`` points to; None without such a model or alias.

    Raises:
        UserError: MLflow does not answer, or refuses the name.
    """
    return find_version(Server.registry(tracking_uri), name, alias=alias)


def promote(tracking_uri: str, name: str, version: int, alias: str = CHAMPION) -> int | None:
    """Points ``alias`` to a version; returns the one that it replaces, which the version's tag says too.

    Nothing changes where the alias points there already.

    Raises:
        UserError: there is no such version, or MLflow does not answer. The alias is where it was then.
    """
    server = Server.registry(tracking_uri)
    promoted = find_version(server, name, version=version)
    if promoted is None:
        raise UserError(f"MLflow ({server.shown}) has no version {version} of {name}, so it cannot become {alias}.")
    present = find_version(server, name, alias=alias)
    if present is not None and present.version == version:
        return _replaced(present)
    over = NOTHING if present is None else str(present.version)
    for tag, value in {OVER: over, DATE: _now()}.items():
        _set_tag(server, promoted, tag, value)
    if ROLLED_BACK in promoted.tags:
        server.ask(lambda client: client.delete_model_version_tag(name, str(version), ROLLED_BACK))
    _move(server, name, alias, version)
    return None if present is None else present.version


def rollback(tracking_uri: str, name: str, alias: str = CHAMPION) -> tuple[int, int]:
    """Points ``alias`` back to the version that the present one replaced; returns both numbers, from and to.

    Raises:
        UserError: there is no such model or alias, the version replaced none, that one was deleted, or MLflow does not
            answer. The alias is where it was then.
    """
    server = Server.registry(tracking_uri)
    present = find_version(server, name, alias=alias)
    if present is None:
        there = those_there_are(server, name)
        raise UserError(
            f"MLflow ({server.shown}) has no {name}@{alias}, so there is nothing to go back from.{there} To make a"
            f" version champion: promote it with promotion.candidate=models:/{name}/VERSION."
        )
    replaced = _replaced(present)
    if replaced is None:
        raise UserError(
            f"{name}@{alias} is version {present.version}, which replaced no other (its tag {OVER} is"
            f" {present.tags.get(OVER, 'not set')}): there is nothing to go back to."
        )
    if find_version(server, name, version=replaced) is None:
        left = ", ".join(map(str, sorted(int(version.version) for version in versions_of(server, name))))
        raise UserError(
            f"{name}@{alias} is version {present.version}, which replaced version {replaced}, but that was deleted."
            f" Promote one of those that are left ({left})."
        )
    _set_tag(server, present, ROLLED_BACK, _now())
    _move(server, name, alias, replaced)
    return present.version, replaced


def rolled_back(tracking_uri: str, name: str, digest: str) -> tuple[int, str] | None:
    """The version of these weights and when its promotion was undone; None if it was not."""
    found = _with_digest(Server.registry(tracking_uri), name, digest)
    if found is None or ROLLED_BACK not in found.tags:
        return None
    return int(found.version), str(found.tags[ROLLED_BACK])


def _with_digest(server: Server, name: str, digest: str) -> Any:
    """MLflow's first version of the model with these weights; None without one."""
    if server.is_empty or server.get(lambda client: client.get_registered_model(name)) is None:
        return None
    same = [version for version in versions_of(server, name) if version.tags.get(DIGEST) == digest]
    return min(same, key=lambda version: int(version.version), default=None)


def _run_of(client: MlflowClient, facts: Mapping[str, Any], experiment: str) -> Run | None:
    """The training's run; None if it had none, or it was deleted."""
    named = facts.get("mlflow_run_id")
    found = None if named is None else find_run(client, str(named), experiment)
    return found if found is not None and is_active(found) else None


def _origin(facts: Mapping[str, Any], run: Run | None) -> dict[str, str]:
    """Where the adapters come from: what a version can be traced and made again by."""
    of_run = {} if run is None else run.data.tags
    found = {
        "training.run": None if run is None else run.info.run_id,
        "dataset.digest": facts["data"],
        "base.model": facts["model"],
        "base.digest": facts.get("model_digest"),
        "base.content": facts.get("model_content"),
        "command": facts.get("command"),
        **{tag: value for tag, value in facts.items() if tag.startswith(("git.", "resumed."))},
        **{tag: value for tag, value in of_run.items() if tag.startswith("dvc.")},
    }
    return {tag: str(value) for tag, value in found.items() if value is not None}


def _uploaded_model(
    server: Server,
    adapters: Path,
    card: str,
    about: Mapping[str, str],
    run: Run | None,
    experiment: str,
    base_copy_mb: float,
) -> str:
    """The id of MLflow's model with the adapters; one that an earlier attempt began is completed."""
    from visual_grpo.tracking.packaging import package

    place = server.ask(lambda client: _experiment(client, server, run, experiment))
    begun = server.ask(lambda client: client.search_logged_models([place], f"tags.`{DIGEST}` = '{about[DIGEST]}'"))
    model = next((model for model in begun if model.name == MODEL), None)
    if model is not None and str(model.status) == "READY" and _has_files(model.artifact_location):
        return str(model.model_id)
    run_id = None if run is None else run.info.run_id
    with TemporaryDirectory() as folder:
        # Before MLflow knows of it, for this may refuse the adapters.
        package(adapters, Path(folder), card=card, about=about, base_copy_mb=base_copy_mb)
        if model is None:
            tags = {key: value[:_LONGEST_TAG] for key, value in about.items()}
            model = server.ask(
                lambda client: client.create_logged_model(
                    place, name=MODEL, source_run_id=run_id, tags=tags, model_type="adapter"
                )
            )
        model_id = str(model.model_id)
        server.transfer(lambda client: client.log_model_artifacts(model_id, folder))
    server.ask(lambda client: client.finalize_logged_model(model_id, "READY"))
    return model_id


def _has_files(location: str) -> bool:
    """Whether a model's files are still there; what a server keeps is taken to be."""
    folder = local_folder(location)
    return folder is None or (folder / ADAPTERS / FACTS).is_file()


def _experiment(client: MlflowClient, server: Server, run: Run | None, name: str) -> str:
    """That of the run; without one the experiment ``name``, which is made where it is missing."""
    if run is not None:
        return str(run.info.experiment_id)
    known = client.get_experiment_by_name(name)
    if known is not None:
        return str(known.experiment_id)
    return str(client.create_experiment(name, artifact_location=artifact_location(server.uri)))


def _link(server: Server, run: Run | None, model_id: str) -> None:
    """MLflow shows the model as an output of the run."""
    from mlflow.entities import LoggedModelOutput

    if run is None:
        return
    linked = {output.model_id for output in run.outputs.model_outputs} if run.outputs else set()
    if model_id not in linked:
        outputs = [LoggedModelOutput(model_id, step=0)]
        server.ask(lambda client: client.log_outputs(run.info.run_id, outputs))


def make_registered_model(server: Server, name: str) -> None:
    """Makes it unless it is there."""
    if server.get(lambda client: client.get_registered_model(name)) is None:
        about = (
            "LoRA adapters that Visual GRPO trained; a version is one training. The champion is the version that the"
            f' alias points to: `mlflow.pyfunc.load_model("models:/{name}@{CHAMPION}")`.'
        )
        server.ask(lambda client: client.create_registered_model(name, description=about))


@contextmanager
def _global_server(tracking_uri: str) -> Iterator[None]:
    """MLflow's SQL store looks a version's model up at the global address, not at that of its client."""
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(tracking_uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)


def _replaced(version: Registered) -> int | None:
    over = version.tags.get(OVER, NOTHING)
    if over != NOTHING and not over.isdecimal():
        raise UserError(
            f"The tag {OVER} of version {version.version} of {version.name} is {over!r}; expected the number of the"
            f" version that it replaced, or {NOTHING}. Correct it in MLflow."
        )
    return None if over == NOTHING else int(over)


def _set_tag(server: Server, version: Registered, tag: str, value: str) -> None:
    server.ask(lambda client: client.set_model_version_tag(version.name, str(version.version), tag, value))


def _move(server: Server, name: str, alias: str, version: int) -> None:
    server.ask(lambda client: client.set_registered_model_alias(name, alias, str(version)))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
