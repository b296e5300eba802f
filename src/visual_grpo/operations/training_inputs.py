"""What a training depends on beside its parameters: model, data, own reward code, adapters to start from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from visual_grpo.common.digests import content_digest
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.config.adapter_folder import (
    START_RUN,
    adapter_digest,
    check_base,
    check_weights,
    modules_of,
    read_facts,
)
from visual_grpo.config.defaults import pinned
from visual_grpo.data.table import RecordTable
from visual_grpo.rewards.catalogue import reward_digests
from visual_grpo.tracking.model_ref import find_adapters

BASE = "base"


def identity(config: Parameters, starter_report: dict[str, Any], records: RecordTable) -> dict[str, str]:
    """Digests of what the run depends on beside the parameters: model, data, own reward code, files and weights."""
    found = {
        "model": starter_report["model"],
        "model_digest": starter_report["digest"],
        "data": records.digest,
        **reward_digests(config.rewards, config.output),
    }
    start = find_start(config)
    return found if start is None else found | {"start": adapter_digest(start)}


def find_start(config: Parameters) -> Path | None:
    """The folder of the adapters to start from; None = fresh ones."""
    if config.train.start == BASE:
        return None
    return find_adapters(config.train.start, Path(config.adapters_folder))


def start_facts(start: Path) -> dict[str, str]:
    """By which the adapters can be found again: the MLflow run that made them, if there was one."""
    run_id = read_facts(start).get("mlflow_run_id")
    return {} if run_id is None else {START_RUN: run_id}


def check_start(config: Parameters, modules: Sequence[str], start: Path, model: str) -> None:
    """Raises UserError where ``modules`` of ``model`` cannot start from the adapters in the folder ``start``: they are
    damaged, of another base model, or lack a module or have another LoRA on it."""
    check_weights(start)
    check_base(start, model, content_digest(model))
    there, before = modules_of(start), Parameters.model_validate(pinned(read_facts(start)["parameters"]))
    for module in modules:
        if module not in there:
            raise UserError(f"train.start: {start} has adapters of {', '.join(there)}, but {module} is to be trained.")
        was, now = before.lora_of(module), config.lora_of(module)
        if was != now:
            raise UserError(
                f"train.start: the LoRA of {module} in {start} has {was}, this training has {now}. Give both the same"
                f" policy.lora (or modules.{module}.lora), or start from the base model: train.start={BASE}"
            )
