"""The report as one HTML page: what its template shows, and its rendering.

The page needs no other file and no network. Prompts, names and answers are data: Jinja escapes them, and the page's
own policy (Content-Security-Policy) lets nothing run but the page's own script.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from visual_grpo.config import flatten
from visual_grpo.config.validation import validate
from visual_grpo.errors import UserError
from visual_grpo.evaluation import curves
from visual_grpo.evaluation.compare import retotalled
from visual_grpo.evaluation.doubts import Entry
from visual_grpo.evaluation.examples import choose
from visual_grpo.evaluation.generate import read_scores
from visual_grpo.evaluation.headline import EVAL_NOTE, change, decimals, extent, headline, lines
from visual_grpo.evaluation.pictures import data_uri
from visual_grpo.trained_adapters import CODE

CARD_SIDE, THUMBNAIL_SIDE = 256, 128
"""Largest side in pixels of an image in a gallery, and of one in the list of all pairs."""
MOST_PAIRS, MOST_BYTES = 700, 6_000_000
"""Limits of the list of all pairs: their number, and the length of their embedded images."""
VERDICTS = {"not shown": "no difference shown"}
_LINEAGE = {
    "mlflow_run_id": "MLflow run",
    "run_name": "run",
    "commit": "commit",
    "git.commit": "commit",
    "git.state": "code",
    "command": "command",
    "resumed.command": "resumed by",
    "data": "data digest",
    "model": "base model",
    "model_digest": "base model digest",
    "seed": "training seed",
    "steps": "steps",
    "best_step": "best step",
    "best_eval_total": "best eval total",
    "adapter": "chosen adapter",
    "samples": "training samples",
}
"""What is known of a training (``training.json``), first things first, and what the page calls it."""
_LONG = 120
"""Characters of a value in the lineage; anything longer has its place elsewhere."""


def render(
    evaluation: Mapping[str, Any],
    baseline: Path,
    trained: Path,
    pairs: pd.DataFrame,
    history: pd.DataFrame,
    alarms: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The page. ``pairs`` come from `examples.all_pairs`, ``history`` has one row per training step, ``alarms`` are
    of `alarm.shown_alarms`."""
    entries, controls = evaluation["rewards"], evaluation.get("controls", ())
    found = evaluation.get("headline") or headline(entries, controls)
    parameters = evaluation.get("parameters") or evaluation.get("training", {}).get("parameters") or {}
    script = _source("pairs.js")
    chosen, gate = choose(pairs, found["split"], found["sampler"]), evaluation.get("gate", {})
    listed, total = _listed(pairs, found, baseline, trained), len(pairs)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            script=script,
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            style=_source("style.css"),
            found=found,
            title=_title(found),
            shown_verdict=_verdict(found, gate),
            lines=lines(found),
            lineage=list(_lineage(evaluation)),
            views=_views(entries),
            controls=_tables(controls),
            summary=_summary(found),
            guards=_guards(entries, found),
            charts=curves.charts(history, _base_value(baseline, trained, parameters)),
            size={"width": curves.WIDTH, "height": curves.HEIGHT, "left": curves.LEFT, "bottom": curves.BOTTOM},
            galleries={name: [_card(row, baseline, trained) for row in _rows(rows)] for name, rows in chosen.items()},
            unscored=int(pairs["difference"].isna().sum()),
            pairs=listed,
            total=total,
            gate=gate,
            alarms=alarms,
            differences=evaluation.get("differences", {}),
            configuration=configuration(parameters) if parameters else None,
            conditions=evaluation.get("conditions", {}),
            eval_note=EVAL_NOTE,
        )
    )


def _verdict(found: Mapping[str, Any], gate: Mapping[str, Any]) -> str:
    """In a word or two; where a promotion was decided on, its decision."""
    if gate:
        return "promoted" if all(stage["promoted"] for stage in gate.values()) else "not promoted"
    return "doubtful" if found["doubts"] else VERDICTS.get(found["verdict"], found["verdict"])


def _title(found: Mapping[str, Any]) -> str:
    first, second = found["names"]
    shown = f"The{second[3:]}" if second.startswith("the ") else second  # An adapter's name stays as it is.
    return f"{shown} against {first}"


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("visual_grpo.evaluation"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "change": change,
        "decimals": decimals,
        "extent": extent,
        "words": _words,
        "short": _short,
        "number": format,
    }
    return environment


def _source(name: str) -> str:
    """A file that is part of the page as it is; it must not go through the template, which would escape it."""
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def _views(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Per sampler, stock first: the tables of its splits, held-out first."""
    samplers = sorted(dict.fromkeys(entry["sampler"] for entry in entries), key=lambda name: name != "stock")
    return [
        {"sampler": sampler, "tables": _tables([entry for entry in entries if entry["sampler"] == sampler])}
        for sampler in samplers
    ]


def _tables(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """A table per sampler and split, held-out prompts first, with the intervals as bars."""
    keys = dict.fromkeys((entry["split"] != "held_out", entry["split"], entry["sampler"]) for entry in entries)
    found = []
    for _, split, sampler in sorted(keys, key=lambda key: key[0]):
        rows = [entry for entry in entries if (entry["split"], entry["sampler"]) == (split, sampler)]
        widest = max(rows, key=lambda entry: entry["prompts"])
        found.append({"split": split, "sampler": sampler, "widest": widest, "rows": [_scaled(e, rows) for e in rows]})
    return found


def _scaled(entry: Entry, rows: Sequence[Entry]) -> dict[str, Any]:
    """The entry with its interval in percent of the scale that its reward and its parts share, which contains 0."""
    reward = entry["name"].split("/")[0]
    ends = [0.0] + [
        end
        for other in rows
        if other["name"].split("/")[0] == reward and other["difference"] is not None
        for end in (other["ci_low"], other["ci_high"], other["difference"])
        if end is not None
    ]
    low, span = min(ends), (max(ends) - min(ends)) or 1.0
    marks = {"zero": 0.0, "low": entry["ci_low"], "high": entry["ci_high"], "at": entry["difference"]}
    scale = {name: None if value is None else 4 + 92 * (value - low) / span for name, value in marks.items()}
    return {**entry, "part": entry["name"].partition("/")[2], "scale": scale}


def _guards(entries: Sequence[Entry], found: Mapping[str, Any]) -> list[Entry]:
    """Rewards that are reported but not optimised, in the headline's split and sampler."""
    where = (found["split"], found["sampler"])
    return [e for e in entries if not e["optimised"] and "/" not in e["name"] and (e["split"], e["sampler"]) == where]


def _lineage(evaluation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, value) of what the result was made by and of."""
    training = {name: value for name, value in evaluation.get("training", {}).items() if value is not None}
    order = [name for name in _LINEAGE if name in training] + [name for name in training if name not in _LINEAGE]
    for name in order:
        value = training[name]
        if isinstance(value, str | int | float) and len(str(value)) <= _LONG:
            shown = f"{name} in training" if name.startswith(CODE) else name.replace("_", " ")
            yield _LINEAGE.get(name, shown), f"{value:.4g}" if isinstance(value, float) else str(value)
    for name in ("adapter", "seed"):
        if evaluation.get(name) is not None:
            yield {"adapter": "adapter folders", "seed": "evaluation seed"}[name], str(evaluation[name])


def _base_value(baseline: Path, trained: Path, parameters: Mapping[str, Any]) -> float | None:
    """What training's own evaluation would have measured of the base model."""
    settings = parameters.get("evaluation", {})
    prompts = parameters.get("evaluation.prompts", settings.get("prompts"))
    return curves.base_value(retotalled(read_scores(baseline), read_scores(trained).attrs["weights"]), prompts)


def _card(row: Mapping[str, Any], baseline: Path, trained: Path, side: int = CARD_SIDE) -> dict[str, Any]:
    """A pair as the template and the page's script show it."""
    sources = row.get("source")
    return {
        "prompt": row["prompt"],
        "split": row["split"],
        "sampler": row["sampler"],
        "index": row["index"],
        "sources": [] if sources is None else [data_uri(baseline / path, side) for path in sources],
        "baseline": data_uri(baseline / row["file_baseline"], side),
        "trained": data_uri(trained / row["file_trained"], side),
        "before": _number(row["total_baseline"]),
        "after": _number(row["total_trained"]),
        "change": _number(row["difference"]),
        "answers": [row.get("answer_baseline"), row.get("answer_trained")],
    }


def _listed(pairs: pd.DataFrame, found: Mapping[str, Any], baseline: Path, trained: Path) -> list[dict[str, Any]]:
    """The pairs that the page embeds, the headline's first, within `MOST_PAIRS` and `MOST_BYTES`."""
    first = (pairs["split"] == found["split"]).astype(int) * 2 + (pairs["sampler"] == found["sampler"])
    ordered = pairs.loc[first.sort_values(ascending=False, kind="stable").index[:MOST_PAIRS]]
    cards: list[dict[str, Any]] = []
    size = 0
    for row in _rows(ordered):
        card = _card(row, baseline, trained, THUMBNAIL_SIDE)
        size += sum(len(image) for image in (card["baseline"], card["trained"], *card["sources"]))
        if size > MOST_BYTES:
            break
        cards.append(card)
    return cards


def _summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """The scores of the controls' table, and what it calls them."""
    task = found["task"]
    names = {found["score"]: found["score"]} | ({task["score"]: task["name"]} if task else {})
    return {"scores": list(names), "names": names}


def _words(name: str) -> str:
    return name.replace("_", "-")


def _short(value: str) -> str:
    """The first characters of a digest or id; any other value unchanged."""
    return f"{value[:12]}…" if re.fullmatch(r"[0-9a-f]{20,}", value) else value


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _number(value: float) -> float | None:
    return None if pd.isna(value) else round(float(value), 4)


BASE = Path("conf/base/parameters.yml")
_RUNS_OWN = ("output", "resume")
"""Parameters that say where a run writes and how it went on: never a difference in settings."""


def configuration(parameters: Mapping[str, Any], base: Path = BASE) -> dict[str, list[tuple[str, Any, Any]]]:
    """``changed`` and ``all`` parameters as (dotted name, value, value in conf/base).

    ``parameters`` is the tree, or already flat. Without a usable file ``base``, nothing counts as changed.
    """
    own = flatten(parameters)
    before = _base_parameters(base)
    rows = [(name, value, before.get(name)) for name, value in sorted(own.items())]
    sections = {name.partition(".")[0] for name in own}
    # A section that is not there at all, such as how to retrain, is none of the result's.
    absent = (name for name in sorted(before) if name not in own and name.partition(".")[0] in sections)
    rows += [(name, None, before[name]) for name in absent]
    changed = [row for row in rows if before and row[1] != row[2] and row[0] not in _RUNS_OWN]
    return {"changed": changed, "all": [row for row in rows if row[0] in own]}


def _base_parameters(path: Path) -> dict[str, Any]:
    """Those of a file, with the schema's defaults; none where there is no such file or it is no whole configuration."""
    if not path.is_file():
        return {}
    try:
        return flatten(validate(yaml.safe_load(path.read_text(encoding="utf-8"))).model_dump(mode="json"))
    except (UserError, yaml.YAMLError, TypeError):
        return {}
