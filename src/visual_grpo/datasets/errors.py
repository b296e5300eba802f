"""The error of the datasets."""

from __future__ import annotations

from pathlib import Path

from kedro.io import DatasetError

from visual_grpo.command import again
from visual_grpo.errors import UserError


class DataError(UserError, DatasetError):
    """A `DatasetError`, so that Kedro passes it on as it is, whose message the user can act on."""


def missing(path: Path, made_by: str) -> DataError:
    """Nothing at ``path`` yet: names the command that makes it."""
    return DataError(f"{path} does not exist yet. Make it with: {again(made_by)}")
