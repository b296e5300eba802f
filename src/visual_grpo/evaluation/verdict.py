"""The verdict of an evaluation: a few numbers and one plain sentence.

The score is the mean total on held-out prompts at the eval sampler. Next to it stand what could not be scored, the
task's measure, the best that the base model reaches by a cheap change of its sampler, and what judges say that were not
optimised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from visual_grpo.common import console
from visual_grpo.config.presets import GUARDS
from visual_grpo.data.manifest import FEW_PROMPTS
from visual_grpo.evaluation import CONFIDENCE

UNWATCHED = (
    "Warning: the only score here is the one that was trained on. A model can raise it and spoil its samples (reward"
    " hacking), and these numbers would not show that. Add a guard, a score that is measured and never trained on. The"
    " line for it, under rewards in the parameters:"
)
CARRIES_OVER, CONTRADICTED = "carries over", "contradicted"
"""A judge's outcomes for a gain besides ``not shown``; the latter is also a verdict."""
MOST_LEFT = 0.75
"""Share of the base's mean below which a gain is doubted if that is all that is left of a guard."""
NOT_JUDGED = "not judged"
"""The verdict where nothing was held out."""
NAMES = ("the base model", "the trained model")
EVAL_NOTE = "Eval prompts choose the best adapter and may occur in training too: their scores are optimistic."
FEW_NOTE = f"Fewer than {FEW_PROMPTS} independent prompts are too few to rely on the interval."
_MOST_DECIMALS, _NO_SIZE = 6, 5e-7
_DIGITS = 4
"""Significant digits of a result's numbers; evaluation.json has all."""
_OF_RESULT = {"gain": "difference", "low": "ci_low", "high": "ci_high", "base": "baseline", "trained": "trained"}
_NUMBERS = ("baseline", "trained", "difference", "ci_low", "ci_high")
_NOTHING: Mapping[str, Any] = {
    "name": "total",
    "split": "held_out",
    "sampler": "eval",
    "optimised": True,
    "unscored_differs": False,
    **dict.fromkeys(("prompts", "units", "images", "samples", "unscored_baseline", "unscored_trained"), 0),
    **dict.fromkeys((*_NUMBERS, "win_rate")),
}
"""The entry of a total of no samples."""

Entry = Mapping[str, Any]
"""Result of `compare.compare` for one score, split and sampler."""


def summarise(
    entries: Sequence[Entry],
    controls: Sequence[Entry] = (),
    *,
    names: tuple[str, str] = NAMES,
    notes: Sequence[str] = (),
    samples: str = "images",
) -> dict[str, Any]:
    """Summarises the total of held-out prompts at the eval sampler, if there are any; ``entries`` may be empty.

    ``entries`` come from `compare.compare`, ``controls`` from `compare.compare_controls`. ``verdict`` is ``better`` or
    ``worse`` if the interval excludes 0 and there are no `doubts`, else ``not shown``; or ``contradicted`` if it lies
    above 0 and a judge's below, on `FEW_PROMPTS` independent prompts or more; or `NOT_JUDGED` if no prompt was held
    out. ``fallen`` lists the guards that fell, and ``judges`` what `_judge` returns for each judge. ``names`` name the
    two sides in the sentence, and ``notes`` are sentences to be read with it. The control is that with the highest mean
    of the base model; chosen on the same samples, it is optimistically biased. ``guard_to_add`` is the line of the
    parameters that adds a guard of ``samples`` (images, videos or answers), where no guard and no judge scored any. It,
    ``task`` and ``control`` are None if there is none.
    """
    split, sampler = main_view(entries)
    rows = {entry["name"]: entry for entry in entries if (entry["split"], entry["sampler"]) == (split, sampler)}
    entry, beside = rows.get("total", _NOTHING), list(rows.values())
    judges = [_judge(row, rows[row["judge_of"]], controls) for row in beside if "judge_of" in row]
    is_contradicted = _is_gain(entry) and any(judge["outcome"] == CONTRADICTED for judge in judges)
    measure = next((row for row in beside if "measure" in row), None)
    headline = {
        "names": list(names),
        "notes": list(notes),
        **entry,
        "confidence": CONFIDENCE,
        "control": _best_control(controls),
        "task": None if measure is None else _task(measure),
        "doubts": doubts(entry, beside),
        "fallen": fallen_guards(beside),
        "judges": judges,
        "guard_to_add": _guard_to_add(beside, samples),
        "verdict": CONTRADICTED if is_contradicted else verdict(entry, beside),
    }
    return headline | {"sentence": _sentence(headline)}


def verdict(entry: Entry, beside: Iterable[Entry] = ()) -> str:
    """Returns ``better``, ``worse``, ``not shown`` or `NOT_JUDGED`; ``beside`` are the other scores of the samples."""
    if entry["split"] == "eval" or not entry["samples"]:
        return NOT_JUDGED
    if not _excludes_zero(entry) or doubts(entry, beside):
        return "not shown"
    return "better" if entry["ci_low"] > 0 else "worse"


def doubts(entry: Entry, beside: Iterable[Entry] = ()) -> list[str]:
    """Lists reasons to doubt the difference of ``entry`` although its interval excludes 0.

    Args:
        beside: the other scores of the same samples, of which guards are looked at.
    """
    if not _excludes_zero(entry):
        return []
    reasons = [FEW_NOTE[:1].lower() + FEW_NOTE[1:-1]] if entry["units"] < FEW_PROMPTS else []
    if not _is_gain(entry):
        return reasons
    if entry["unscored_differs"] and entry["unscored_trained"] > entry["unscored_baseline"]:
        reasons.append(
            f"{entry['unscored_trained']} of its {entry['samples']} samples could not be scored (base:"
            f" {entry['unscored_baseline']}), and the means are of the rest"
        )
    # A few pictures have most of the edges, so that the interval alone is wide. Scores below 0 have no shares.
    fallen = [guard for guard in fallen_guards(beside) if guard["baseline"] > 0]
    return reasons + [_fall(guard) for guard in fallen if guard["trained"] < MOST_LEFT * guard["baseline"]]


def fallen_guards(beside: Iterable[Entry]) -> list[Entry]:
    """Selects the guards whose interval lies below 0."""
    guards = [entry for entry in beside if "guard" in entry and not entry["optimised"]]
    return [guard for guard in guards if guard["ci_high"] is not None and guard["ci_high"] < 0]


def main_view(entries: Sequence[Entry]) -> tuple[str, str]:
    """Returns the main split and sampler: held-out prompts and the eval sampler if available."""
    views = dict.fromkeys((entry["split"], entry["sampler"]) for entry in entries)
    return min(views, key=lambda view: (view[0] != "held_out", view[1] != "eval"), default=("held_out", "eval"))


def result(headline: Mapping[str, Any]) -> dict[str, float]:
    """Returns a headline as numbers with short names, the main ones first, to compare runs; docs/metrics.md explains
    them. Undefined ones are left out."""
    task, control, judges = headline["task"], headline["control"], headline["judges"]
    numbers = {name: headline[key] for name, key in _OF_RESULT.items()}
    if task:
        numbers |= {"task": task["trained"], "task_base": task["baseline"]}
    if control:
        numbers |= {"gain_over_control": control["difference"], "low_over_control": control["ci_low"]}
    if differences := [judge["difference"] for judge in judges if judge["difference"] is not None]:
        numbers["by_judge"] = min(differences)
    for judge in judges:
        for prefix, key in {"judge": "difference", "judge_low": "ci_low", "judge_high": "ci_high"}.items():
            numbers[f"{prefix}/{judge['name']}"] = judge[key]
    numbers |= {"unscored": headline["unscored_trained"], "unscored_base": headline["unscored_baseline"]}
    numbers["prompts"] = headline["prompts"]
    # Tables show every digit.
    return {name: float(f"{value:.{_DIGITS}g}") for name, value in numbers.items() if value is not None}


def lines(headline: Mapping[str, Any]) -> list[str]:
    """States the headline in words: its sentence, then the warning, notes, the task's measure, the control, judges,
    guards that fell and what was unscored, if any."""
    names, unscored = headline["names"], [headline["unscored_baseline"], headline["unscored_trained"]]
    sentences = [headline["sentence"]]
    if headline["guard_to_add"]:
        sentences.append(f"{UNWATCHED} {headline['guard_to_add']}")
    sentences += headline["notes"]
    if headline["task"]:
        task = headline["task"]
        task = {**task, "name": f"{task['name']} ({task['score']})"}
        undefined = f"{task['name']}: no pair of samples could be judged."
        sentences.append(undefined if task["difference"] is None else f"{_means(task, names)}.")
    if headline["control"]:
        sentences.append(_control_line(headline["control"]))
    sentences += [_judge_line(judge, names, headline["verdict"]) for judge in headline["judges"]]
    sentences += [
        f"Not optimised, and lower: {_means(guard, names)}. Look at the pictures." for guard in headline["fallen"]
    ]
    if any(unscored):
        counts = f"base {unscored[0]}, trained {unscored[1]} of {headline['samples']} each"
        sentences.append(f"Could not be scored: {counts}{'; the shares differ' * headline['unscored_differs']}.")
    if headline["units"] < FEW_PROMPTS and not headline["doubts"] and headline["verdict"] != NOT_JUDGED:
        sentences.append(FEW_NOTE)
    return sentences + [EVAL_NOTE] * (headline["split"] == "eval")


def show(headline: Mapping[str, Any]) -> None:
    """Prints the headline in words, its sentence bold and, where there is a difference, in colour; so the warning."""
    sentence, *rest = lines(headline)
    styles = {"better": "bold green", "worse": "bold red", CONTRADICTED: "bold red"}
    console.note(sentence, style=styles.get(headline["verdict"], "bold"))
    for line in rest:
        console.note(line, style="bold yellow" if line.startswith(UNWATCHED) else "")


def change(block: Mapping[str, Any]) -> str:
    """Formats a difference as ``+0.385 [+0.330, +0.444]``, without an undefined interval."""
    low, high, digits = block["ci_low"], block["ci_high"], decimals(block)
    interval = "" if low is None else f" [{low:+z.{digits}f}, {high:+z.{digits}f}]"
    return f"{block['difference']:+z.{digits}f}{interval}"


def decimals(block: Mapping[str, Any]) -> int:
    """Returns the decimals to show: 3, or more if a number other than 0 would be shown as 0."""
    sizes = [abs(block[key]) for key in _NUMBERS if block.get(key)]
    return max([3] + [min(-math.floor(math.log10(size)), _MOST_DECIMALS) for size in sizes if size > _NO_SIZE])


def extent(entry: Entry) -> str:
    """Formats ``34 held-out prompts``, with how many of them are independent if it is not all."""
    prompts = f"{entry['prompts']} {entry['split'].replace('_', '-')} prompt{'s' * (entry['prompts'] != 1)}"
    return prompts if entry["units"] == entry["prompts"] else f"{prompts}, {entry['units']} independent"


def _excludes_zero(entry: Entry) -> bool:
    return entry["ci_low"] is not None and not entry["ci_low"] <= 0 <= entry["ci_high"]


def _is_gain(entry: Entry) -> bool:
    return entry["ci_low"] is not None and entry["ci_low"] > 0


def _task(entry: Entry) -> dict[str, Any]:
    return {**entry, "name": entry["measure"], "score": entry["name"], "verdict": verdict(entry)}


def _judge(entry: Entry, judged: Entry, controls: Sequence[Entry]) -> dict[str, Any]:
    """Returns a judge's entry with its best control and ``outcome``.

    It is `CONTRADICTED` if the interval lies below 0. It is `CARRIES_OVER` if what is ``judged`` gains, and the judge's
    intervals lie above 0, of the gain and of that over the control that is best by this judge; else ``not shown``.
    """
    control, found = _best_control(controls, entry["name"]), verdict(entry)
    carries_over = found == "better" and _is_gain(judged) and (control is None or _is_gain(control))
    outcome = CONTRADICTED if found == "worse" else CARRIES_OVER if carries_over else "not shown"
    return {**entry, "control": control, "outcome": outcome}


def _guard_to_add(beside: Sequence[Entry], samples: str) -> str | None:
    optimised = {entry["name"] for entry in beside if entry["optimised"]}
    others = [entry for entry in beside if entry["name"].partition("/")[0] not in optimised]
    if any(entry["difference"] is not None for entry in others):
        return None
    if samples == "answers":  # The built-in guards are of pictures.
        return 'my_guard: {function: "my_rewards:my_guard", weight: 0}'
    name = next((guard for guard in (*GUARDS, "jpeg_size", "fine_noise") if guard not in optimised), "group_diversity")
    return f"{name}: {{weight: 0{', frames: all' * (samples == 'videos')}}}"


def _best_control(controls: Sequence[Entry], score: str = "total") -> dict[str, Any] | None:
    entries = [entry for entry in controls if entry["name"] == score]
    if not entries:
        return None
    best = max(entries, key=lambda e: -math.inf if e["baseline"] is None else e["baseline"])
    return {**best, "of": len(entries)}


def _means(block: Mapping[str, Any], names: Sequence[str]) -> str:
    digits = decimals(block)
    means = f"{block['baseline']:z.{digits}f} for {names[0]}, {block['trained']:z.{digits}f} for {names[1]}"
    return f"{block['name']}: {means}, {change(block)}"


def _judge_line(judge: Mapping[str, Any], names: Sequence[str], verdict: str) -> str:
    """Says what a judge found, against the base and its best control, and what follows for a gain."""
    name = judge["name"] if judge["judge_of"] == "total" else f"{judge['name']} (of {judge['judge_of']})"
    control = judge["control"]
    if judge["difference"] is None:
        return f"Judge {name}: no pair of samples could be scored{_judged_on(judge)}."
    level = "" if judge["confidence"] == CONFIDENCE else f" ({100 * judge['confidence']:.4g}% interval)"
    over = ""
    if control and control["difference"] is not None:
        which = "the control that it rates best" if control["of"] > 1 else "the control"
        over = f"; over {which} ({control['sampler'].removeprefix('eval ')}): {change(control)}"
    said = {CARRIES_OVER: "The gain carries over", CONTRADICTED: "It contradicts a gain"}
    follows = f" {said.get(judge['outcome'], 'The data do not show whether the gain carries over')}."
    if verdict not in ("better", CONTRADICTED) and judge["outcome"] != CONTRADICTED:
        follows = ""
    return f"Judge {_means({**judge, 'name': name}, names)}{level}{over}{_judged_on(judge)}.{follows}"


def _judged_on(judge: Mapping[str, Any]) -> str:
    """Says how many of the prompts a judge scored, if it is not all, such as those with a target image."""
    all_prompts = judge["all_prompts"]
    return "" if judge["prompts"] == all_prompts else f"; judged on {judge['prompts']} of {all_prompts} prompts"


def _control_line(control: Mapping[str, Any]) -> str:
    """Compares the trained model with the base model's best control."""
    settings = control["sampler"].removeprefix("eval ")
    if control["difference"] is None:
        return f"Control: the base model with {settings} has no sample that could be scored."
    best = f" (the best of {control['of']} by the total)" if control["of"] > 1 else ""
    return (
        f"Control: without training, {settings} gives the base model {control['baseline']:z.{decimals(control)}f}"
        f"{best}; the trained model against that: {change(control)}."
    )


def _sentence(headline: Mapping[str, Any]) -> str:
    base, trained = headline["names"]
    where = f"On {extent(headline)} ({headline['images']} pairs)"
    nothing = f"Nothing was held out, so there is nothing to judge {trained} by."
    if not headline["samples"]:
        return nothing
    if headline["difference"] is None:
        return f"No pair of samples could be scored, so nothing is shown about {trained}."
    digits = decimals(headline)
    interval = "no interval" if headline["ci_low"] is None else f"{headline['confidence']:.0%} interval"
    means = (
        f"mean {headline['name']} {headline['trained']:z.{digits}f} against {headline['baseline']:z.{digits}f} for"
        f" {base}, {change(headline)} ({interval})"
    )
    if headline["verdict"] == NOT_JUDGED:
        return f"{nothing} {where}: {means}."
    if headline["verdict"] == CONTRADICTED:
        against = [j for j in headline["judges"] if j["outcome"] == CONTRADICTED]
        reasons = [f"the judge {_means(judge, headline['names'])}" for judge in against] + headline["doubts"]
        return f"{where} the gain of {trained} is contradicted: {'; '.join(reasons)}; {means}."
    if headline["verdict"] != "not shown":
        notes = (_control_note, _judges_note, _guards_note) if headline["verdict"] == "better" else ()
        return f"{where} {trained} is {headline['verdict']}: {means}.{''.join(note(headline) for note in notes)}"
    if headline["doubts"]:
        claim = "better" if headline["difference"] > 0 else "worse"
        return f"{where} the data do not show that {trained} is {claim}: {'; '.join(headline['doubts'])}; {means}."
    return f"{where} no difference is shown: {means}."


def _control_note(headline: Mapping[str, Any]) -> str:
    """Says that the control reaches as much as a gain, where it does."""
    control = headline["control"]
    if not control or control["ci_low"] is None or control["ci_low"] > 0:
        return ""
    reached = "more" if control["ci_high"] < 0 else "as much"
    settings = control["sampler"].removeprefix("eval ")
    reaches = f"{reached}: {control['baseline']:z.{decimals(control)}f}"
    return f" But {settings} alone gives the base model {reaches}, without any training."


def _guards_note(headline: Mapping[str, Any]) -> str:
    """Says what got worse despite a gain, by the guards."""
    return f" But {'; '.join(map(_fall, headline['fallen']))}." if headline["fallen"] else ""


def _fall(guard: Entry) -> str:
    digits = decimals(guard)
    means = f"{guard['baseline']:z.{digits}f} to {guard['trained']:z.{digits}f}"
    return f"{guard['guard']} ({guard['name']} fell from {means})"


def _judges_note(headline: Mapping[str, Any]) -> str:
    """Says whether a gain carries over to the judges."""
    judges = headline["judges"]
    unsure = [judge["name"] for judge in judges if judge["outcome"] != CARRIES_OVER]
    if unsure:
        return f" The data do not show whether the gain carries over to {', '.join(unsure)}."
    return f" The gain carries over to {', '.join(judge['name'] for judge in judges)}." if judges else ""
