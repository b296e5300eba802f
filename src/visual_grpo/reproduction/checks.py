"""Where adapters come from, line by line, each checked against what else knows it: git, DVC, MLflow, the files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from visual_grpo.errors import UserError, counted
from visual_grpo.records.table import RecordTable
from visual_grpo.reproduction.inputs import RECORDS
from visual_grpo.reproduction.programs import ProgramError, output_of
from visual_grpo.reproduction.worktree import check_commit, git
from visual_grpo.saved_model import content_digest
from visual_grpo.tracking.lineage import recorded
from visual_grpo.tracking.origins import dvc_hashes
from visual_grpo.tracking.subjects import Subject
from visual_grpo.tracking.versions import DIGEST
from visual_grpo.trained_adapters import CHANGES, adapter_digest, weight_sums

State = Literal["ok", "differs", "cannot be checked"]
OK: State = "ok"
DIFFERS: State = "differs"
UNKNOWN: State = "cannot be checked"
_OF_VERSION = {
    "git.commit": "git.commit",
    "dataset.digest": "data",
    "base.model": "model",
    "base.digest": "model_digest",
    "base.content": "model_content",
    "command": "command",
}
"""Tag of a registered version -> fact of the training."""
_OF_RUN = {"git.commit": "git.commit", "dataset.digest": "data", "command": "command"}
"""Tag of a run -> fact of the training."""


@dataclass(frozen=True)
class Line:
    """One thing that the adapters come from."""

    what: str
    value: str
    state: State
    why: str = ""


def lines(subject: Subject, project: Path) -> list[Line]:
    """All lines, from the adapters back to the data.

    Args:
        project: the folder with the repository and the data.
    """
    facts = subject.facts
    return [
        *_version(subject),
        _weights(subject),
        _run(subject),
        Line("command", str(facts.get("command", "-")), *_as_tags(subject, "command")),
        *_code(subject, project),
        _data(subject, project),
        *_dvc(subject, project),
        _base(facts, project),
        *_start(facts),
    ]


def _version(subject: Subject) -> Iterator[Line]:
    tags = subject.version_tags
    if not tags:
        return
    digest = tags.get(DIGEST)
    if digest is None:
        yield Line("version", subject.title, UNKNOWN, f"its tags have no {DIGEST}")
    elif digest != adapter_digest(subject.adapters):
        yield Line("version", subject.title, DIFFERS, "its weights are not those that were registered")
    else:
        other = [tag for tag, fact in _OF_VERSION.items() if _contradicts(tags.get(tag), subject.facts.get(fact))]
        why = f"its tags {', '.join(other)} are not as in training.json" if other else "weights and tags"
        yield Line("version", subject.title, DIFFERS if other else OK, why)


def _weights(subject: Subject) -> Line:
    sums, now = subject.facts.get("sums", {}), weight_sums(subject.adapters)
    changed = [name for name, digest in now.items() if sums.get(name) != digest]
    shown = f"{counted(len(now), 'file')}, {adapter_digest(subject.adapters)[:12]}"
    if not sums:
        return Line("adapters", shown, UNKNOWN, "of an older version, without sums in training.json")
    if changed or not now:
        return Line("adapters", shown, DIFFERS, f"{(changed or ['the weights'])[0]} is not what the training left")
    return Line("adapters", shown, OK, "sha256 of every file")


def _run(subject: Subject) -> Line:
    named = subject.facts.get("mlflow_run_id")
    if subject.run_id is None:
        return Line("MLflow run", str(named or "-"), UNKNOWN, "MLflow does not have it" if named else "it had none")
    other = [tag for tag, fact in _OF_RUN.items() if _contradicts(subject.run_tags.get(tag), subject.facts.get(fact))]
    why = f"its tags {', '.join(other)} are not as in training.json" if other else "tags as in training.json"
    return Line("MLflow run", subject.run_id, DIFFERS if other else OK, why)


def _as_tags(subject: Subject, name: str) -> tuple[State, str]:
    said = subject.run_tags.get(name)
    if said is None:
        return UNKNOWN, "MLflow has no tag of it"
    return (OK, "as MLflow has it") if said == subject.facts.get(name) else (DIFFERS, f"MLflow has {said}")


def _code(subject: Subject, project: Path) -> Iterator[Line]:
    facts = subject.facts
    commit = facts.get("git.commit")
    if commit is None:
        yield Line("commit", "-", UNKNOWN, "the training was started outside of a git repository")
        return
    try:
        check_commit(project, commit)
        holders = git(project, "for-each-ref", "--contains", commit, "--format=%(refname:short)").splitlines()
    except (UserError, ProgramError) as error:
        yield Line("commit", commit, UNKNOWN, str(error).splitlines()[0])
        return
    if holders:
        yield Line("commit", commit, OK, f"in {holders[0]}" + (f" and {len(holders) - 1} more" * (len(holders) > 1)))
    else:
        yield Line("commit", commit, DIFFERS, "it exists, but no branch or tag has it: git will remove it")
    for later in str(facts.get("resumed.git.commit", "")).splitlines():
        yield Line("resumed with commit", later, UNKNOWN, "several commits made these adapters")
    yield _changes(subject.adapters / CHANGES, facts, project, commit)


def _changes(file: Path, facts: Mapping[str, Any], project: Path, commit: str) -> Line:
    """Whether the patch applies to the commit, tried in a temporary index."""
    if not file.is_file():
        dirty = facts.get("git.state") == "dirty"
        if dirty:
            return Line("uncommitted changes", "lost", DIFFERS, f"the folder has no {CHANGES}")
        return Line("uncommitted changes", "none", OK)
    count = file.read_text(encoding="utf-8").count("diff --git ")
    with tempfile.TemporaryDirectory() as folder:
        own = os.environ | {"GIT_INDEX_FILE": f"{folder}/index"}
        try:
            output_of("git", "read-tree", commit, at=project, environment=own)
            output_of("git", "apply", "--cached", "--check", file.resolve(), at=project, environment=own)
        except ProgramError as error:
            return Line("uncommitted changes", counted(count, "file"), DIFFERS, f"they do not apply: {error}")
    return Line("uncommitted changes", counted(count, "file"), OK, f"{CHANGES} applies to the commit")


def _data(subject: Subject, project: Path) -> Line:
    digest = str(subject.facts["data"])
    other = [
        who
        for who, tags in (("the version", subject.version_tags), ("the run", subject.run_tags))
        if _contradicts(tags.get("dataset.digest"), digest)
    ]
    if other:
        return Line("data", digest, DIFFERS, f"{' and '.join(other)} names other data")
    manifest = project / subject.facts["parameters"]["output"] / RECORDS
    if manifest.is_file() and RecordTable(manifest).digest == digest:
        return Line("data", digest, OK, f"as {manifest.relative_to(project)} has it")
    why = "the prepared records are others now" if manifest.is_file() else f"{manifest} does not exist"
    return Line("data", digest, UNKNOWN, why)


def _dvc(subject: Subject, project: Path) -> Iterator[Line]:
    """Each DVC hash, in dvc.lock and ``*.dvc`` as they are or as a commit has them."""
    known = dvc_hashes(subject.facts)
    for name, value in subject.version_tags.items():
        if name.startswith("dvc."):
            known.setdefault(name.removeprefix("dvc."), value)
    now = recorded(project)
    for path, digest in sorted(known.items()):
        if _contradicts(subject.version_tags.get(f"dvc.{path}"), digest):
            yield Line(f"DVC {path}", digest, DIFFERS, "the version has another hash")
        elif now.get(path) == digest:
            yield Line(f"DVC {path}", digest, OK, "as DVC records it")
        elif commit := _commit_with(project, digest):
            yield Line(f"DVC {path}", digest, OK, f"as commit {commit} records it; another now")
        elif path in now:
            yield Line(f"DVC {path}", digest, DIFFERS, f"DVC records {now[path]}, and no commit has this one")
        else:
            yield Line(f"DVC {path}", digest, UNKNOWN, "DVC does not know this path here")
    if not known:
        yield Line("DVC", "-", UNKNOWN, "no hash was recorded: the run was no stage of dvc repro")


def _commit_with(project: Path, digest: str) -> str | None:
    try:
        found = git(project, "log", "--all", "-1", "--format=%h", f"-S{digest}", "--", "dvc.lock", ":(glob)**/*.dvc")
    except ProgramError:
        return None
    return found or None


def _base(facts: Mapping[str, Any], project: Path) -> Line:
    model, content = str(facts["model"]), facts.get("model_content")
    if content is None:
        return Line("base model", model, UNKNOWN, "of the model hub, or of an older version: no digest of its files")
    shown, folder = f"{model} {content[:12]}", project / Path(model).expanduser()
    if not folder.is_dir():
        return Line("base model", shown, UNKNOWN, f"{model} does not exist here")
    if content_digest(folder) != content:
        return Line("base model", shown, DIFFERS, "the folder has other files now")
    return Line("base model", shown, OK, "digest of its files")


def _start(facts: Mapping[str, Any]) -> Iterator[Line]:
    if "start" in facts:
        named = facts["parameters"].get("train", {}).get("start", "-")
        yield Line("started from", f"{named} {facts['start'][:12]}", UNKNOWN, "kedro run --pipeline=reproduce finds it")


def _contradicts(one: object, other: object) -> bool:
    """Whether both are known, and not the same."""
    return one is not None and other is not None and str(one) != str(other)
