"""SECURITY.md names a test for each promise; here each of them must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROMISES = [line for line in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines() if "| `tests/" in line]


def named_in(cell: str) -> list[tuple[str, str]]:
    """(file, test); a test without a file is in the one before it."""
    found, file = [], ""
    for name in re.findall(r"`([^`]+)`", cell):
        before, _, test = name.rpartition("::")
        file = before or file
        found.append((file, test))
    return found


@pytest.mark.parametrize("line", PROMISES, ids=[line.split("|")[1].strip()[:50] for line in PROMISES])
def test_a_promise_is_held_by_tests_that_exist(line: str) -> None:
    named = named_in(line.split("|")[2])
    assert named
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"


def test_the_page_makes_promises() -> None:
    assert len(PROMISES) >= 10
