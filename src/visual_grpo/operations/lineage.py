"""``python -m visual_grpo.operations.lineage NAME``: where adapters come from, and whether that still holds.

NAME is a registered version (``visual_grpo@champion``, ``visual_grpo/3``), an MLflow run's id or name, a folder of
adapters, or ``latest``. Each line is checked against what else knows it: git, DVC, MLflow, the files. Exits with 1 if
something has changed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError

from visual_grpo.adapter_folder import CHANGES, adapter_digest, changed_weights, read_facts, weight_sums
from visual_grpo.common import console
from visual_grpo.common.digests import content_digest, digest_once, on_hub
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.hub import REFUSALS, refusal
from visual_grpo.common.processes import ProgramError, git
from visual_grpo.common.quiet_libraries import silence_libraries
from visual_grpo.config.places import place
from visual_grpo.data.manifest import RecordTable
from visual_grpo.models.lora_lookup import cached_lora
from visual_grpo.operations.command import render
from visual_grpo.operations.reproduction.worktree import checked_out
from visual_grpo.operations.retraining.project import read_project
from visual_grpo.tracking.adapter_lookup import SCHEME, find_adapters, find_version, training_run
from visual_grpo.tracking.registry import FROM_FACTS
from visual_grpo.tracking.run_context import dvc_hashes, recorded
from visual_grpo.tracking.sync import DIGEST

OK, DIFFERS, UNKNOWN = "ok", "differs", "cannot be checked"
_MODEL = ["model_index.json", "config.json"]
"""Files on the hub that say what a model is."""
_VERSION = re.compile(r"[^/@]+(@[^/@]+|/\d+)")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Adapters, with what the registry and MLflow say of them."""

    title: str
    adapters: Path
    facts: Mapping[str, Any]
    version_tags: Mapping[str, str] = field(default_factory=dict)
    """Empty where no registered version was named."""
    run_id: str | None = None
    """None where MLflow does not have the training's run."""
    run_tags: Mapping[str, str] = field(default_factory=dict)


def find_subject(named: str, latest: Path) -> Subject:
    """Finds adapters by ``named``; raises UserError if they do not exist, or have no facts."""
    title, tags = named, {}
    if named.startswith(SCHEME) or (_VERSION.fullmatch(named) and not Path(named).is_dir()):
        version = find_version(SCHEME + named.removeprefix(SCHEME))
        adapters, tags, title = version.adapters(check=False), dict(version.tags), f"{version.name}/{version.version}"
    else:
        adapters = find_adapters(named, latest)
    subject = Subject(title=title, adapters=adapters, facts=read_facts(adapters), version_tags=tags)
    with suppress(UserError):  # The files are checked without MLflow too.
        if (run := training_run(subject.facts)) is not None:
            return replace(subject, run_id=run.info.run_id, run_tags=run.data.tags)
    return subject


@dataclass(frozen=True)
class Line:
    """One thing that the adapters come from; ``state`` is `OK`, `DIFFERS` or `UNKNOWN`."""

    what: str
    value: str
    state: str
    why: str = ""


def lines(subject: Subject, project: Path) -> list[Line]:
    """Checks the adapters, then back to the data; ``project`` is the folder with the repository and the data."""
    return [
        *([_tags("version", subject.title, subject.version_tags, subject)] if subject.version_tags else []),
        _weights(subject),
        *_run(subject),
        *_code(subject, project),
        _data(subject.facts, project),
        *_dvc(subject.facts, project),
        _base(subject.facts, project),
        *_merged(subject.facts, project),
    ]


def _weights(subject: Subject) -> Line:
    now = weight_sums(subject.adapters)
    shown = f"{counted(len(now), 'file')}, {adapter_digest(subject.adapters)[:12]}"
    for name, what in changed_weights(subject.facts.get("sums", {}), now).items():
        return Line("adapters", shown, DIFFERS, f"{name} {what}")
    if not now:
        return Line("adapters", shown, DIFFERS, "the weights are gone")
    return Line("adapters", shown, OK, "sha256 of every file")


def _run(subject: Subject) -> Iterator[Line]:
    named = subject.facts.get("mlflow_run_id")
    if subject.run_id is None:
        run = Line("MLflow run", str(named or "-"), UNKNOWN, "MLflow does not have it" if named else "it had none")
    else:
        run = _tags("MLflow run", subject.run_id, subject.run_tags, subject)
    yield run
    yield replace(run, what="command", value=str(subject.facts.get("command", "-")))


def _tags(what: str, value: str, tags: Mapping[str, str], subject: Subject) -> Line:
    facts, digest = subject.facts, adapter_digest(subject.adapters)
    names = FROM_FACTS | {tag: tag for tag in facts if tag == "git.commit" or tag.startswith("dvc.")}
    other = [tag for tag, name in names.items() if tag in tags and tags[tag] != str(facts.get(name, tags[tag]))]
    if other:
        return Line(what, value, DIFFERS, f"its tags {', '.join(other)} differ from training.json")
    if tags.get(DIGEST, digest) != digest:
        why = "MLflow has a different digest: weights, training.json or a neighbouring file was edited"
        return Line(what, value, DIFFERS, why)
    return Line(what, value, OK, "as in MLflow")


def _code(subject: Subject, project: Path) -> Iterator[Line]:
    facts = subject.facts
    commit = facts.get("git.commit")
    if commit is None:
        yield Line("commit", "-", UNKNOWN, "the training was started outside of a git repository")
        return
    try:
        holders = git(project, "for-each-ref", "--contains", commit, "--format=%(refname:short)").splitlines()
    except ProgramError as error:
        yield Line("commit", commit, UNKNOWN, f"{error} (try: git fetch --all)")
        return
    if holders:
        yield Line("commit", commit, OK, f"in {', '.join(holders)}")
    else:
        yield Line("commit", commit, DIFFERS, "it exists, but is on no branch or tag: git will remove it")
    for later in str(facts.get("resumed.git.commit", "")).splitlines():
        yield Line("resumed with commit", later, UNKNOWN, "several commits made these adapters")
    yield _changes(subject.adapters / CHANGES, facts, project, commit)


def _changes(file: Path, facts: Mapping[str, Any], project: Path, commit: str) -> Line:
    """Checks that the patch applies to the commit."""
    what = "uncommitted changes"
    if not file.is_file():
        lost = facts.get("git.state") == "dirty"
        return Line(what, "lost", DIFFERS, f"the folder has no {CHANGES}") if lost else Line(what, "none", OK)
    patch = file.read_bytes()
    value = counted(patch.count(b"diff --git "), "file")
    try:
        with checked_out(project, commit, patch):
            return Line(what, value, OK, f"{CHANGES} applies to the commit")
    except UserError as error:
        return Line(what, value, DIFFERS, f"they do not apply: {error}")


def _data(facts: Mapping[str, Any], project: Path) -> Line:
    file = place(Path(facts["parameters"]["output"]), "records")
    digest, manifest = str(facts["data"]), project / file
    if manifest.is_file() and RecordTable(manifest).digest == digest:
        return Line("data", digest, OK, f"as {file} has it")
    why = "the prepared records have changed" if manifest.is_file() else f"{manifest} does not exist"
    return Line("data", digest, UNKNOWN, why)


def _dvc(facts: Mapping[str, Any], project: Path) -> Iterator[Line]:
    """Looks up each DVC hash in dvc.lock and ``*.dvc`` as they are or as a commit has them."""
    known, now = dvc_hashes(facts), recorded(project)
    for path, digest in sorted(known.items()):
        if now.get(path) == digest:
            yield Line(f"DVC {path}", digest, OK, "as DVC records it")
        elif commit := _commit_with(project, digest):
            yield Line(f"DVC {path}", digest, OK, f"as commit {commit} records it; it has changed since then")
        elif path in now:
            yield Line(f"DVC {path}", digest, DIFFERS, f"DVC records {now[path]}, and no commit has this one")
        else:
            yield Line(f"DVC {path}", digest, UNKNOWN, "DVC does not know this path here")
    if not known:
        yield Line("DVC", "-", UNKNOWN, "no hash was recorded: the run was not a stage of dvc repro")


def _commit_with(project: Path, digest: str) -> str:
    """Returns the newest commit that added or removed the hash; "" if there is none."""
    with suppress(ProgramError):
        return git(project, "log", "--all", "-1", "--format=%h", f"-S{digest}", "--", "dvc.lock", ":(glob)**/*.dvc")
    return ""


def _base(facts: Mapping[str, Any], project: Path) -> Line:
    model, content = str(facts["model"]), facts.get("model_content")
    if content is None:
        return _base_on_hub(model, facts["parameters"]["model"]["revision"])
    shown, folder = f"{model} {content[:12]}", project / Path(model).expanduser()
    if not folder.is_dir():
        return Line("base model", shown, UNKNOWN, f"{model} does not exist here")
    if content_digest(folder) != content:
        return Line("base model", shown, DIFFERS, "the files in the folder have changed")
    return Line("base model", shown, OK, "digest of its files")


def _base_on_hub(model: str, commit: str) -> Line:
    """Looks for the commit, which stands for every file, in the hub's cache, and then on the hub."""
    what, shown = "base model", f"{model} at commit {commit}"
    try:
        with suppress(LocalEntryNotFoundError):
            huggingface_hub.snapshot_download(model, revision=commit, allow_patterns=_MODEL, local_files_only=True)
            return Line(what, shown, OK, "the hub's cache has this commit")
        huggingface_hub.model_info(model, revision=commit, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except RevisionNotFoundError:
        return Line(what, shown, DIFFERS, "the hub no longer has this commit")
    except REFUSALS as error:
        return Line(what, shown, UNKNOWN, refusal("model", "model.path", model, commit, error))
    return Line(what, shown, OK, "the hub has this commit")


def _merged(facts: Mapping[str, Any], project: Path) -> Iterator[Line]:
    """The LoRA that is merged into the base model."""
    if (stored := facts.get("model_lora")) is None:
        return
    named = facts["parameters"]["model"]["lora"]
    what, shown = "merged LoRA", f"{named} {stored[:12]}"
    # Nothing is downloaded: somebody else's folder may name it.
    file = cached_lora(named) if on_hub(named) else project / Path(named).expanduser()
    if file is None or not file.is_file():
        yield Line(what, shown, UNKNOWN, "this machine does not have the file")
    elif digest_once(file) != stored:
        yield Line(what, shown, DIFFERS, "the file has changed")
    else:
        yield Line(what, shown, OK, "sha256")


def main() -> int:
    """Prints the lineage; returns the exit code, 1 where something differs."""
    parser = argparse.ArgumentParser(prog="python -m visual_grpo.operations.lineage", description=__doc__)
    parser.add_argument("name", help="NAME@ALIAS, NAME/VERSION, a run's id or name, a folder of adapters, or latest")
    parser.add_argument("--env", help="Kedro's environment, whose adapters are the latest; without it the default")
    arguments, folder = parser.parse_args(), Path.cwd()
    try:
        latest = read_project(folder, arguments.env).place("adapters")
        subject = find_subject(arguments.name, latest)
        checked = lines(subject, folder)
    except UserError as error:
        sys.exit(f"Error: {render(error)}")
    rows = [[line.what, line.value, line.state, line.why] for line in checked]
    console.table(f"Lineage of {subject.title}", ["", "", "state", "by"], rows)
    differing = [line.what for line in checked if line.state == DIFFERS]
    console.note(f"Differs: {', '.join(differing)}." if differing else "Nothing differs.")
    return 1 if differing else 0


if __name__ == "__main__":
    silence_libraries()
    sys.exit(main())
