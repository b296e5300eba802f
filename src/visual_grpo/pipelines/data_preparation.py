"""Nodes of the data preparation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedro.pipeline import Node, Pipeline

from visual_grpo.common import console
from visual_grpo.common.errors import counted, sentence
from visual_grpo.config import DataConfig
from visual_grpo.data.found import columns_line, files_line, splits_line
from visual_grpo.data.manifest import RecordTable
from visual_grpo.data.preparation import Preparation
from visual_grpo.data.record import Place, Rejected, shorten
from visual_grpo.data.splits import SEALED


def create_pipeline() -> Pipeline:
    inputs, outputs = ["params:data", "base_model", "draft"], ["records", "data_report"]
    return Pipeline([Node(prepare_records, inputs, outputs, name="prepare_records")], tags=["tracked"])


def prepare_records(data: DataConfig, base_model: dict[str, Any], draft: Path) -> tuple[Path, dict[str, Any]]:
    """Writes the manifest of the records at ``data.path``, with their prepared images next to it; prints the report.

    One node does both: Kedro may run a node that only reports after nodes that use the records for an hour.
    ``base_model`` is not used: as an input it makes Kedro run the starter first.
    """
    preparation = Preparation(data)
    with console.progress("Preparing records", preparation.source.count()) as bar:
        preparation.write(draft, bar.advance)
        bar.complete()  # Blank lines were counted, too.
    records = RecordTable(draft)
    report = {**records.report, "digest": records.digest}
    _print_report(report)
    return draft, report


def _print_report(report: Mapping[str, Any]) -> None:
    rejected = report["rejected"]
    console.summary(
        "Records",
        {
            "found in": f"{report['path']} ({report['layout']})",
            **({"commit": report["commit"]} if report["commit"] else {}),
            **({"files": files_line(report["files"])} if report["files"]["found"] else {}),
            **({"columns": columns_line(report["columns"])} if report["columns"] else {}),
            **({"splits": splits_line(report["found_splits"])} if report["found_splits"] else {}),
            **({"sources": sources} if (sources := _sources_line(report["sources"])) else {}),
            "such as": repr(shorten(report["example"])),
            **{split: _split_line(split, report) for split in _shown(report["splits"])},
            "rejected": _rejected_line(rejected),
        },
    )
    for one in {one["reason"]: one for one in reversed(rejected["listed"])}.values():
        place = Place(one["file"], one["line"])
        console.note(f"Rejected, for example: {Rejected(one['reason'], one['message'], one['remedy'], place)}")
    for warning in report["warnings"]:
        console.note(f"Note: {sentence(warning)}")


def _shown(splits: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    """Leaves out the sealed split if nothing is sealed, as by default."""
    return {split: counts for split, counts in splits.items() if split != SEALED or counts["records"]}


def _sources_line(sources: Mapping[str, int]) -> str:
    """Returns "1 a record (8 records), 2 a record (4 records)"; "" where all have one or none."""
    if all(int(number) < 2 for number in sources):
        return ""
    return ", ".join(f"{number} a record ({counted(count, 'record')})" for number, count in sources.items())


def _split_line(split: str, report: Mapping[str, Any]) -> str:
    counts, shared = report["splits"][split], report["eval_prompts_in_train"] if split == "eval" else 0
    line = f"{counted(counts['records'], 'record')}, {counted(counts['prompts'], 'prompt')}"
    share = "" if shared == counts["prompts"] else f"{shared} of them "
    return f"{line} ({share}also in train)" if shared else line


def _rejected_line(rejected: Mapping[str, Any]) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in rejected["by_reason"].items())
    return f"{rejected['total']}" + (f" ({reasons})" if reasons else "")
