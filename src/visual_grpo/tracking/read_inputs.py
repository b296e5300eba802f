"""DVC's hashes of what a training really read, which a run cannot know when it begins: its first nodes may make it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from visual_grpo.tracking import lineage
from visual_grpo.tracking.tracker import Tracker

_HASH = "dvc."


def input_tags(inputs: Sequence[str], project: Path) -> dict[str, str]:
    """``dvc.<path>`` -> hash of what DVC tracks in ``inputs`` (files and folders) and is now as DVC recorded it.

    The active run's tags are corrected: it has none of what it replaces itself.
    """
    kept = {
        tag: digest
        for tag, digest in lineage.dvc_tags(project).items()
        if _is_in(Path(tag.removeprefix(_HASH)), [Path(path) for path in inputs])
    }
    tracker = Tracker.active()
    tracker.remove_tags({f"{_HASH}{path}" for path in lineage.recorded(project)} - kept.keys())
    tracker.tags(kept)
    return kept


def _is_in(path: Path, folders: Sequence[Path]) -> bool:
    return any(path == folder or folder in path.parents for folder in folders)
