"""The report as one HTML page: what its template shows, and its rendering.

The page needs no other file and no network. Prompts, names and answers are data: Jinja escapes them, and the page's
own policy (Content-Security-Policy) lets nothing run but the page's own script.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from visual_grpo.adapter_folder import REWARD_CODE
from visual_grpo.config import flatten
from visual_grpo.evaluation.comparison import EVAL_SAMPLER
from visual_grpo.evaluation.pictures import data_uri
from visual_grpo.evaluation.plots import Curves
from visual_grpo.evaluation.verdict import EVAL_NOTE, UNWATCHED, Entry, change, decimals, extent, lines
from visual_grpo.rewards.judges import MissingJudge, missing_judges

CARD_SIDE, THUMBNAIL_SIDE = 1024, 128
"""Largest side in pixels of an image in a gallery, where it can be enlarged, and of one in the list of all pairs."""
MOST_PAIRS = 700
"""Limit of the list of all pairs."""
_LINEAGE = {
    "mlflow_run_id": "MLflow run",
    "run.name": "run",
    "finished": "finished",
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
"""Facts of a training (``training.json``) in the order of the page, and their names there."""
_SAMPLERS = {
    "eval": "plain pipeline, sampling.eval",
    "rollout": "tokens as in training, sampling.rollout",
    "sde": "noise as in training, sde",
}
"""Name of a sampler -> what it is, with its parameter where it has one."""
_LONG = 120
"""Characters of a value in the lineage."""
REMOVED = "removed"
_RUNS_OWN = ("output", "resume")
"""Parameters that say where a run writes and how it went on: never a difference in settings."""


def render(
    evaluation: Mapping[str, Any],
    baseline: Path,
    trained: Path,
    pairs: pd.DataFrame,
    chosen: Mapping[str, pd.DataFrame],
    curves: Sequence[Curves],
    alarms: Sequence[Mapping[str, Any]],
    film: Mapping[str, Any],
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    entries, headline, gate = evaluation["rewards"], evaluation["headline"], evaluation.get("gate", {})
    training, task = evaluation.get("training", {}), headline["task"]
    parameters = evaluation.get("parameters") or training.get("parameters")
    measures = {headline["name"]: headline["name"]} | ({task["score"]: task["name"]} if task else {})
    measures |= {judge["name"]: f"judge {judge['name']}" for judge in headline["judges"]}
    script, style = (_source(name) for name in ("pairs.js", "style.css"))
    return _template().render(
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=style,
        headline=headline,
        title=_title(headline),
        run=", ".join(str(training[name]) for name in ("run.name", "finished") if name in training),
        shown_verdict=_verdict(headline, gate),
        lines=[line for line in lines(headline) if not line.startswith(UNWATCHED)],
        unwatched=UNWATCHED,
        lineage=list(_lineage(evaluation)),
        views=_views(entries),
        controls=_tables(evaluation.get("controls", ())),
        measures=measures,
        guards=_guards(entries, headline),
        missing_judges=_missing_judges(entries, parameters),
        curves=curves,
        galleries={name: [_card(row, baseline, trained, CARD_SIDE) for row in _rows(c)] for name, c in chosen.items()},
        unscored=int(pairs["difference"].isna().sum()),
        pairs=[_card(row, baseline, trained, THUMBNAIL_SIDE) for row in _rows(_headlines_first(pairs, headline))],
        total=len(pairs),
        gate=gate,
        alarms=alarms,
        film=film,
        differences=evaluation.get("differences", {}),
        configuration=configuration(parameters, defaults) if parameters else None,
        depends_on=evaluation.get("depends_on"),
        eval_note=EVAL_NOTE,
    )


def configuration(parameters: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, list[tuple[str, Any, Any]]]:
    """Lists ``changed`` and ``all`` parameters as (dotted name, value, value in conf/base).

    ``before`` has those of conf/base, flat. If it is empty, nothing counts as changed. Of an entry that only
    ``parameters`` have, such as a reward, what is null, false or empty is left out; one that only conf/base has is one
    row, whose value is `REMOVED`.
    """
    now = flatten(parameters)
    rows = [(name, value, before.get(name, "")) for name, value in sorted(now.items())]
    changed = [row for row in rows if row[0] not in _RUNS_OWN and _differs(row, row[0] in before)]
    changed += [(name, REMOVED, "") for name in _removed(parameters, before)]
    return {"changed": changed if before else [], "all": rows}


@cache
def _template() -> Template:
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
        "hyphenated": lambda name: name.replace("_", "-"),
        "short": lambda value: f"{value[:12]}…" if re.fullmatch(r"[0-9a-f]{20,}", value) else value,
        "number": format,
        "sampler": _in_words,
    }
    return environment.get_template("report.html.j2")


def _differs(row: tuple[str, Any, Any], is_in_base: bool) -> bool:
    _, value, base = row
    if is_in_base:
        return bool(value != base)
    return any(value) if isinstance(value, list) else bool(value)


def _removed(parameters: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Returns the dotted names of the entries of conf/base that the sections of ``parameters`` lack."""
    gone = []
    for name in before:
        tree: Any = parameters
        path = name.split(".")
        for depth, key in enumerate(path):
            if not isinstance(tree, Mapping) or key not in tree:
                # A section that is not there at all, such as how to retrain, is none of the result's.
                gone += [".".join(path[: depth + 1])] if depth and isinstance(tree, Mapping) else []
                break
            tree = tree[key]
    return list(dict.fromkeys(gone))


def _in_words(sampler: str) -> str:
    """Says what a sampler is, with its parameter; ``eval`` alone means the prompts. A control keeps its name."""
    return _SAMPLERS.get(sampler, sampler)


def _source(name: str) -> str:
    """Reads a file that the template must not escape."""
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def _verdict(headline: Mapping[str, Any], gate: Mapping[str, Any]) -> str:
    if gate:
        return "promoted" if all(stage["promoted"] for stage in gate.values()) else "not promoted"
    if headline["doubts"] and headline["verdict"] == "not shown":
        return "doubtful"
    return "no difference shown" if headline["verdict"] == "not shown" else str(headline["verdict"])


def _title(headline: Mapping[str, Any]) -> str:
    first, second = headline["names"]
    shown = f"The{second[3:]}" if second.startswith("the ") else second  # An adapter's name stays as it is.
    return f"{shown} against {first}"


def _lineage(evaluation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Returns (name, value) pairs: what made the result, and from what."""
    training = evaluation.get("training", {})
    for name in dict.fromkeys([*_LINEAGE, *training]):
        value = training.get(name)
        if isinstance(value, str | int | float) and len(str(value)) <= _LONG:
            shown = f"{name} in training" if name.startswith(REWARD_CODE) else name.replace("_", " ")
            yield _LINEAGE.get(name, shown), f"{value:.4g}" if isinstance(value, float) else str(value)
    for name, shown in {"adapter": "adapter folders", "seed": "evaluation seed"}.items():
        if evaluation.get(name) is not None:
            yield shown, str(evaluation[name])


def _views(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    samplers = sorted(dict.fromkeys(entry["sampler"] for entry in entries), key=lambda name: name != EVAL_SAMPLER)
    return [{"sampler": name, "tables": _tables([e for e in entries if e["sampler"] == name])} for name in samplers]


def _tables(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Makes a table per sampler and split, held-out prompts first, with the intervals as bars.

    A reward and its parts share a scale: colour distances run to 100, other rewards to 1."""
    tables: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        tables.setdefault((entry["split"], entry["sampler"]), []).append(entry)
    shown = []
    for (split, sampler), rows in sorted(tables.items(), key=lambda table: table[0][0] != "held_out"):
        reaches: dict[str, float] = defaultdict(float)
        for row in rows:
            sizes = [abs(row[key]) for key in ("ci_low", "ci_high", "difference") if row[key] is not None]
            reaches[_reward(row)] = max([reaches[_reward(row)], *sizes])
        widest = max(rows, key=lambda entry: entry["prompts"])
        scaled = [_scaled(row, reaches[_reward(row)] or 1.0) for row in rows]
        shown.append({"split": split, "sampler": sampler, "widest": widest, "rows": scaled})
    return shown


def _reward(entry: Entry) -> str:
    """Returns the reward that a score is of, or a part of."""
    return str(entry["name"].partition("/")[0])


def _scaled(entry: Entry, reach: float) -> dict[str, Any]:
    """Adds the interval in percent of the scale from -``reach`` to ``reach``."""
    marks = {"low": entry["ci_low"], "high": entry["ci_high"], "at": entry["difference"]}
    scale = {name: None if value is None else 50 + 46 * value / reach for name, value in marks.items()}
    return {**entry, "part": entry["name"].partition("/")[2], "scale": scale}


def _guards(entries: Sequence[Entry], headline: Mapping[str, Any]) -> list[Entry]:
    """Selects rewards that are reported but not optimised, in the headline's split and sampler; judges stand apart."""
    shown = (e for e in entries if (e["split"], e["sampler"]) == (headline["split"], headline["sampler"]))
    return [e for e in shown if not e["optimised"] and "/" not in e["name"] and "judge_of" not in e]


def _missing_judges(entries: Sequence[Entry], parameters: Mapping[str, Any] | None) -> list[MissingJudge]:
    optimised = dict.fromkeys(entry["name"] for entry in entries if entry["optimised"])
    return missing_judges(parameters.get("rewards", {}), optimised) if parameters else []


def _headlines_first(pairs: pd.DataFrame, headline: Mapping[str, Any]) -> pd.DataFrame:
    """Selects at most `MOST_PAIRS` pairs, the headline's split and sampler first."""
    first = (pairs["split"] == headline["split"]).astype(int) * 2 + (pairs["sampler"] == headline["sampler"])
    return pairs.loc[first.sort_values(ascending=False, kind="stable").index[:MOST_PAIRS]]


def _card(row: Mapping[str, Any], baseline: Path, trained: Path, side: int) -> dict[str, Any]:
    numbers = [row["total_baseline"], row["total_trained"], row["difference"]]
    before, after, gain = (None if pd.isna(number) else round(float(number), 4) for number in numbers)
    return {
        "prompt": row["prompt"],
        "split": row["split"],
        "sampler": _in_words(row["sampler"]),
        "index": row["index"],
        "given": [(name, data_uri(baseline / path, side)) for name, path in given(row).items()],
        "baseline": data_uri(baseline / row["file_baseline"], side),
        "trained": data_uri(trained / row["file_trained"], side),
        "before": before,
        "after": after,
        "change": gain,
        "answers": [row.get("answer_baseline"), row.get("answer_trained")],
    }


def given(row: Mapping[Any, Any]) -> dict[str, str]:
    """Returns the pictures of a pair's record by their captions: those to edit, and its target if it has one."""
    sources, target = row.get("source"), row.get("target")
    paths = [] if sources is None else list(sources)
    named = {"source" if len(paths) == 1 else f"source {number}": path for number, path in enumerate(paths, 1)}
    return named | ({"target": target} if isinstance(target, str) else {})


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]
