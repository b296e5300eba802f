"""Brings what a training read into a worktree: own data and models, files of rewards, what is still the run's."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from visual_grpo.common.digests import content_digest, file_digest, named_paths, option_files
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import write_atomically
from visual_grpo.common.processes import ProgramError, output_of
from visual_grpo.config.adapter_folder import FILE
from visual_grpo.data.table import RecordTable
from visual_grpo.data.tables import HUB
from visual_grpo.tracking.lineage import recorded

RECORDS, IMAGES = "05_model_input/records.parquet", "05_model_input/images"
BASELINE = "07_model_output/baseline"


def bring_inputs(
    project: Path, code: Path, facts: Mapping[str, Any], tree: Mapping[str, Any], hashes: Mapping[str, str]
) -> list[str]:
    """Brings what the run read, and returns the pipelines that make the rest again.

    Prepared records and a base model that are still the run's are used as they are: they may have been made with other
    parameters than the training's, such as another seed.

    Args:
        code: the worktree.
        facts: of the training.
        tree: parameters that it is repeated with.
        hashes: path -> DVC hash of what it read.

    Raises:
        UserError: something is nowhere, or is not what it was.
    """
    own, output, given = facts["parameters"], code / tree["output"], tree["model"]["path"]
    content = facts.get("model_content")
    has_base = content_digest(project / Path(facts["model"]).expanduser()) == content  # None: it is on a hub.
    records, images = (project / own["output"] / name for name in (RECORDS, IMAGES))
    has_data = _are_prepared(records, images, facts["data"])
    copies = {f"{own['output']}/{BASELINE}": f"{tree['output']}/{BASELINE}"}
    if has_base and given is None:
        copies[own["starter"]["model"]] = tree["starter"]["model"]
    for path, copy in copies.items():  # Their pipelines keep them where they are what they would make.
        if (project / path).is_dir():
            shutil.copytree(project / path, code / copy, dirs_exist_ok=True)
    _bring_reward_files(project, code, facts, tree)
    if given is not None and content is not None:
        _bring(project, code, given, hashes)
    if has_data:
        _link(records, output / RECORDS)
        if images.exists():
            _link(images, output / IMAGES)
    elif tree["data"]["path"] != tree["starter"]["dataset"]:
        _bring(project, code, tree["data"]["path"], hashes)
    if not has_data:
        return ["starter", "data_preparation"]
    if not has_base:
        return ["starter"]
    report = {
        "dataset": tree["starter"]["dataset"] if given is None else tree["data"]["path"],
        "model": given or tree["starter"]["model"],
        "digest": facts["model_digest"],
        "content": content,
    }
    write_atomically(output / "06_models/starter.json", json.dumps(report))
    return []


def _are_prepared(records: Path, images: Path, digest: str) -> bool:
    """Returns whether these are the prepared records with this digest and their images."""
    if not records.is_file() or RecordTable(records).digest != digest:
        return False
    columns = ["target_image", "target_sha256", "source_images", "source_sha256"]
    for row in pq.read_table(records, columns=columns).to_pylist():
        expected = dict(zip(row["source_images"] or [], row["source_sha256"] or [], strict=True))
        if row["target_image"] is not None:
            expected[row["target_image"]] = row["target_sha256"]
        for name, sha256 in expected.items():
            image = images.parent / name
            if not image.is_file() or file_digest(image) != sha256:
                return False
    return True


def _bring(project: Path, code: Path, path: str, hashes: Mapping[str, str]) -> None:
    """Links own data or an own model, or pulls them where DVC records another state now."""
    if Path(path).expanduser().is_absolute() or (code / path).exists():
        return
    digest = hashes.get(Path(path).as_posix())
    if digest is not None and recorded(project).get(Path(path).as_posix()) != digest:
        _pull(project, code / path, code, digest)
    elif (project / path).exists():
        _link(project / path, code / path)
    elif not path.startswith(HUB):
        raise UserError(f"{path}, which the run read, does not exist. Put it back, or try: dvc pull")


def _pull(project: Path, target: Path, code: Path, digest: str) -> None:
    """Pulls data by their DVC hash, whatever the project tracks today, with its settings."""
    dvc = partial(output_of, sys.executable, "-m", "dvc")
    file = target.with_name(f"{target.name}.dvc")
    file.parent.mkdir(parents=True, exist_ok=True)
    entry = {"outs": [{"md5": digest, "hash": "md5", "path": target.name}]}
    file.write_text(json.dumps(entry), encoding="utf-8")  # YAML contains JSON.
    try:
        dvc("init", "--quiet", "--no-scm", "--force", at=code)
        settings = dvc("config", "--list", at=project).splitlines()  # With absolute paths.
        for line in [*settings, f"cache.dir={dvc('cache', 'dir', at=project).strip()}"]:
            dvc("config", *line.split("=", 1), at=code)
        dvc("pull", "--quiet", str(file), at=code)
    except ProgramError as error:
        raise UserError(
            f"{target.relative_to(code)} of the run (DVC hash {digest}) is neither in DVC's cache nor in its remote"
            f" (try `dvc push` in another copy of the project): {error}"
        ) from error


def _bring_reward_files(project: Path, code: Path, facts: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
    """Links the files and folders that options of rewards name, where the commit has none with the run's digest."""
    for fact in filter(lambda name: name.startswith(FILE), facts):
        reward, _, option = fact.removeprefix(FILE).partition(": ")
        options, wanted = tree["rewards"][reward]["options"], facts[fact]
        there, now = (option_files(options, tree["output"], root).get(option) for root in (code, project))
        if wanted not in (there, now):
            raise UserError(
                f"The option {option} of reward {reward} named a file or folder with the digest {wanted} in the"
                f" run. Present: {now or 'gone'}; at its commit: {there or 'none'}. Put it back as it was."
            )
        if there != wanted:
            path = dict(named_paths(options, tree["output"], project))[option]
            _link(path, code / path.relative_to(project))


def _link(source: Path, target: Path) -> None:
    """Lets ``target`` be ``source``, which is only read; what is there makes room."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    target.symlink_to(source.resolve())
