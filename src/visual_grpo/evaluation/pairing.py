"""Checks that results may be compared: they pair only if nothing but the adapter differs between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from visual_grpo.common.errors import UserError
from visual_grpo.config.command import Command, rerun_command

_EXTENT = ("images_per_prompt", "max_prompts")
"""Parameters of `evaluation` that say how many samples are drawn: more of them include the fewer."""


def check_facts(baseline: Mapping[str, Any], present: Mapping[str, Any], adapter: str | None = None) -> None:
    """Raises UserError if the baseline was made under other conditions; names each difference and the remedy.

    A baseline with more samples or more controls than are asked for pairs too.

    Args:
        adapter: the adapter that is evaluated with the parameters of its training; the baseline must be drawn with the
            same ones.
    """
    different = list(_differences(_as_asked(baseline, present), present))
    if different:
        listed = "\n".join(f"  {line}" for line in different)
        raise UserError(f"the baseline does not pair with this run:\n{listed}\n{draw_again(adapter)}")


def check_adapter(training: Mapping[str, Any], *, model: str, data: str) -> None:
    """Raises UserError if the adapter was trained on a base model or on data with another digest.

    On other data the held-out prompts may be among those that it was trained on.
    """
    if training["model_digest"] != model:
        raise UserError(
            f"the adapter was trained on another base model than the current one. Train again: {rerun_command('train')}"
        )
    if training.get("data", data) != data:
        raise UserError(
            "the adapter was trained on other data than the prepared records, so this is not its result. Train again,"
            " or compare it (ADAPTER: its folder or MLflow run) with the base model on the prompts that both hold out:"
            f" {Command.current().for_pipeline('compare').with_parameters({'compare.second': 'ADAPTER'})}"
        )


def draw_again(adapter: str | None = None) -> str:
    """The remedy for a baseline that does not pair."""
    command = Command.current().for_pipeline("baseline")
    return f"Draw the baseline again: {command if adapter is None else command.with_parameters({'adapter': adapter})}"


def asked_for(baseline: pd.DataFrame, trained: pd.DataFrame) -> pd.DataFrame:
    """The baseline's samples of the prompts and seeds that ``trained`` has, where it was asked for fewer."""
    before, after = (scores.attrs.get("facts", {}).get("evaluation") for scores in (baseline, trained))
    if before == after:
        return baseline
    drawn = pd.MultiIndex.from_frame(trained[["split", "id", "index"]])
    return baseline[pd.MultiIndex.from_frame(baseline[["split", "id", "index"]]).isin(drawn)]


def _as_asked(baseline: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """The baseline's conditions without what it has beyond the present question."""
    found = dict(baseline)
    if "controls" in found and "controls" in present:
        found["controls"] = {name: s for name, s in found["controls"].items() if name in present["controls"]}
    if "evaluation" in found and "evaluation" in present:
        drawn, asked = found["evaluation"], present["evaluation"]
        fewer = {key: asked[key] for key in _EXTENT if _includes(drawn[key], asked[key])}
        found["evaluation"] = {**drawn, **fewer}
    return found


def _includes(drawn: int | None, asked: int | None) -> bool:
    """None = all."""
    return drawn is None or (asked is not None and asked <= drawn)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], section: str = "") -> Iterator[str]:
    for key in dict.fromkeys([*before, *now]):
        if isinstance(before.get(key), Mapping) and isinstance(now.get(key), Mapping):
            yield from _differences(before[key], now[key], f"{section}{key}.")
        elif key not in before or key not in now or before[key] != now[key]:
            yield f"{section}{key}: {_shown(key, before)} in the baseline, {_shown(key, now)} now"


def _shown(key: str, facts: Mapping[str, Any]) -> str:
    if key not in facts:
        return "not set"
    return "set" if isinstance(facts[key], Mapping) else repr(facts[key])
