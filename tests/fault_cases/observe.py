"""Plants one fault and says how it ended, in the words of the page."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext

from tests.fault_cases import forked
from tests.fault_cases.fault import ERROR, Fault, Row
from tests.fault_cases.forked import Ended
from tests.fault_cases.world import Curves, State, World, state

LOST, TRACEBACK = "**LOST**", "**TRACEBACK**"
"""In a cell of what must never be."""
EVERYTHING, AS_WITHOUT = "everything, unchanged", "all that a run without the fault leaves"
LONGEST = 300
"""Characters of a sentence that are shown."""
_HASH = r"[0-9a-f]"
VARYING = (
    # By what MLflow was doing when the database went.
    (r"(attempt to write a readonly database|disk I/O error|Migration script.*|unable to open database file)\.", "..."),
    (r"\x1b\[[0-9;]*m", ""),
    (r"process \d+ on \S+ since [\d-]+ [\d:+]+", "process PID on HOST since TIME"),
    (r"process \d+", "process PID"),
    (rf"\b{_HASH}{{32}}\b", "ID"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"\b\d{8}-\d{6}\S*", "RUN"),
    # What is wrong depends on where a file was cut, or on which file is the one too many.
    (r": [^:]+: line \d+ column \d+ \(char \d+\)", ": ...: line N column N"),
    (r"(Too many open files): .+", r"\1: ..."),
    (r"draft-\d+", "draft-PID"),
    (r"(Out of memory|Trained 3 steps): .+", r"\1: ..."),
)


def observed(fault: Fault, world: World) -> Row:
    """The row of a fault; leaves the project as the fault, or what came after it, has left it."""
    world.reset()
    if fault.edit is not None:
        fault.edit(world.project)
    before = state(world.project)
    with (fault.beside or (lambda project: nullcontext()))(world.project):
        ended = forked.run(
            fault.run,
            world.project,
            environment=fault.environment,
            inside=fault.inside,
            moment=fault.moment,
        )
    if fault.repair is not None:
        fault.repair(world.project)
    left = kept(before, state(world.project), ended.code, world.without_fault)
    if fault.then is not None:
        left += f"; then `{fault.then}`: {_after_all(fault.then, world)}"
    return Row(
        what=fault.what,
        command=f"`{fault.run}`" if fault.run else "",
        code=str(ended.code),
        says=_sentence(fault.says, ended, world),
        kept=left,
    )


def kept(before: State, after: State, code: int, without_fault: State) -> str:
    """What of ``before`` is there ``after`` a command that ended with the exit code ``code``."""
    changed = [name for name in before.files if before.files[name] != after.files[name]]
    lost = [name for name in changed if code]
    lost += ["checkpoints"] if code and not before.checkpoints <= after.checkpoints else []
    lost += ["MLflow's rows"] if not _contains(after.curves, before.curves) else []
    if lost:
        return f"{LOST}: {', '.join(lost)}"
    if "adapters" in changed and _is_whole(after, without_fault):
        return AS_WITHOUT
    if "adapters" in changed and after.trained == without_fault.trained:
        what = "adapters of a run without the fault"
    else:
        what = f"new: {', '.join(changed)}; all else unchanged" if changed else EVERYTHING
    # What a process that was stopped had not delivered by then is chance.
    return f"{what}; MLflow's rows wait on disk" if after.waits and not code else what


def _after_all(line: str, world: World) -> str:
    """How what came after the fault ended."""
    done = forked.run(line, world.project)
    if done.code or not _is_whole(state(world.project), world.without_fault):
        return f"{LOST}: exit code {done.code}, {_single_line(done.printed[-LONGEST:], world)}"
    return AS_WITHOUT


def _is_whole(now: State, without_fault: State) -> bool:
    """Whether adapters, their metrics and MLflow's rows are those of a run without a fault, each row once."""
    [expected] = _longest(without_fault.curves)
    runs = [Counter(rows) for rows in now.curves.values()]
    once = all(count == 1 for rows in runs for count in rows.values())
    return now.trained == without_fault.trained and once and any(Counter(expected) <= rows for rows in runs)


def _longest(curves: Curves) -> list[list[tuple[str, int, float]]]:
    """The rows of the run with the most steps."""
    return sorted(curves.values(), key=lambda rows: max(step for _, step, _ in rows))[-1:]


def _contains(curves: Curves, others: Curves) -> bool:
    return all(Counter(rows) <= Counter(curves.get(run, [])) for run, rows in others.items())


def _sentence(begin: str, ended: Ended, world: World) -> str:
    """What was said, from ``begin`` to the end of that sentence; without the lines of a reward's own code."""
    if "Traceback (most recent call last)" in ended.printed:
        return f"{TRACEBACK}: {_single_line(ended.printed[-LONGEST:], world)}"
    if not begin:
        return ""
    if begin not in ended.printed:
        return f"{LOST}: {begin!r} was not said, but {_single_line(ended.printed[-LONGEST:], world)}"
    said = re.sub(r"(?m)^ *File .*\n(?: +.*\n)*", "", ended.printed[ended.printed.index(begin) :])
    end = re.search(r"[.!?](?=\s+[A-Z(=]|\s*$)|(?<!:)\n(?=\S)" if begin == ERROR else r"[.!?](?= +[A-Z(])|\n", said)
    sentence = _single_line(said[: end.end()] if end else said, world).removeprefix(ERROR)
    return _code(sentence if len(sentence) <= LONGEST else f"{sentence[:LONGEST]} ...")


def _single_line(text: str, world: World) -> str:
    for name, path in (("PROJECT", world.project), ("FOLDER", world.project.parent)):
        text = text.replace(str(path), name)
    for pattern, stable in VARYING:
        text = re.sub(pattern, stable, text)
    return " ".join(text.split())


def _code(text: str) -> str:
    """As code in a cell of a Markdown table."""
    shown = text.replace("`", "'").replace("|", "\\|")
    return f"`{shown}`"
