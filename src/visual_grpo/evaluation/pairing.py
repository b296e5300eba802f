"""Whether results may be compared: they pair only if nothing but the adapter differs between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from visual_grpo.command import Command, again
from visual_grpo.errors import UserError

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
            f"the adapter was trained on another base model than the current one. Train again: {again('train')}"
        )
    if training.get("data", data) != data:
        raise UserError(
            "the adapter was trained on other data than the prepared records, so this is not its result. Train again,"
            " or compare it (ADAPTER: its folder or MLflow run) with the base model on the prompts that both hold out:"
            f" {Command.now().of_pipeline('compare').adding({'compare.second': 'ADAPTER'})}"
        )


def draw_again(adapter: str | None = None) -> str:
    """The remedy for a baseline that does not pair."""
    command = Command.now().of_pipeline("baseline")
    return f"Draw the baseline again: {command if adapter is None else command.adding({'adapter': adapter})}"


def asked_for(baseline: pd.DataFrame, trained: pd.DataFrame) -> pd.DataFrame:
    """The baseline's samples of the prompts and seeds that ``trained`` has, where it was asked for fewer."""
    extents = [scores.attrs.get("facts", {}).get("evaluation") for scores in (baseline, trained)]
    if extents[0] == extents[1]:
        return baseline
    drawn = pd.MultiIndex.from_frame(trained[["split", "id", "index"]])
    return baseline[pd.MultiIndex.from_frame(baseline[["split", "id", "index"]]).isin(drawn)]


def _as_asked(baseline: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked of the baseline, without what it has beyond the present question."""
    found = dict(baseline)
    if isinstance(found.get("controls"), Mapping) and "controls" in present:
        found["controls"] = {name: s for name, s in found["controls"].items() if name in present["controls"]}
    extent, now = found.get("evaluation"), present.get("evaluation")
    if isinstance(extent, Mapping) and now is not None:
        fewer = {key: now[key] for key in _EXTENT if _includes(extent.get(key), now[key])}
        found["evaluation"] = {**extent, **fewer}
    return found


def _includes(drawn: int | None, asked: int | None) -> bool:
    """None = all."""
    return drawn is None or (asked is not None and asked <= drawn)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], section: str = "") -> Iterator[str]:
    for key in dict.fromkeys([*before, *now]):
        name = f"{section}{key}"
        if key not in now:
            was = before[key]
            yield f"{name}: " + (
                "only in the baseline" if _is_section(was) else f"{was!r} in the baseline, not set now"
            )
        elif key not in before:
            value = now[key]
            yield f"{name}: not " + ("in the baseline" if _is_section(value) else f"set in the baseline, {value!r} now")
        elif _is_section(before[key]) and _is_section(now[key]):
            yield from _differences(before[key], now[key], f"{name}.")
        elif before[key] != now[key]:
            yield f"{name}: {before[key]!r} in the baseline, {now[key]!r} now"


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping)
