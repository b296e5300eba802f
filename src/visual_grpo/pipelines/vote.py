"""Lets people choose between pictures, and evaluates their choices."""

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
from kedro.pipeline import Node, Pipeline

from visual_grpo.common import console
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.files import write_csv
from visual_grpo.common.processes import stop_request
from visual_grpo.config.pipelines import VoteConfig
from visual_grpo.data.manifest import FEW_PROMPTS, RecordTable
from visual_grpo.evaluation.paired import preference
from visual_grpo.evaluation.verdict import FEW_NOTE
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.operations.vote_pairs import SIDES, find_pairs
from visual_grpo.rewards.votes.choices import AB, Ballot, Choice, read_choices
from visual_grpo.rewards.votes.head import PIXELS, family_scores
from visual_grpo.rewards.votes.server import served
from visual_grpo.rewards.votes.votes_reward import FILE, LEAST, decided_pairs, fitted_head


def create_pipeline() -> Pipeline:
    return Pipeline(
        [
            Node(
                collect_votes,
                ["params:run_spec", "records", *(f"path:{name}" for name in ("adapters", *SIDES, "votes")), "draft"],
                "votes",
                name="collect_votes",
            )
        ],
        tags=["apart", "model", "parameters_of.vote.adapter"],
    )


CHOICES = "01_raw/votes/choices.jsonl"
"""File in the folder ``output``, unless ``vote.choices`` names a different file."""
_COLUMNS = ["voter", "choice", "pair", "source", "prompt", "record", "family", "first", "second", "at"]


def collect_votes(
    spec: RunSpec, records: RecordTable, latest: Path, baseline: Path, trained: Path, present: Path, draft: Path
) -> Path:
    """Returns the folder with the results of all choices, which will replace ``present``.

    ``vote.choices`` has each choice as soon as it is made.
    """
    parameters = spec.config
    if parameters.data.frames is not None:
        raise UserError(
            f"vote compares still pictures, and data.frames is {parameters.data.frames}: the samples are videos. Judge"
            " them with a reward (docs/rewards.md), or look at them with generate."
        )
    file = Path(parameters.vote.choices or Path(parameters.output) / CHOICES)
    if present.resolve() in file.resolve().parents:
        raise UserError(
            f"vote.choices is {file}, in a folder that each run of this pipeline replaces; keep choices with the data"
        )
    for line in read_choices(file).damaged:
        console.note(f"{file}: a line cannot be read and is ignored: {line}")
    pairs = find_pairs(spec, records, file, latest, (baseline, trained))
    ballot = Ballot(pairs, file, parameters.vote.seed)
    if ballot.identical:
        where = f"{len(ballot.identical)} of {counted(len(pairs), 'pair')}"
        become = "counted as ties, without asking" if parameters.vote.source == AB else "left out: they teach nothing"
        console.note(f"The two pictures are identical in {where}, {become}.")
    _vote(parameters.vote, ballot, present.with_suffix(".html"))
    if parameters.vote.source != AB:
        _fit_head(file)
    elif ballot.pairs:  # Where all are identical, that is the result.
        _report_blind(ballot.standing(), draft)
    standing = read_choices(file).standing
    write_csv(draft / "choices.csv", _table(standing))
    write_csv(draft / "scores.csv", family_scores(standing))
    return draft


def _vote(settings: VoteConfig, ballot: Ballot, door: Path) -> None:
    """Serves the page until every pair is judged, or the page's button or Ctrl-C ends the vote.

    ``door`` is a file that leads the browser to the page: other users see a program's arguments, and the page's address
    is secret.
    """
    left = len(ballot.pending(settings.voter))
    if not ballot.pairs:
        return
    if not left:
        judged = counted(len(ballot.pairs), "pair")
        console.note(
            f"All {judged} are judged (voter: {settings.voter}). For more pairs, raise vote.pairs; for a different"
            " voter, set vote.voter."
        )
        return
    with (
        served(ballot, settings.voter, settings.port) as url,
        stop_request(lambda: console.note("Stopping; every choice is stored.")) as stop,
    ):
        console.note(f"{counted(left, 'pair')} to judge (voter: {settings.voter}). Open this page on this machine:")
        console.note(url)
        console.note("Keys: 1 first, 2 second, 0 equal, s skip, u undo. The finish button or Ctrl-C ends the vote.")
        # Without a screen, a browser would be a program that takes the terminal.
        screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if settings.open_browser and sys.stdout.isatty() and screen:
            door.parent.mkdir(parents=True, exist_ok=True)
            door.unlink(missing_ok=True)
            door.touch(0o600, exist_ok=False)
            door.write_text(f'<meta http-equiv="refresh" content="0; url={url}">', encoding="utf-8")
            webbrowser.open(door.resolve().as_uri())
        try:
            while stop.by is None and not ballot.finished.wait(0.3):
                pass
        finally:
            door.parent.mkdir(parents=True, exist_ok=True)
            door.unlink(missing_ok=True)


def _report_blind(choices: Sequence[Choice], folder: Path) -> None:
    """Prints and writes how often the trained model is preferred."""
    judged = [choice for choice in choices if choice.preference is not None]
    if not judged:
        console.note("There is no result yet: nobody has chosen.")
        return
    chosen = [1 - (choice.preference or 0.0) for choice in judged]  # The base model's picture is the first.
    result = preference(chosen, [choice.of.unit for choice in judged])
    voters = Counter(choice.voter for choice in judged)
    entry = asdict(result) | {"verdict": result.verdict, "voters": dict(voters)}
    (folder / "ab.json").write_text(json.dumps(entry, indent=2), encoding="utf-8")
    write_csv(folder / "ab.csv", _table(judged).assign(trained=chosen))
    console.note(
        f"Blind: the trained model's picture is preferred in {result.mean_share:.0%} (mean over"
        f" {counted(result.prompts, 'held-out prompt')}; {counted(result.choices, 'choice')} by"
        f" {counted(len(voters), 'voter')}; ties, here {result.ties}, count one half), 95% interval"
        f" {result.ci_low:.0%} to {result.ci_high:.0%} (as of {result.effective:.3g} independent choices):"
        f" {result.verdict}.{f' {FEW_NOTE}' * (result.prompts < FEW_PROMPTS)}"
    )


def _fit_head(file: Path) -> None:
    """Fits a head, if there are enough pairs, and says how to train with it."""
    pairs = decided_pairs(read_choices(file).standing)
    if pairs < LEAST:
        console.note(f"{counted(pairs, 'decided pair')} so far; a reward needs {LEAST}.")
        return
    console.note(f"A reward of these choices, with pixels as features: {fitted_head(file, PIXELS)}.")
    console.note(f"Train with it: --params=reward=null,rewards.votes.options.head={file.with_name(FILE)}")


def _table(choices: Sequence[Choice]) -> pd.DataFrame:
    rows: list[dict[str, Any]] = [choice.line() for choice in choices]
    return pd.DataFrame(rows, columns=_COLUMNS)
