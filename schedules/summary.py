"""The last retraining in Markdown, for a scheduler's page: ``summary.py OUTPUT/08_reporting/retraining.json CODE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from visual_grpo.retraining.outcome import Code

HEADINGS = {
    Code.DONE: "Promoted, or nothing to do",
    Code.NOT_PROMOTED: "Trained, not promoted",
    Code.BUSY: "Another retraining is running",
    Code.OUT_OF_TIME: "Out of time",
    Code.DATA_REFUSED: "Data refused",
}


def markdown(summary: dict[str, Any] | None, code: int) -> str:
    """Args: summary: None = there is none of this retraining, which ended with ``code`` before it could write one."""
    heading = HEADINGS.get(Code(code), "Failed") if code in set(Code) else "Failed"
    if summary is None:
        return f"## {heading}\n\nExit code {code}; the log says why.\n"
    rows = {
        "reason": summary["reason"],
        "model": summary["model"],
        "promoted version": summary["version"],
        "MLflow run": summary["run_id"],
        "commit of dvc.lock": summary["commit"],
        **{f"{stage} (s)": round(seconds, 1) for stage, seconds in summary["seconds"].items()},
    }
    table = "".join(f"| {name} | {_cell(value)} |\n" for name, value in rows.items() if value is not None)
    return f"## {heading}\n\n{summary['sentence']}\n\n| | |\n|---|---|\n{table}"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def main(file: Path, code: int) -> None:
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    # That of an earlier retraining says nothing of this one.
    sys.stdout.write(markdown(found if found is not None and found["code"] == code else None, code))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
