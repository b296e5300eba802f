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
from visual_grpo.tracking.lineage_lookup import recorded_hashes
from visual_grpo.trained_adapters import FILE

RECORDS, IMAGES = "05_model_input/records.parquet", "05_model_input/images"
AS_IT_IS, FROM_DVC, AGAIN = "the present one", "from DVC by its hash", "made again"


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
    dvc = _Dvc(project, folder, recorded_hashes(code, hashes), note)
    _bring_reward_files(project, code, facts, tree)
    base, data = _base(project, code, facts, tree, dvc), _data(project, code, facts, tree, dvc)
    output = code / tree["output"]
    if base != AGAIN and data != AGAIN:  # Else the starter says so itself.
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
    """The files and folders that options of rewards name: the commit's, or the present ones."""
    for fact in sorted(fact for fact in facts if fact.startswith(FILE)):
        reward, _, option = fact.removeprefix(FILE).partition(": ")
        options, output, wanted = tree["rewards"][reward]["options"], tree["output"], facts[fact]
        there, now = (option_files(options, output, root).get(option) for root in (code, project))
        if there == wanted:
            continue
        if now != wanted:
            raise UserError(
                f"The option {option} of reward {reward} named a file or folder with the digest {wanted} in the"
                f" run. Present: {now or 'gone'}; at its commit: {there or 'none'}. Put it back as it was."
            )
        path = dict(named_paths(options, output, project))[option]
        _link(path, code / path.relative_to(project))


def _data(project: Path, code: Path, facts: Mapping[str, Any], tree: Mapping[str, Any], dvc: _Dvc) -> str:
    """The prepared records with their images, else the raw data that they are prepared from."""
    own, digest, path = facts["parameters"]["output"], facts["data"], tree["data"]["path"]
    target = code / tree["output"]
    why = []
    for origin in (AS_IT_IS, FROM_DVC):
        found = [
            project / own / name if origin == AS_IT_IS else dvc.find(f"{own}/{name}") for name in (RECORDS, IMAGES)
        ]
        problem = _problem(found[0], found[1], digest)
        if problem is None:
            for source, name in zip(found, (RECORDS, IMAGES), strict=True):
                _link(source, target / name)
            return origin
        why.append(f"  {origin}: {problem}")
    drawn = path == tree["starter"]["dataset"]
    if drawn or Path(path).expanduser().is_absolute() or (code / path).exists():
        return AGAIN
    raw = dvc.find(path) or project / path
    if not raw.exists():
        tried = "\n".join(why)
        raise UserError(f"The data of the run are nowhere: {path} does not exist, and\n{tried}\nTry: dvc pull")
    _link(raw, code / path)
    return AGAIN


def _problem(manifest: Path | None, images: Path | None, digest: str) -> str | None:
    """Why these are not the prepared records with this digest, their images as the manifest says; None if they are."""
    if manifest is None or not manifest.is_file():
        return "there are no prepared records"
    if RecordTable(manifest).digest != digest:
        return "the prepared records have another digest"
    rows = pq.read_table(manifest, columns=["target_image", "target_sha256", "source_images", "source_sha256"])
    for row in rows.to_pylist():
        names = [row["target_image"], *(row["source_images"] or [])]
        for name, expected in zip(names, [row["target_sha256"], *(row["source_sha256"] or [])], strict=True):
            image = None if name is None or images is None else images.parent / name
            if name is not None and (image is None or not image.is_file() or file_digest(image) != expected):
                return f"{name} is not the image that was prepared"
    return None


def _base(project: Path, code: Path, facts: Mapping[str, Any], tree: Mapping[str, Any], dvc: _Dvc) -> str:
    model, content = str(facts["model"]), facts.get("model_content")
    if may_be_hub_id(model) and not (project / model).exists() and content is None:
        return "from the model hub"
    present, given = project / Path(model).expanduser(), tree["model"]["path"]
    for origin in (AS_IT_IS, FROM_DVC):
        source = present if origin == AS_IT_IS else dvc.find(model)
        if source is None or not source.is_dir() or content_digest(source) != content:
            continue
        if given is None:  # A copy: the starter may write into it.
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
    """Files by their DVC hash from the project's cache or remote, whatever dvc.lock says today."""

    def __init__(self, project: Path, folder: Path, hashes: Mapping[str, str], note: Callable[[str], None]) -> None:
        self.project, self.repository, self.hashes, self.note = project, folder / "dvc", hashes, note

    def find(self, path: str) -> Path | None:
        """What the training read at ``path``; None where DVC does not know it or has lost it."""
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
            self._dvc(self.repository, "pull", "--quiet", str(file))
        except ProgramError as error:
            self.note(
                f"{path} of the run (DVC hash {digest}) is neither in DVC's cache nor in its remote: {error}\nBring it"
                " into the cache from a copy of the project that has it: `dvc push` there, `dvc pull` here."
            )
            return None
        return place

    def _set_up(self) -> None:
        """Another DVC repository with the project's settings, so that the project's entries do not matter."""
        self.repository.mkdir()
        self._dvc(self.repository, "init", "--quiet", "--no-scm")
        settings = self._dvc(self.project, "config", "--list").splitlines()  # Relative paths are made absolute there.
        cache = self._dvc(self.project, "cache", "dir").strip()
        for line in [
            *(line for line in settings if not line.startswith(("core.no_scm", "cache.dir"))),
            f"cache.dir={cache}",
        ]:
            name, _, value = line.partition("=")
            self._dvc(self.repository, "config", name, value)

    def _dvc(self, at: Path, *words: str) -> str:
        return output_of(sys.executable, "-m", "dvc", *words, at=at)
