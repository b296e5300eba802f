"""The folder that a training leaves: its adapters, and how they were made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visual_grpo.common.digests import content_digest, file_digest, tree_digest
from visual_grpo.common.errors import UserError

FACTS, HISTORY, CHANGES, HELD_OUT = "training.json", "training.csv", "changes.diff", "held_out.json"
"""How the adapters were made; a row of metrics a step; how the code of the first part differed from
``git.commit``, if it did; the prompts that the training never saw."""
DATA_PROFILE = "data_profile.json"
"""Statistics of the training's data, to compare later ones with (`data.drift`)."""
REWARD_CODE, REWARD_FILE, REWARD_COMMIT = "code of reward ", "file of reward ", "commit of reward "
"""Entries of a provenance. REWARD_CODE + a reward's name: digest of the user's function; REWARD_CODE + name + ": " +
option: of one that the option names. REWARD_FILE likewise: of a file or folder. REWARD_COMMIT likewise: the commit of
the weights on the hub."""
START_RUN = "start.run"
"""Fact: the MLflow run of the adapters that the training started from."""
BASELINE = "baseline"
"""Fact: how many prompts and images the baseline had, with all of which the training's monitor compared."""
DATA_COMMIT = "data.commit"
"""Fact: the commit that a dataset of the hub was prepared at."""
AGAIN = "Train again, or use the adapters of the MLflow run."
_READ = {".safetensors", ".json", ".csv", ".diff"}
"""Endings of the files that a command reads; without the card, which an evaluation writes again, and pictures."""
BEST, LAST = "best", "last"
"""Folders with the adapters of the best and of the last step; the folder itself holds one of the two."""
STEP = {BEST: "best_step", LAST: "steps"}
"""Fact ``adapter``, which of the two the folder holds -> the fact with its step."""
LATEST, NONE, BASE = "latest", "none", "base"


def read_facts(folder: Path) -> dict[str, Any]:
    """Reads ``training.json``. Raises UserError if the folder has none, or it is damaged."""
    file = folder / FACTS
    try:
        facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not folder.is_dir():
            raise UserError(f"There are no adapters in {folder} yet.", remedy="train") from error
        raise UserError(
            f"{folder} is not the folder of a training: it has no {FACTS}. Expected the folder that the train pipeline"
            " leaves, or the artifacts `adapters` of its MLflow run."
        ) from error
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}. {AGAIN}") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("parameters", {}), dict):
        raise UserError(f"{file} is damaged: expected an object with the parameters of the training. {AGAIN}")
    return facts


def weight_sums(folder: Path) -> dict[str, str]:
    """Path within the folder -> sha256 of each file of weights."""
    return {name: file_digest(folder / name) for name in _weights(folder)}


def weights_digest(folder: Path) -> str:
    """sha256 over the weights of the adapters in ``folder``, 64 hex digits; without those in ``best`` and ``last``.

    The same training again gives the same.
    """
    return tree_digest(folder, (folder / name for name in _weights(folder) if not _is_of_a_step(name)))


def adapter_digest(folder: Path) -> str:
    """sha256 over all that commands read of the adapters in ``folder``, 64 hex digits: weights with their
    configurations, provenance, changes of the code, metrics and prompts; without ``best`` and ``last``."""
    files = (file for file in folder.rglob("*") if file.suffix in _READ)
    return tree_digest(folder, (file for file in files if not _is_of_a_step(file.relative_to(folder).as_posix())))


def _is_of_a_step(name: str) -> bool:
    return name.split("/")[0] in (BEST, LAST)


def _weights(folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*.safetensors"))]


def changed_weights(sums: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Path within the folder -> what happened to a file of weights since the training; both are of `weight_sums`.

    A copy may lack ``best`` and ``last``.
    """
    gone = {name: "is gone" for name in sums if name not in now and not _is_of_a_step(name)}
    changed = {name: "has changed since the training" for name in sums if now.get(name, sums[name]) != sums[name]}
    return gone | changed | {name: "is not of the training" for name in now if name not in sums}


def check_weights(folder: Path) -> None:
    """Raises UserError if a file of weights has changed since the training or is gone.

    A folder without facts is not judged, nor are files that no command loads.
    """
    sums = read_facts(folder).get("sums", {}) if (folder / FACTS).is_file() else {}
    for name, what in changed_weights(sums, weight_sums(folder) if sums else {}).items():
        if name in sums:
            raise UserError(f"{folder / name} {what}: {FACTS} has its sha256. {AGAIN}")


def check_base(folder: Path, model: str) -> None:
    """Raises UserError if the base ``model`` has different files than the one that the adapters were trained on.

    A folder without facts is not judged; nor is a model on the hub, which has no digest.
    """
    facts = read_facts(folder) if (folder / FACTS).is_file() else {}
    stored, found = facts.get("model_content"), content_digest(model)
    # A different model of that name may be on the hub.
    if stored is not None and found is None and model == facts.get("model"):
        raise UserError(f"{model}, the folder of the base model of {folder}, is gone. Name it with model.path.")
    if stored is not None and found not in (None, stored):
        raise UserError(
            f"{folder} was trained on a base model whose files differ from those in {model} now. Name the folder that"
            f" holds that model with model.path, or train again on this one."
        )


def check_lora(folder: Path, merged: str | None) -> None:
    """Raises UserError if the LoRA with the sha256 ``merged`` (None = none) is in the base model, and the adapters were
    trained on one with a different LoRA. A folder without facts is not judged."""
    if not (folder / FACTS).is_file() or (stored := read_facts(folder).get("model_lora")) == merged:
        return
    before, now = (f"the LoRA with the sha256 {each[:12]}" if each else "no LoRA" for each in (stored, merged))
    raise UserError(
        f"{folder} was trained on a base model with {before} merged into it, and model.lora gives it {now}. Set"
        f" model.lora to {'the file of that LoRA' if stored else 'null'}."
    )


def modules_of(folder: Path) -> list[str]:
    """The modules that were trained: each has a folder."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name not in (BEST, LAST))
