"""The git worktree that repeats a training: its commit, configuration, packages, data and base model."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from visual_grpo.adapter_folder import CHANGES, REWARD_FILE
from visual_grpo.common import console
from visual_grpo.common.digests import content_digest, digest_once, named_paths, option_files
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import write_atomically
from visual_grpo.common.processes import ProgramError, git, output_of
from visual_grpo.config.data import HUB
from visual_grpo.config.places import OUTPUT, place
from visual_grpo.data.manifest import IMAGES, RecordTable
from visual_grpo.tracking.run_context import dvc_hashes, recorded

LOCK = "requirements.lock"


@dataclass
class Worktree:
    """The temporary folder of one reproduction, with the project's ``code`` at the run's commit."""

    folder: Path
    code: Path
    kept: bool = False


@contextmanager
def checked_out(project: Path, commit: str, changes: bytes) -> Iterator[Worktree]:
    """Checks out ``commit`` with the patch ``changes``; removes the folder at the end unless it is kept.

    Raises UserError if the commit does not exist, or the patch does not apply.
    """
    folder = Path(tempfile.mkdtemp(prefix="visual_grpo_reproduce_"))
    # As deep as the project, so that a path of the run such as ../models/mine stays within the folder.
    root = folder / "code" / project.absolute().relative_to(project.absolute().anchor)
    worktree = Worktree(folder, root)
    try:
        git(project, "worktree", "add", "--quiet", "--detach", "--", root, commit)
        worktree.code = root / git(project, "rev-parse", "--show-prefix")
        if changes.strip():
            git(root, "apply", "--whitespace=nowarn", "-", stdin=changes)
        yield worktree
    except ProgramError as error:
        raise UserError(
            f"The code of the run, commit {commit} with {CHANGES} of its adapters, cannot be restored; git fetch --all"
            f" gets missing commits. {error}"
        ) from error
    finally:
        if worktree.kept:
            console.note(f"Kept: {folder} (to remove it: rm -r {folder} && git worktree prune)")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(ProgramError):
                git(project, "worktree", "prune")


def write_configuration(worktree: Worktree, tree: Mapping[str, Any]) -> tuple[Path, dict[str, Path]]:
    """Writes the commit's configuration with the parameters ``tree`` alone.

    Returns its folder, and where each dataset is: all in the worktree, even those that the commit's catalog has
    elsewhere, where results of the user's may be.
    """
    conf = worktree.folder / "conf"
    shutil.copytree(worktree.code / "conf", conf, ignore=shutil.ignore_patterns("parameters*"))
    (conf / "local").mkdir(exist_ok=True)
    # OmegaConf would look up what ${...} names.
    text = yaml.safe_dump(dict(tree), allow_unicode=True, sort_keys=False).replace("${", "\\${")
    (conf / "base/parameters.yml").write_text(text, encoding="utf-8")
    file, places = conf / "base/catalog.yml", {}
    catalog = yaml.safe_load(file.read_text(encoding="utf-8"))
    for name, entry in catalog.items():
        if filepath := entry.get("filepath"):
            if not filepath.startswith(OUTPUT):
                entry["filepath"] = filepath = f"{OUTPUT}/moved/{name}{Path(filepath).suffix}"
            places[name] = worktree.code / filepath.replace(OUTPUT, tree["output"])
    file.write_text(yaml.safe_dump(catalog, sort_keys=False), encoding="utf-8")
    return conf, places


def python_of(worktree: Worktree, project: Path, version: str | None) -> Path:
    """Returns the Python with the packages of the run's lock: the present one, or ``version`` in a new environment.

    Raises UserError if the run's commit has no lock, or it cannot be installed.
    """
    lock = worktree.code / LOCK
    if not lock.is_file():
        raise UserError(f"The commit of the run has no {LOCK}, so its environment is not known.")
    if (project / LOCK).is_file() and lock.read_bytes() == (project / LOCK).read_bytes():
        return Path(sys.executable)
    console.note(f"{LOCK} of the run differs from the present one: installing it into a new environment")
    tools, environment = project / ".venv-tools/bin/uv", worktree.folder / "environment"
    uv, python = tools if tools.is_file() else "uv", environment / "bin/python"
    minor = ".".join((version or platform.python_version()).split(".")[:2])
    base = sys.executable if platform.python_version().startswith(f"{minor}.") else minor
    try:
        output_of(uv, "venv", "--quiet", "--python", base, environment, at=worktree.folder)
        output_of(uv, "pip", "sync", "--quiet", "--require-hashes", "--python", python, LOCK, at=worktree.code)
    except ProgramError as error:
        raise UserError(
            f"The packages of the run's {LOCK} cannot be installed; `make setup` installs uv, and a network is needed"
            f" where its cache lacks them.\n{error}"
        ) from error
    return python


def bring_inputs(
    project: Path, code: Path, places: Mapping[str, Path], facts: Mapping[str, Any], tree: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """Brings what the run read into ``code``, whose datasets are at ``places``. Returns the pipelines that make the
    rest again, each with the fact and the dataset that hold the digest of its result.

    Prepared records and a base model that are still the run's are used as they are: they may have been made with other
    parameters than the training's, such as a different seed. Raises UserError if something is missing, or has changed.
    """
    before, model = facts["parameters"], tree["model"]["path"]
    is_pretrained = model == tree["starter"]["model"]
    content = facts.get("model_content")  # None: it is on a hub.
    has_base = content_digest(project / Path(facts["model"]).expanduser()) == content
    records, baseline = (place(project / before["output"], name) for name in ("records", "baseline"))
    images = records.with_name(IMAGES)
    has_data = records.is_file() and RecordTable(records).digest == facts["data"]
    if baseline.is_dir():  # Its pipeline keeps it where it would generate the same.
        shutil.copytree(baseline, places["baseline"], dirs_exist_ok=True)
    if has_base and is_pretrained and content is not None:
        shutil.copytree(project / before["model"]["path"], code / model, dirs_exist_ok=True)
    _bring_reward_files(project, code, facts, tree)
    _bring_lora(project, code, tree["model"].get("lora"), facts)
    if not is_pretrained and content is not None:
        _bring(project, code, model, facts)
    if has_data:
        here = places["records"]
        _link(records, here)
        if images.exists():
            _link(images, here.with_name(IMAGES))
    elif tree["data"]["path"] != tree["starter"]["dataset"]:
        _bring(project, code, tree["data"]["path"], facts)
    starter, preparation = ("starter", "model_digest", "base_model"), ("data_preparation", "data", "data_report")
    if not has_data:
        return [starter, preparation]
    if not has_base:
        return [starter]
    report = {"dataset": tree["data"]["path"], "model": model, "digest": facts["model_digest"], "content": content}
    report |= {"lora": facts["model_lora"]} if "model_lora" in facts else {}
    write_atomically(places["base_model"], json.dumps(report))
    return []


def _bring_lora(project: Path, code: Path, lora: str | None, facts: Mapping[str, Any]) -> None:
    """Links the LoRA that is merged into the base model, if it is a file here; raises UserError if it has changed."""
    if lora is None or not (project / Path(lora).expanduser()).is_file():
        return
    _bring(project, code, lora, facts)
    if (now := digest_once(code / Path(lora).expanduser())) != facts.get("model_lora"):
        raise UserError(
            f"model.lora: {lora} is not the LoRA that the run's base model has: its sha256 was"
            f" {str(facts.get('model_lora'))[:12]}, and is {now[:12]}. Put that file back."
        )


def _bring(project: Path, code: Path, path: str, facts: Mapping[str, Any]) -> None:
    """Links the user's data or model, or pulls them where DVC records a different state now."""
    if Path(path).expanduser().is_absolute() or (code / path).exists():
        return
    name = Path(path).as_posix()
    digest = dvc_hashes(facts).get(name)
    if digest is not None and recorded(project).get(name) != digest:
        _pull(project, code / path, code, digest)
    elif (project / path).exists():
        _link(project / path, code / path)
    elif not path.startswith(HUB):
        raise UserError(f"{path}, which the run read, does not exist. Put it back, or try: dvc pull")


def _pull(project: Path, target: Path, code: Path, digest: str) -> None:
    """Pulls data by their DVC hash, whatever the project tracks today, with its settings."""
    dvc = partial(output_of, sys.executable, "-m", "dvc")
    file = target.with_name(f"{target.name}.dvc")
    entry = {"outs": [{"md5": digest, "hash": "md5", "path": target.name}]}
    write_atomically(file, json.dumps(entry))  # YAML contains JSON.
    try:
        dvc("init", "--quiet", "--no-scm", "--force", at=code)
        settings = dvc("config", "--list", at=project).splitlines()  # With absolute paths.
        for line in [*settings, f"cache.dir={dvc('cache', 'dir', at=project).strip()}"]:
            dvc("config", *line.split("=", 1), at=code)
        dvc("pull", "--quiet", str(file), at=code)
    except ProgramError as error:
        what = f"{target.relative_to(code)} of the run (DVC hash {digest})"
        raise UserError(f"{what} is neither in DVC's cache nor in its remote: {error}") from error


def _bring_reward_files(project: Path, code: Path, facts: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
    """Links the files and folders that options of rewards name, where the commit has none with the run's digest."""
    for fact in filter(lambda name: name.startswith(REWARD_FILE), facts):
        reward, _, option = fact.removeprefix(REWARD_FILE).partition(": ")
        options, wanted = tree["rewards"][reward]["options"], facts[fact]
        committed, present = (option_files(options, tree["output"], root).get(option) for root in (code, project))
        if wanted not in (committed, present):
            raise UserError(
                f"The option {option} of reward {reward} named a file or folder with the digest {wanted} in the"
                f" run. Present: {present or 'gone'}; at its commit: {committed or 'none'}. Restore it."
            )
        if committed != wanted:
            path = dict(named_paths(options, tree["output"], project))[option]
            _link(path, code / path.relative_to(project))


def _link(source: Path, target: Path) -> None:
    """Replaces ``target`` by a link to ``source``, which is only read."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    target.symlink_to(source.resolve())
