"""Nodes of the data preparation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visual_grpo.records.preparation import Preparation
    from visual_grpo.records.table import RecordTable


@dataclass(frozen=True)
class ShownPreparation:
    """A preparation that shows its progress while the dataset writes it."""

    preparation: Preparation

    def write(self, manifest: Path) -> None:
        from visual_grpo import console

        with console.progress("Preparing records", self.preparation.count()) as bar:
            self.preparation.write(manifest, lambda done, total: bar.advance())


def prepare_records(parameters: dict[str, Any], starter_report: Mapping[str, Any]) -> ShownPreparation:
    """Finds the records at ``data.path``; they stream through when the dataset is saved.

    ``starter_report`` only says that the default dataset has been drawn.
    """
    from visual_grpo.config import Parameters
    from visual_grpo.records.preparation import Preparation

    config = Parameters.model_validate(parameters)
    return ShownPreparation(Preparation(config.data))


def report_records(records: RecordTable) -> dict[str, Any]:
    """The data report that was written with the records, shown and returned."""
    from visual_grpo import console

    report = {**records.report, "digest": records.digest}
    rejected = report["rejected"]
    console.summary(
        "Records",
        {
            **{split: _split_line(counts) for split, counts in report["splits"].items()},
            "rejected": _rejected_line(rejected),
            "found in": f"{report['path']} ({report['layout']})",
        },
    )
    for warning in report["warnings"]:
        console.note(f"Note: {warning}.")
    return report


def _split_line(counts: Mapping[str, int]) -> str:
    return f"{counts['records']} records, {counts['prompts']} prompts"


def _rejected_line(rejected: Mapping[str, Any]) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in rejected["by_reason"].items())
    return f"{rejected['total']}" + (f" ({reasons})" if reasons else "")
