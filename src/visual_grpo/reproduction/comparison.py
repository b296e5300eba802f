"""What a repeated training has in common with the first: one row for each thing that decides the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from visual_grpo.computed_with import SOURCES
from visual_grpo.decisive_parameters import decisive
from visual_grpo.grpo.metrics import is_timing
from visual_grpo.trained_adapters import CODE, FILE, HISTORY, weight_sums

Result = Literal["equal", "differs", "noted", "within tolerance"]
FINAL = ("reward/total", "eval/total")
"""Metrics of the last step that has them, compared where bits cannot be."""
_PATHS = ("data.path", "starter.dataset", "starter.model", "model.path", "train.start")
"""Where things are; what they are is compared by digests."""


@dataclass(frozen=True)
class Row:
    """One thing, as the run had it and as it is here."""

    what: str
    run: str
    here: str
    result: Result

    @classmethod
    def of(cls, what: str, run: object, here: object, otherwise: Result = "differs") -> Row:
        return cls(what, _shown(run), _shown(here), "equal" if run == here else otherwise)


def identity_rows(run: Mapping[str, Any], here: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[Row]:
    """Data, base model, parameters and reward code: what is fixed before the first step.

    Args:
        run, here: the facts of the two trainings.
        origins: ``data`` and ``base model`` -> where they came from here.
    """
    for name, fact in (("data", "data"), ("base model", "model_digest")):
        row = Row.of(name, run.get(fact), here.get(fact))
        yield replace(row, here=f"{row.here} ({origins[name]})")
    if run.get("model_content") is not None:
        yield Row.of("base model's files", run["model_content"], here.get("model_content"))
    if "start" in run:
        yield Row.of("adapters at the start", run["start"], here.get("start"))
    if SOURCES in run and SOURCES in here:
        yield Row.of("source files", run[SOURCES], here[SOURCES])
    yield Row.of("seed", run.get("seed"), here.get("seed"))
    yield from _parameter_rows(run["parameters"], here.get("parameters", {}))
    for name in sorted(key for key in run if key.startswith((CODE, FILE))):
        yield Row.of(name, run[name], here.get(name))


def _parameter_rows(run: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Row]:
    before, now = (_decisive(tree) for tree in (run, here))
    differing = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if not differing:
        yield Row("parameters", f"{len(before)} values", f"{len(now)} values", "equal")
    for name in differing:
        yield Row.of(f"parameter {name}", before.get(name), now.get(name))


def _decisive(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter that is null may be of a later version."""
    found = decisive("train", tree)
    return {name: value for name, value in found.items() if value is not None and name not in _PATHS}


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
        edited = present is not None and name in sums and present != sums[name]
        if edited:
            row = Row(row.what, f"{row.run} (not what the training left: {_shown(sums[name])})", row.here, row.result)
        yield row


def metric_rows(run: Path, here: Path) -> Iterator[Row]:
    """The metrics of every step, but those of time and memory: one row, or one for the first that differs.

    They are compared as the files have them, with every digit.
    """
    before, now = (pd.read_csv(folder / HISTORY, dtype=str, keep_default_na=False) for folder in (run, here))
    names = [name for name in before if not is_timing(str(name))]
    other = [name for name in now if not is_timing(str(name))]
    if set(names) != set(other):
        yield Row("names of metrics", _only(names, other), _only(other, names), "differs")
        return
    if len(before) != len(now):
        yield Row.of("steps", len(before), len(now))
        return
    for step in range(len(before)):
        for name in names:
            values = (before[name].iloc[step], now[name].iloc[step])
            if values[0] != values[1]:
                yield Row(f"metric {name} at step {step + 1}", *values, "differs")
                return
    size = f"{len(names)} of {len(before)} steps"
    yield Row("metrics", size, size, "equal")


def tolerance_rows(run: Path, here: Path, tolerance: float) -> Iterator[Row]:
    """The final metrics, which may differ by ``tolerance`` x the run's value (x 1, where that is smaller)."""
    before, now = (pd.read_csv(folder / HISTORY) for folder in (run, here))
    for name in FINAL:
        if name not in before:
            continue
        first = float(before[name].dropna().iloc[-1])
        second = float(now[name].dropna().iloc[-1]) if name in now and len(now[name].dropna()) else float("nan")
        within = abs(first - second) <= tolerance * max(abs(first), 1.0)
        result: Result = "equal" if first == second else "within tolerance" if within else "differs"
        yield Row(f"final {name}", f"{first:.4f}", f"{second:.4f}", result)


def first_difference(rows: list[Row]) -> Row | None:
    """In the order of the rows, in which causes come before what follows from them."""
    return next((row for row in rows if row.result == "differs"), None)


def as_json(rows: list[Row]) -> list[dict[str, str]]:
    return [asdict(row) for row in rows]


def _only(names: list[Any], others: list[Any]) -> str:
    return ", ".join(sorted(str(name) for name in set(names) - set(others))) or "-"


def _shown(value: object) -> str:
    """A digest by its beginning."""
    if value is None:
        return "-"
    text = str(value)
    return text[:12] if len(text) in (40, 64) and all(letter in "0123456789abcdef" for letter in text) else text
