"""What a report says and shows of the alarms of a training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visual_grpo.evaluation.thumbnails import data_uri

_SIDE = 1600


def picture_of(step: int) -> str:
    """The file of what was judged at an alarm, in the folders of checkpoints and adapters."""
    return f"alarm-{step:06d}.png"


def alarm_notes(training: Mapping[str, Any]) -> list[str]:
    """A sentence for the verdict on adapters whose training raised an alarm.

    Args:
        training: its facts.
    """
    alarms = training["alarms"]
    if not alarms:
        return []
    more = f" (and {len(alarms) - 1} more)" if len(alarms) > 1 else ""
    return [f"Alarm of the training at step {alarms[0]['step']}{more}: {alarms[0]['sentence']}."]


def shown_alarms(training: Mapping[str, Any], adapters: Path | None) -> list[dict[str, Any]]:
    """Step, sentence and picture (a data URI, or None) of each alarm."""
    found = []
    for alarm in training.get("alarms", []):
        file = None if adapters is None else adapters / picture_of(alarm["step"])
        shown = data_uri(file, _SIDE) if file is not None and file.is_file() else None
        found.append({**alarm, "picture": shown})
    return found
