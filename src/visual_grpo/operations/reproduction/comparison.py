"""Compares a repeated training with the first: one row for each thing that decides the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from visual_grpo.config.adapter_folder import CODE, FILE, HISTORY, weight_sums
from visual_grpo.grpo.metrics import is_timing
from visual_grpo.training.cache_key import cache_key
from visual_grpo.training.runtime_fingerprint import NUMERICS, SOURCES

Result = Literal["equal", "differs", "noted", "within tolerance"]
FINAL = ("reward/total", "eval/total")
"""Metrics of the last step that has them, compared where bits cannot be."""
_PATHS = ("data.path", "starter.dataset", "starter.model", "model.path", "train.start")
"""Parameters whose content is compared by digests."""
_FACTS = {
    "data": "data",
    "base model": "model_digest",
    "base model's files": "model_content",
    "adapters at the start": "start",
    "source files": SOURCES,
    "seed": "seed",
}
"""What is fixed before the first step, by its fact of the training."""


@dataclass(frozen=True)
class Row:
    """One thing, as the run had it and as it is here."""

    what: str
    run: str
    here: str
    result: Result

    @classmethod
    def of(cls, what: str, run: object, here: object) -> Row:
        return cls(what, _shown(run), _shown(here), "equal" if run == here else "differs")


def environment_row(run: Mapping[str, Any], here: Mapping[str, Any]) -> Row:
    """Libraries and processor: another one may change bits, which the adapters then show."""
    before, now = (str(facts.get(NUMERICS)).split(", ") for facts in (run, here))
    if before == now:
        return Row("libraries and processor", before[-1], now[-1], "equal")
    lost, new = (", ".join(part for part in one if part not in other) for one, other in ((before, now), (now, before)))
    return Row("libraries and processor", lost, new, "noted")


def identity_rows(run: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Row]:
    """Data, base model, parameters and reward code, from the facts of the two trainings."""
    for name, fact in _FACTS.items():
        if run.get(fact) is not None:
            yield Row.of(name, run[fact], here.get(fact))
    before, now = (_parameters(facts.get("parameters", {})) for facts in (run, here))
    if before == now:
        yield Row.of("parameters", f"{len(before)} values", f"{len(now)} values")
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield Row.of(f"parameter {name}", before.get(name), now.get(name))
    for name in sorted(key for key in run if key.startswith((CODE, FILE))):
        yield Row.of(name, run[name], here.get(name))


def _parameters(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in cache_key("train", tree).items() if name not in _PATHS}


def adapter_rows(sums: Mapping[str, str], run: Path, here: Path) -> Iterator[Row]:
    """Each file of weights by its sha256.

    Args:
        sums: path -> sha256 when the training ended; a file that is gone since is compared by it.
        run, here: the folders of the two trainings.
    """
    there, made = weight_sums(run), weight_sums(here)
    for name in sorted(sums.keys() | there.keys() | made.keys()):
        present = there.get(name, sums.get(name))
        row = Row.of(f"adapter {name}", present, made.get(name))
        if present != sums.get(name, present):
            row = replace(row, run=f"{row.run} (not what the training left: {_shown(sums[name])})")
        yield row


def metric_rows(run: Path, here: Path) -> Iterator[Row]:
    """The metrics of every step in every digit, but those of time and memory; only the first that differs."""
    before, now = (pd.read_csv(folder / HISTORY, dtype=str, keep_default_na=False) for folder in (run, here))
    before, now = (table[[name for name in table if not is_timing(str(name))]] for table in (before, now))
    shown = [f"{len(table)} steps of {', '.join(map(str, table))}" for table in (before, now)]
    if shown[0] != shown[1]:
        yield Row.of("metrics", *shown)
        return
    for step, name in product(before.index, before):
        if before[name][step] != now[name][step]:
            yield Row.of(f"metric {name} at step {step + 1}", before[name][step], now[name][step])
            return
    size = f"{len(before.columns)} of {len(before)} steps"
    yield Row.of("metrics", size, size)


def tolerance_rows(run: Path, here: Path, tolerance: float) -> Iterator[Row]:
    """The final metrics, which may differ by ``tolerance`` x the run's value (x 1, where that is smaller)."""
    before, now = (pd.read_csv(folder / HISTORY) for folder in (run, here))
    for name in FINAL:
        if name in before:
            first, second = (table.get(name, pd.Series(dtype=float)).dropna().tolist() for table in (before, now))
            a, b = first[-1], second[-1] if second else float("nan")
            within = abs(a - b) <= tolerance * max(abs(a), 1.0)
            result: Result = "equal" if a == b else "within tolerance" if within else "differs"
            yield Row(f"final {name}", f"{a:.4f}", f"{b:.4f}", result)


def _shown(value: object) -> str:
    """A digest by its beginning."""
    if value is None:
        return "-"
    text = str(value)
    return text[:12] if len(text) in (40, 64) and set(text) <= set("0123456789abcdef") else text
