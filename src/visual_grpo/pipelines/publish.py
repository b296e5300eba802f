"""Uploads an adapter with its card to the hub; on request."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]
from kedro.pipeline import Node, Pipeline
from safetensors import safe_open

from visual_grpo.adapter_folder import adapter_digest, check_weights, modules_of, read_facts
from visual_grpo.common import console
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import require_no_links
from visual_grpo.config import Parameters
from visual_grpo.config.pipelines import PublishConfig
from visual_grpo.evaluation.verdict import lines
from visual_grpo.tracking.adapter_lookup import find_adapters
from visual_grpo.tracking.model_card import CARD, Published, is_one_folder, model_card


def create_pipeline() -> Pipeline:
    return Pipeline(
        [Node(publish, ["parameters", "path:adapters", "path:evaluation"], "publication", name="publish")],
        tags=["apart"],
    )


_CONFIG = "adapter_config.json"
_UPLOADED = (".safetensors", _CONFIG)
"""Endings of the files of a module that are uploaded; its record and its pictures would reveal this machine's data."""
_LICENCE = ("license", "license_name", "license_link")
# A folder's name must follow, so that a fraction is none.
_ABSOLUTE = re.compile(r"(?<![\w.:/])(~?/[\w.-]+/|[A-Za-z]:\\)[^\s`'\"),]*")


def publish(parameters: Parameters, latest: Path, evaluation: Path) -> dict[str, Any]:
    """Uploads weights and card of ``adapter`` to ``publish.repository``; returns the repository and its commit."""
    settings = parameters.publish
    if settings.repository is None:
        raise UserError("publish: name the repository on the hub with publish.repository=OWNER/NAME")
    adapters = find_adapters(parameters.adapter, latest)
    facts = read_facts(adapters)
    require_no_links(adapters)
    check_weights(adapters)
    base = _base_model(facts, settings)
    if huggingface_hub.get_token() is None:
        raise UserError("publish: this machine has no token of the hub. Run `hf auth login`, or set HF_TOKEN.")
    result = _result(evaluation, adapters)
    try:
        of_base: Any = huggingface_hub.model_info(base, revision=facts["parameters"]["model"]["revision"]).card_data
        licence = {name: str(of_base[name]) for name in _LICENCE if of_base is not None and of_base.get(name)}
        published = Published(repository=settings.repository, base=base, licence=licence)
        with TemporaryDirectory() as folder:
            _stage(Path(folder), adapters, model_card(facts, modules_of(adapters), result, published=published), base)
            _require_nothing_of_this_machine(Path(folder))
            api = huggingface_hub.HfApi()
            api.create_repo(settings.repository, private=settings.private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=settings.repository, folder_path=folder, commit_message="Adapter trained with Visual GRPO"
            )
    except (HTTPError, ValueError, OSError) as error:
        raise UserError(f"publish: the hub refuses: {_said(error)}") from error
    if not result:
        console.note("The card says that the adapter was not evaluated. Run evaluate, and publish again.")
    console.note(f"Published: {commit.repo_url}")
    return {"repository": settings.repository, "commit": commit.oid, "adapters": adapter_digest(adapters)}


def _base_model(facts: Mapping[str, Any], settings: PublishConfig) -> str:
    """Returns the hub id that others load the base model by; raises UserError if there is none."""
    if facts.get("model_content") is None:
        return settings.base_model or str(facts["model"])
    if settings.base_model is None:
        raise UserError(
            f"publish: the base model is the folder {facts['model']}, which others do not have. Name the repository"
            " that it is a copy of with publish.base_model=OWNER/NAME. (The starter's model has none.)"
        )
    return settings.base_model


def _result(evaluation: Path, adapters: Path) -> list[str]:
    """Returns the evaluation of these very adapters in words; empty if there is none."""
    try:
        judged = json.loads(evaluation.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return lines(judged["headline"]) if judged.get("adapter_digest") == adapter_digest(adapters) else []


def _stage(folder: Path, adapters: Path, card: str, base: str) -> None:
    modules = modules_of(adapters)
    for module in modules:
        to = folder if is_one_folder(modules) else folder / module
        to.mkdir(exist_ok=True)
        for file in (adapters / module).iterdir():
            if file.name.endswith(_UPLOADED):
                shutil.copyfile(file, to / file.name)
        if (config := to / _CONFIG).is_file():  # peft writes the folder of the base model into it.
            stated = json.loads(config.read_text(encoding="utf-8")) | {"base_model_name_or_path": base}
            config.write_text(json.dumps(stated, indent=2), encoding="utf-8")
    (folder / CARD).write_text(card, encoding="utf-8")


def _require_nothing_of_this_machine(folder: Path) -> None:
    """Raises UserError if a text among the files names a path on this machine, or contains its token."""
    for name, text in _texts(folder):
        place = _ABSOLUTE.search(text)
        shown = "your token" if str(huggingface_hub.get_token()) in text else None if place is None else place[0]
        if shown is not None:
            raise UserError(f"publish: {name} contains {shown}, which everybody could read. Nothing was uploaded.")


def _texts(folder: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                yield file.name, json.dumps(opened.metadata() or {})
        else:
            yield file.name, file.read_text(encoding="utf-8")


def _said(error: Exception) -> str:
    """Returns the hub's own words, on one line."""
    message = error.server_message if isinstance(error, HfHubHTTPError) and error.server_message else str(error)
    return " ".join(message.split())
