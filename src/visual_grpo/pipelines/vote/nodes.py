"""Lets people choose between pictures, and says what their choices come to."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from visual_grpo.common import console
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.files import final_of
from visual_grpo.common.processes import stop_request
from visual_grpo.config import Parameters
from visual_grpo.data.table import RecordTable
from visual_grpo.evaluation.paired import preference
from visual_grpo.pipelines.vote.ballot import Ballot
from visual_grpo.pipelines.vote.pairs import find_pairs
from visual_grpo.pipelines.vote.server import served
from visual_grpo.rewards.votes.choices import AB, Choice, read_choices
from visual_grpo.rewards.votes.features import PIXELS
from visual_grpo.rewards.votes.head import family_scores
from visual_grpo.rewards.votes.reward import FILE, LEAST, decided, fitted_head

CHOICES = "01_raw/votes/choices.jsonl"
"""File in the folder ``output``, unless ``vote.choices`` names another."""
_COLUMNS = ["voter", "choice", "pair", "source", "prompt", "record", "family", "first", "second", "at"]


def collect_votes(parameters: Parameters, records: RecordTable, votes_draft: Path) -> Path:
    """Returns the folder with what the choices come to; ``vote.choices`` has each choice as soon as it is made."""
    file = Path(parameters.vote.choices or Path(parameters.output) / CHOICES)
    if final_of(votes_draft).resolve() in file.resolve().parents:
        raise UserError(
            f"vote.choices is {file}, in a folder that each run of this pipeline replaces; keep choices with the data"
        )
    for line in read_choices(file).damaged:
        console.note(f"{file}: a line cannot be read and is ignored: {line}")
    ballot = Ballot(find_pairs(parameters, records, file), file, parameters.vote.seed)
    _vote(parameters, ballot)
    if parameters.vote.source == AB:
        _report_blind(ballot.standing(), votes_draft)
    else:
        _report_head(file)
    standing = read_choices(file).standing
    _table(standing).to_csv(votes_draft / "choices.csv", index=False)
    family_scores(standing).to_csv(votes_draft / "scores.csv", index=False)
    return votes_draft


def _vote(parameters: Parameters, ballot: Ballot) -> None:
    """Serves the page until all is judged, the page's button or Ctrl-C."""
    settings = parameters.vote
    left = len(ballot.pending(settings.voter))
    if not left:
        judged = counted(len(ballot.pairs), "pair")
        console.note(f"{settings.voter} has judged all {judged}. For more: vote.pairs; for somebody else: vote.voter.")
        return
    with (
        served(ballot, settings.voter, settings.port) as url,
        stop_request(lambda: console.note("Stopping; every choice is stored.")) as stop,
    ):
        console.note(f"{counted(left, 'pair')} to judge by {settings.voter}. Open this page on this machine:")
        console.note(url)
        console.note("Keys: 1 first, 2 second, 0 equal, s skip, u undo. The button finish or Ctrl-C ends it.")
        # Without a screen, a browser would be a program that takes the terminal.
        screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if settings.open_browser and sys.stdout.isatty() and screen:
            webbrowser.open(url)
        while stop.by is None and not ballot.finished.wait(0.3):
            pass


def _report_blind(choices: Sequence[Choice], folder: Path) -> None:
    """Says, and writes, what share prefers the trained model."""
    judged = [choice for choice in choices if choice.preference is not None]
    if not judged:
        console.note("Nothing was judged yet.")
        return
    chosen = [1 - (choice.preference or 0.0) for choice in judged]  # The base model's picture is the first.
    found = preference(chosen, [choice.of.unit for choice in judged])
    voters = Counter(choice.voter for choice in judged)
    entry = asdict(found) | {"verdict": found.verdict, "voters": dict(voters)}
    (folder / "ab.json").write_text(json.dumps(entry, indent=2), encoding="utf-8")
    _table(judged).assign(trained=chosen).to_csv(folder / "ab.csv", index=False)
    console.note(
        f"Blind: the trained model's picture is preferred in {found.share:.0%} of {counted(found.choices, 'choice')} by"
        f" {counted(len(voters), 'voter')} on {counted(found.prompts, 'held-out prompt')}, 95% interval"
        f" {found.ci_low:.0%} to {found.ci_high:.0%} ({found.interval}; ties count one half): {found.verdict}."
    )


def _report_head(file: Path) -> None:
    """Fits a head, if there are enough choices, and says how to train with it."""
    there = decided(read_choices(file).standing)
    if there < LEAST:
        console.note(f"{counted(there, 'decided choice')} for a reward so far; it needs {LEAST}.")
        return
    console.note(f"A reward of these choices, with pixels as features: {fitted_head(file, PIXELS)}.")
    console.note(f"Train with it: --params=reward=null,rewards.votes.options.head={file.with_name(FILE)}")


def _table(choices: Sequence[Choice]) -> pd.DataFrame:
    rows: list[dict[str, Any]] = [choice.line() for choice in choices]
    return pd.DataFrame(rows, columns=_COLUMNS)
