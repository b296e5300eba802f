"""Where datasets of the catalog are on disk."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

CATALOG = Path(__file__).parents[3] / "conf/base/catalog.yml"


def place(output: str | Path, dataset: str) -> Path:
    """Returns the file or folder of a dataset whose results go to the folder ``output``."""
    return Path(output) / _places()[dataset]


@cache
def _places() -> dict[str, str]:
    """Dataset -> its path in the folder of results."""
    entries = yaml.safe_load(CATALOG.read_text(encoding="utf-8")).items()
    return {name: entry["filepath"].removeprefix("${output:}/") for name, entry in entries if "filepath" in entry}
