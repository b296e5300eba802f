"""``python -m visual_grpo.operations.retraining.data_check RECORDS LIMITS [ADAPTERS]``: prints what is wrong with data.

A retraining starts it as a process, so that it need not load the libraries for pictures itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from visual_grpo.common.errors import UserError
from visual_grpo.common.quiet_libraries import silence_libraries
from visual_grpo.config import DataChecks
from visual_grpo.data import drift
from visual_grpo.data.datasets import RecordsDataset
from visual_grpo.data.splits import HELD_OUT
from visual_grpo.operations.command import render


def problems(manifest: str, limits: DataChecks, adapters: Path | None) -> list[str]:
    """Returns a sentence for each limit that the prepared records exceed, and if none of them is held out.

    Args:
        adapters: the champion's, with the profile of its data; None without a champion.
    """
    records = RecordsDataset(filepath=manifest).load()
    before = None if adapters is None else drift.read_profile(adapters)
    found = drift.check(before, drift.profile_of(records), limits)
    if not len(records.split(HELD_OUT)):
        found.append("Nothing is held out, so no gate could judge a training (data.held_out_share).")
    return found


def main() -> int:
    silence_libraries()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", help="the manifest of the prepared records")
    parser.add_argument("limits", help="retrain.data as JSON")
    parser.add_argument("adapters", nargs="?", type=Path, help="the folder of the champion's adapters")
    options = parser.parse_args()
    try:
        found = problems(options.records, DataChecks.model_validate_json(options.limits), options.adapters)
    except UserError as error:
        sys.stderr.write(render(error))
        return 1
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
