"""Provenance: what a result depends on, kept with it, and how that differs from a different result's.

It maps names to JSON values: ``parameters`` to the parameter tree, the names of `INPUTS`, `RUNTIME` and of the
rewards' code and files to digests or words, and ``unread`` to patterns of parameters that no judged sample of the model
depends on. Folders of samples have it in `FILE_NAME`, a checkpoint in the entry ``provenance`` of its metadata, and
adapters in training.json, next to facts of their training. `training.made_with` makes it; `differences` compares two,
as far as a kind of result is concerned (`config.decides`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from visual_grpo.adapter_folder import REWARD_CODE, REWARD_COMMIT, REWARD_FILE
from visual_grpo.common.digests import option_files, tree_digest
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.common.importing import code_digest, option_code
from visual_grpo.config import Parameters, flatten, merged
from visual_grpo.config.decides import DEPENDS_ON, Decides, decides, declared, is_of_the_command
from visual_grpo.config.presets import AUTO
from visual_grpo.rewards.catalogue import is_negative_points, transport_of

Provenance = Mapping[str, Any]
Differences = dict[str, tuple[Any, Any]]
"""Name -> value in the first and in the second; None = not there."""

SOURCES, NUMERICS = "source.digest", "numerics"
RUNTIME = {SOURCES: "source files of this project", NUMERICS: "versions of libraries, or kind of processor"}
"""Entry -> what it identifies; a different value changes the last bits."""
INPUTS = {
    "model_digest": (Decides.CONTENT | Decides.SAMPLES | Decides.TRAINING, "base model"),
    "model_content": (Decides.SAMPLES | Decides.TRAINING, "files of the base model"),
    "model_lora": (Decides.SAMPLES | Decides.TRAINING, "LoRA in the base model"),
    "data": (Decides.CONTENT | Decides.ASKED | Decides.SAMPLES | Decides.TRAINING, "data"),
    "start": (Decides.TRAINING, "adapters at the start"),
    "family_code": (Decides.SAMPLES | Decides.TRAINING, "code of the family"),
    # Samples of a GPU and of a CPU do not pair, but a training may go on elsewhere: it does not depend on ASKED.
    "device": (Decides.ASKED, "kind of device"),
}
"""Entry -> what it decides, and what it identifies."""
RESUMED, ADJUSTED = "resumed.", "resumed.parameters"
"""RESUMED + an entry's name: its later values in a resumed training, a line each. ADJUSTED: parameters that a resume
changed (`training.resuming.adjusted`)."""
_FIXED = {
    "git.commit": "commit",
    "git.state": "uncommitted changes",
    "git.changes": "digest of these changes",
    **RUNTIME,
    "parameters": "parameters",
}
"""Entries that must be equal in all parts of a training that can be repeated."""
MEANING = {name: meaning for name, (_, meaning) in INPUTS.items()} | RUNTIME
FILE_NAME, MADE_FROM = "provenance.json", "made_from"
"""File in a folder of samples, which also holds the digest of the other files. Entry: digests of the artifacts with
which alone the result can be judged, by their names in the catalog."""


def code(config: Parameters) -> dict[str, str]:
    """Returns the entries of the user's code, and of files that options of rewards name."""
    digests: dict[str, str] = {}
    for name, reward in config.rewards.items():
        digests |= {
            f"{REWARD_FILE}{name}: {o}": found for o, found in option_files(reward.options, config.output).items()
        }
        digests |= {f"{REWARD_CODE}{name}: {option}": found for option, found in option_code(reward.options).items()}
        if reward.function is not None:
            digests[f"{REWARD_CODE}{name}"] = code_digest(reward.function)
    return digests | ({"family_code": code_digest(config.model.family)} if ":" in config.model.family else {})


def values(provenance: Provenance, about: Decides, *, rounding: bool = True) -> dict[str, Any]:
    """Returns the parameters and digests that decide results of the kinds ``about``, by dotted names.

    Args:
        rounding: also those that change the last bits alone.
    """
    tree = provenance.get("parameters", {})
    ignored = [*_transport(tree), *_unread(provenance, about)]
    found = {
        name: value
        for name, value in flatten(tree).items()
        if decides(name, about & ~Decides.CONTENT, rounding=rounding)
        and not any(_begins(name, pattern) for pattern in ignored)
    }
    found |= {name: digest for name, digest in provenance.items() if _kinds(name) & about}
    if rounding:
        found |= {name: provenance[name] for name in RUNTIME if name in provenance}
    # A section of which nothing decides may be there or not.
    return {name: value for name, value in found.items() if value not in (None, {})}


def differences(
    before: Provenance,
    now: Provenance,
    about: Decides,
    *,
    rounding: bool = True,
    covers: bool = False,
    but: Sequence[str] = (),
) -> Differences:
    """Returns how two results differ in what decides results of the kinds ``about``, in order of the names.

    Args:
        rounding: also in what changes the last bits alone.
        covers: a result of more samples than ``now`` asks for does not differ.
        but: names that are left out.
    """
    first, second = (values(each, about, rounding=rounding) for each in (before, now))
    names = sorted((first.keys() | second.keys()) - set(but))
    found = {name: (first.get(name), second.get(name)) for name in names}
    unread, unread_now = (set(_unread(each, about)) for each in (before, now))
    for pattern in sorted(unread ^ unread_now):  # One of the results has samples that the other has not.
        depending = [name for name in found if _begins(name, pattern)]
        found = {name: pair for name, pair in found.items() if name not in depending}
        if depending and not (covers and pattern in unread_now):
            found[f"samples with the settings {pattern}"] = ("none", "some") if pattern in unread else ("some", "none")
    return {name: (a, b) for name, (a, b) in found.items() if a != b and not (covers and _covers(name, a, b))}


def continued(earlier: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Returns the entries of a resumed training: the ``earlier`` ones stay, and what has changed is a line of
    `RESUMED` + name."""
    entries = {**now, **earlier}
    for name, value in now.items():
        before = earlier.get(f"{RESUMED}{name}", "")
        if entries[name] != value and not before.endswith(value):
            entries[f"{RESUMED}{name}"] = f"{before}\n{value}".lstrip("\n")
    return entries


def mixed_parts(training: Provenance) -> list[str]:
    """Returns what differed between the parts of a resumed training, so that no single training can repeat it."""
    later = {meaning: training.get(f"{RESUMED}{name}") for name, meaning in _FIXED.items()}
    return [f"{meaning} ({', '.join(str(text).splitlines())})" for meaning, text in later.items() if text]


def described(different: Differences) -> list[str]:
    """Returns a phrase for each difference: a parameter with both values, the meaning of a digest."""
    return [
        MEANING.get(name, name) if name in MEANING or _kinds(name) else f"{name} (was {before}, is {now})"
        for name, (before, now) in different.items()
    ]


def _kinds(digest: str) -> Decides:
    if digest.startswith((REWARD_CODE, REWARD_FILE, REWARD_COMMIT)):
        return Decides.SCORES
    return INPUTS.get(digest, (Decides.NOTHING, ""))[0]


def _covers(name: str, generated: Any, asked: Any) -> bool:
    """Returns whether a result of the samples ``generated`` has those that are ``asked`` for; None = all."""
    if declared(name) != Decides.ASKED:
        return False
    if isinstance(generated, list) and isinstance(asked, list):
        return all(one in generated for one in asked)
    return generated is None or (asked is not None and asked <= generated)


def _transport(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yields the options that rewards declare as their transport, such as a timeout, by their dotted names."""
    for name, reward in (tree.get("rewards") or {}).items():
        if isinstance(reward, Mapping):
            for option in sorted(transport_of(name, reward.get("function"))):
                yield f"rewards.{name}.options.{option}"


def _unread(provenance: Provenance, about: Decides) -> Sequence[str]:
    """Returns the patterns of parameters that no judged sample depends on; of a training, none."""
    return () if Decides.TRAINING in about else provenance.get("unread", ())


def _begins(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(wanted) <= len(parts) and all(map(fnmatchcase, parts, wanted))


def parameters_of_training(
    current: Mapping[str, Any], training: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the parameters of an adapter's training, with the command's own for what concerns judging.

    Args:
        current: the parameters of this command.
        training: the entries of the training.
        overrides: this command's ``--params``, which always count.
    """
    return merged(merged(training, _of_the_command(current, training)), overrides)


def _of_the_command(current: Mapping[str, Any], training: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    taken = {}
    for name, value in current.items():
        before = training.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            taken[name] = _of_the_command(value, before, f"{prefix}{name}.")
        elif is_of_the_command(f"{prefix}{name}"):
            taken[name] = value
    return taken


def without_scoring(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters with no more rewards than what paints answers, for a command that scores nothing."""
    kept = {n: entry for n, entry in tree["rewards"].items() if entry and is_negative_points(n, entry.get("function"))}
    modules = {name: entry and {**entry, "rewards": {}} for name, entry in tree["modules"].items()}
    return {**tree, "reward": AUTO, "rewards": kept, "modules": modules}


# Results that are compared sample by sample.


def write(folder: Path, provenance: Provenance) -> None:
    """Writes the provenance of the samples in a folder, which is complete but for it."""
    text = json.dumps({**provenance, "digest": _digest(folder)}, indent=1, ensure_ascii=False)
    (folder / FILE_NAME).write_text(text, encoding="utf-8")


def read(folder: Path, maker: str) -> dict[str, Any]:
    """Returns the provenance of the samples in a folder; raises UserError, which names ``maker``, if it has none."""
    try:
        found = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("digest"), str):
        raise UserError(f"{folder} does not say what it was made with.", remedy=maker)
    return found


def is_intact(folder: Path, provenance: Provenance) -> bool:
    """Returns whether the files in a folder are those that its provenance was written for."""
    return bool(provenance["digest"] == _digest(folder))


def _digest(folder: Path) -> str:
    """Returns the digest of every file but `FILE_NAME`."""
    return tree_digest(folder, (file for file in folder.rglob("*") if file != folder / FILE_NAME))


def require_pair(baseline: Provenance, present: Provenance, adapter: str | None = None) -> None:
    """Raises UserError with every difference; a baseline of more samples or controls pairs too.

    Args:
        adapter: the adapter that is evaluated with the parameters of its training; the baseline must be made with the
            same ones.
    """
    if different := differences(baseline, present, DEPENDS_ON["baseline"], rounding=False, covers=True):
        listed = "\n".join(f"  {phrase}" for phrase in described(different))
        raise UserError(
            f"the baseline does not pair with this run:\n{listed}\nMake the baseline again.",
            remedy=Remedy("baseline", {} if adapter is None else {"adapter": adapter}),
        )


def require_made_from(result: Provenance, where: Path, maker: str, **artifacts: str) -> None:
    """Raises UserError if the result in ``where`` was made from other artifacts than those with these digests."""
    made_from = result.get(MADE_FROM, {})
    changed = [name for name, digest in artifacts.items() if made_from.get(name) != digest]
    if changed:
        raise UserError(
            f"{where} was made from other {' and '.join(changed)} than the present ones. Make it again.",
            remedy=maker,
        )


def require_trained_on(training: Provenance, present: Provenance) -> None:
    """Raises UserError if the adapter was trained on a different base model, or on different data.

    On different data the held-out prompts may be among those that it was trained on.
    """
    found = differences(training, present, Decides.CONTENT)
    different = [name for name, (before, _) in found.items() if before is not None]
    if "model_digest" in different:
        raise UserError(
            "the adapter was trained on a different base model than the current one. Train again.", remedy="train"
        )
    if "data" in different:
        raise UserError(
            "the adapter was trained on data that differ from the prepared records, so this would not be its result."
            " Train again, or compare it (ADAPTER: its folder or MLflow run) with the base model on the prompts that"
            " both hold out.",
            remedy=Remedy("compare", {"compare.second": "ADAPTER"}),
        )


def code_notes(training: Provenance, now: Provenance) -> list[str]:
    """Returns a note where the code of a reward that judges ``now`` differs from the training's."""
    names = [name for name in now if name.startswith(REWARD_CODE) and training.get(name, now[name]) != now[name]]
    changed = [name.removeprefix(REWARD_CODE) for name in names]
    return [f"The code of reward {', '.join(changed)} has changed since the training."] if changed else []
