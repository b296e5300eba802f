"""Tells somebody how a retraining ended (``retrain.notify``)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visual_grpo.config import RetrainConfig
from visual_grpo.retraining.commands import shell
from visual_grpo.retraining.outcome import Code

SECONDS = 30.0
"""For one attempt."""
ATTEMPTS = 3


def is_due(settings: RetrainConfig, summary: Mapping[str, Any]) -> bool:
    """Whether this outcome is one of those that somebody wants to be told."""
    failed = summary["code"] not in (Code.DONE, Code.NOT_PROMOTED)
    if settings.notify_when == "failure":
        return failed
    return failed or settings.notify_when == "always" or summary["reason"] is not None


def notify(settings: RetrainConfig, summary: Mapping[str, Any], project: Path) -> str | None:
    """Sends the summary; returns what went wrong, which changes nothing of the outcome, or None."""
    if settings.notify is None or not is_due(settings, summary):
        return None
    text = json.dumps(summary, ensure_ascii=False)
    if settings.notify.lower().startswith(("http://", "https://")):
        return _post(settings.notify, text)
    return _call(settings.notify, text, project)


def _post(address: str, text: str) -> str | None:
    import requests

    problem = None
    for _ in range(ATTEMPTS):
        try:
            answer = requests.post(
                address, data=text.encode(), headers={"Content-Type": "application/json"}, timeout=SECONDS
            )
        except requests.RequestException as error:
            problem = type(error).__name__  # Its text has the address, which may hold a token.
            continue
        if answer.ok:
            return None
        problem = f"it answered {answer.status_code}"
        if answer.status_code < 500:
            break
    return f"The address of retrain.notify was not told how it ended: {problem}"


def _call(command: str, text: str, project: Path) -> str | None:
    try:
        done = shell(command, project, seconds=SECONDS, given=text)
    except subprocess.TimeoutExpired:
        return f"The command of retrain.notify did not end within {SECONDS:g} s"
    if done.returncode == 0:
        return None
    said = (done.stderr or done.stdout).strip()
    return f"The command of retrain.notify ended with exit code {done.returncode}: {said}"
