"""The page of recipes: each value under *ours* is what its environment resolves to, each published one has a source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, reduce
from operator import getitem
from typing import Any

import pytest
import yaml

from tests.markdown import ROOT
from tests.operations.plan.configurations import parameters_of, tree_of
from visual_grpo.config import flatten, merged
from visual_grpo.config.decides import Decides, decides
from visual_grpo.models.family import find_family
from visual_grpo.models.run_spec import options_of

PAGE = (ROOT / "docs/experiments/published_recipes.md").read_text(encoding="utf-8")
ALL_FLOW = "All flow models"
SECTIONS = dict(re.findall(r"^## ([^\n:]+)(?::[^\n]*)?\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
RELEASED = {
    path.parent.name
    for path in (ROOT / "conf").glob("*/parameters.yml")
    if (tree_of(path.parent.name).get("model") or {}).get("device") == "cuda"
}


def cells(section: str) -> Iterator[list[str]]:
    """The rows of a section's table, without its head."""
    rows = [line for line in SECTIONS[section].splitlines() if line.startswith("|")]
    return ([cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:])


NO_RECIPE = (
    *("data.task", "model.family", "model.dtype", "policy.train", "rewards."),
    *("model.options.instruction", "model.options.unconditional_gradient"),
    *("policy.signal_check.rollouts", "evaluation.prompts"),
)
"""What is trained, in which precision, by which rewards, and what only this project has."""
TABLES = {section: list(cells(section)) for section in SECTIONS if section not in ("Sources", "Units")}
NAMED = [name for section in TABLES if section != ALL_FLOW for name in section.split(", ")]
FLOW = [name for name in NAMED if parameters_of(name, {}).policy.train == "dit"]
CLIPS = {name: row[3] for row in cells("Units") for name in re.findall("`([^`]+)`", row[0])}
ROWS = [
    pytest.param(name, row[0], row[2], id=f"{name} {row[0]}")
    for section, rows in TABLES.items()
    for name in (FLOW if section == ALL_FLOW else section.split(", "))
    for row in rows
] + [
    pytest.param(name, "`grpo.clip_low`, `grpo.clip_high`", f"`{clip}`, `{clip}`", id=f"{name} clips")
    for name, clip in CLIPS.items()
]


def test_every_released_configuration_has_its_table() -> None:
    assert sorted(NAMED) == sorted(RELEASED)
    assert sorted(CLIPS) == sorted(FLOW)


def test_the_tables_have_every_value_that_decides_a_training() -> None:
    lacking = {}
    for environment in RELEASED:
        rows = [row for name, row in ((p.values[0], str(p.values[1])) for p in ROWS) if name == environment]
        named = set(re.findall("`([^`]+)`", " ".join(rows)))
        own = tree_of(environment)
        kinds = Decides.SAMPLES | Decides.TRAINING
        decisive = {
            name for name, value in flatten(own).items() if value is not None and decides(name, kinds, rounding=False)
        }
        lacking[environment] = {name for name in decisive - named if not name.startswith(NO_RECIPE)}
    assert {environment: names for environment, names in lacking.items() if names} == {}


@cache
def resolved(environment: str) -> dict[str, Any]:
    config = parameters_of(environment, {})
    options = options_of(find_family(config.model.family), config.model.options)
    return merged(config.model_dump(mode="json"), {"model": {"options": options.model_dump()}})


@pytest.mark.parametrize(("environment", "names", "ours"), ROWS)
def test_ours_is_what_the_environment_resolves_to(environment: str, names: str, ours: str) -> None:
    settings = [name.split(".") for name in re.findall("`([^`]+)`", names)]
    found = [reduce(getitem, keys, resolved(environment)) for keys in settings]
    written = [yaml.safe_load(value) for value in re.findall("`([^`]+)`", ours)]
    assert [shortened(*pair) for pair in zip(found, written, strict=True)] == written


def shortened(value: Any, written: Any) -> Any:
    """A long text or list as the page writes it, by its ends."""
    start, dots, end = written.partition(" ... ") if isinstance(written, str) else ("", "", "")
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return written if dots and text.startswith(start) and text.endswith(end) else value


def test_every_published_value_names_a_source() -> None:
    sources = [row[0] for row in cells("Sources")]
    assert [row for row in cells("Sources") if not re.search("/tree/[0-9a-f]{40}", row[1])] == []
    rows = [row for table in TABLES.values() for row in table]
    assert [row[:2] for row in rows if not any(source in row[1] for source in sources)] == []
    assert [row for row in rows if len(row) != 4 or not all(row[:3])] == []
