"""Brings the data and the base model of a training into a worktree: the present ones, DVC's, or made again."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from visual_grpo.errors import UserError
from visual_grpo.files import file_digest
from visual_grpo.option_files import named_paths, option_files
from visual_grpo.programs import ProgramError, output_of
from visual_grpo.records.table import RecordTable
from visual_grpo.saved_model import content_digest, may_be_hub_id
from visual_grpo.tracking.lineage import recorded
from visual_grpo.trained_adapters import FILE

RECORDS, IMAGES = "05_model_input/records.parquet", "05_model_input/images"
AS_IT_IS, FROM_DVC, AGAIN = "the present one", "from DVC by its hash", "made again"
_DIGESTS = {"target_image": "target_sha256", "source_images": "source_sha256"}


def bring_inputs(
    project: Path,
    code: Path,
    folder: Path,
    facts: Mapping[str, Any],
    tree: Mapping[str, Any],
    hashes: Mapping[str, str],
    note: Callable[[str], None],
) -> dict[str, str]:
    """Returns where ``data`` and ``base model`` came from; what is to be made again is not there yet.

    Args:
        code: the worktree.
        folder: for what DVC brings.
        facts: of the training.
        tree: parameters that it is repeated with.
        hashes: path -> DVC hash of what it read.

    Raises:
        UserError: an input is nowhere and cannot be made again.
    """
    dvc = _Dvc(project, folder / "dvc", {**recorded(code), **hashes}, note)
    _bring_reward_files(project, code, facts, tree)
    base, data = _base(project, code, facts, tree, dvc), _data(project, code, facts, tree, dvc)
    output = code / tree["output"]
    if AGAIN not in (base, data):  # Else the starter writes its report.
        given, starter = tree["model"]["path"], tree["starter"]
        report = {
            "dataset": starter["dataset"] if given is None else tree["data"]["path"],
            "model": given or starter["model"],
            "digest": facts["model_digest"],
            "content": facts.get("model_content"),
        }
        (output / "06_models").mkdir(parents=True, exist_ok=True)
        (output / "06_models/starter.json").write_text(json.dumps(report), encoding="utf-8")
    baseline = project / facts["parameters"]["output"] / "07_model_output/baseline"
    if baseline.is_dir():  # Its pipeline keeps it where it is the one that it would draw.
        shutil.copytree(baseline, output / "07_model_output/baseline", dirs_exist_ok=True)
    return {"data": data, "base model": base}


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


def _data(project: Path, code: Path, facts: Mapping[str, Any], tree: Mapping[str, Any], dvc: _Dvc) -> str:
    """Links the prepared records with their images, else the raw data that they are prepared from."""
    own, path = facts["parameters"]["output"], tree["data"]["path"]
    places: dict[str, Callable[[str], Path | None]] = {
        AS_IT_IS: lambda name: project / own / name,
        FROM_DVC: lambda name: dvc.find(f"{own}/{name}"),
    }
    problems = []
    for origin, find in places.items():
        records, images = find(RECORDS), find(IMAGES)
        problem = _problem(records, images, facts["data"])
        if problem is None:
            _link(records, code / tree["output"] / RECORDS)
            _link(images, code / tree["output"] / IMAGES)
            return origin
        problems.append(f"  {origin}: {problem}")
    if path != tree["starter"]["dataset"] and not Path(path).expanduser().is_absolute() and not (code / path).exists():
        raw = dvc.find(path) or project / path
        if not raw.exists():
            raise UserError(
                "\n".join([f"The data of the run are nowhere: {path} does not exist, and", *problems, "Try: dvc pull"])
            )
        _link(raw, code / path)
    return AGAIN


def _problem(records: Path | None, images: Path | None, digest: str) -> str | None:
    """Returns why these are not the prepared records with this digest and their images; None if they are."""
    if records is None or not records.is_file():
        return "there are no prepared records"
    if RecordTable(records).digest != digest:
        return "the prepared records have another digest"
    for row in pq.read_table(records, columns=[*_DIGESTS, *_DIGESTS.values()]).to_pylist():
        expected = dict(zip(row["source_images"] or [], row["source_sha256"] or [], strict=True))
        if row["target_image"] is not None:
            expected[row["target_image"]] = row["target_sha256"]
        for name, sha256 in expected.items():
            image = None if images is None else images.parent / name
            if image is None or not image.is_file() or file_digest(image) != sha256:
                return f"{name} is not the image that was prepared"
    return None


def _base(project: Path, code: Path, facts: Mapping[str, Any], tree: Mapping[str, Any], dvc: _Dvc) -> str:
    """Copies the starter's model, since the starter may write into it, and links another one."""
    model, content = str(facts["model"]), facts.get("model_content")
    if may_be_hub_id(model) and not (project / model).exists() and content is None:
        return "from the model hub"
    present, given = project / Path(model).expanduser(), tree["model"]["path"]
    origin, source = AS_IT_IS, present if content_digest(present) == content else None
    if source is None:
        origin, source = FROM_DVC, dvc.find(model)
    if source is not None and source.is_dir() and content_digest(source) == content:
        if given is None:
            shutil.copytree(source, code / tree["starter"]["model"], dirs_exist_ok=True)
        elif not Path(given).expanduser().is_absolute() and not (code / given).exists():
            _link(source, code / given)
        return origin
    if given is None:
        return AGAIN
    state = "has other files now than when the run was trained" if present.exists() else "does not exist"
    raise UserError(
        f"The base model of the run, {model}, {state}. Put the files back (or: dvc pull), so that their digest is"
        f" {content}."
    )


def _link(source: Path | None, target: Path) -> None:
    """Lets ``target`` be ``source``, which is only read; what is there makes room."""
    if source is None or not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    target.symlink_to(source.resolve())


class _Dvc:
    """Files by their DVC hash from the project's cache or remote, whatever dvc.lock says today.

    They are pulled in another DVC repository with the project's settings.
    """

    def __init__(self, project: Path, repository: Path, hashes: Mapping[str, str], note: Callable[[str], None]) -> None:
        self.project, self.repository, self.hashes, self.note = project, repository, hashes, note

    def find(self, path: str) -> Path | None:
        """Returns what the training read at ``path``; None where DVC does not know it or has lost it."""
        digest = self.hashes.get(Path(path).as_posix())
        if digest is None:
            return None
        place = self.repository / digest / Path(path).name
        try:
            if not self.repository.is_dir():
                self._set_up()
            place.parent.mkdir(exist_ok=True)
            entry = {"outs": [{"md5": digest, "hash": "md5", "path": place.name}]}
            file = place.with_name(f"{place.name}.dvc")
            file.write_text(json.dumps(entry), encoding="utf-8")  # YAML contains JSON.
            self._dvc("pull", "--quiet", str(file))
        except ProgramError as error:
            self.note(
                f"{path} of the run (DVC hash {digest}) is neither in DVC's cache nor in its remote (try `dvc push` in"
                f" another copy of the project): {error}"
            )
            return None
        return place

    def _set_up(self) -> None:
        self.repository.mkdir()
        self._dvc("init", "--quiet", "--no-scm")
        settings = self._dvc("config", "--list", at=self.project).splitlines()  # With absolute paths.
        settings = [line for line in settings if not line.startswith(("core.no_scm", "cache.dir"))]
        for line in [*settings, f"cache.dir={self._dvc('cache', 'dir', at=self.project).strip()}"]:
            self._dvc("config", *line.split("=", 1))

    def _dvc(self, *words: str, at: Path | None = None) -> str:
        return output_of(sys.executable, "-m", "dvc", *words, at=at or self.repository)
