"""Refuses data that are too few, too damaged or too unlike the champion's, before anything is trained on them."""

from __future__ import annotations

from pathlib import Path

from visual_grpo.config import Parameters
from visual_grpo.datasets import RecordsDataset
from visual_grpo.records.drift import check as problems_of
from visual_grpo.records.profile import profile_of, read_profile
from visual_grpo.retraining.outcome import DataRefusedError
from visual_grpo.tracking.versions import Registered


def check(config: Parameters, champion: Registered | None) -> None:
    """Compares the prepared records with those that the champion was trained on, if there is one.

    Raises:
        DataRefusedError: with each limit of ``retrain.data`` that is exceeded.
    """
    records = RecordsDataset(filepath=str(Path(config.output) / "05_model_input/records.parquet")).load()
    before = None if champion is None else read_profile(champion.adapters())
    problems = problems_of(before, profile_of(records), config.retrain.data)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise DataRefusedError(
            f"the data were refused, and nothing was trained:\n{listed}\nPut them right or, if this is what they are to"
            " be like now, raise the limit."
        )
