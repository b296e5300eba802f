"""The data and the base model of a training, brought into the worktree: the present ones, DVC's, or made again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.files import file_digest
from visual_grpo.option_files import named_paths, option_files
from visual_grpo.records.table import RecordTable
from visual_grpo.reproduction.dvc_cache import restore
from visual_grpo.saved_model import content_digest, may_be_hub_id
from visual_grpo.trained_adapters import FILE

RECORDS, IMAGES = "05_model_input/records.parquet", "05_model_input/images"
REPORT, BASELINE = "06_models/starter.json", "07_model_output/baseline"
AS_IT_IS, FROM_DVC, AGAIN = "the present one", "from DVC by its hash", "made again"


@dataclass
class Inputs:
    """Brings the inputs of one training into ``code``."""

    project: Path
    code: Path
    folder: Path
    """For what DVC brings."""
    facts: Mapping[str, Any]
    """Of the training."""
    tree: Mapping[str, Any]
    """Parameters that it is repeated with."""
    hashes: Mapping[str, str]
    """Path -> DVC hash, as far as they are known."""
    note: Callable[[str], None]
    tried: list[str] = field(default_factory=list)
    """Why a source did not serve, for the message if none does."""

    def bring(self) -> tuple[dict[str, str], list[str]]:
        """What each input came from, and the pipelines that have to run before the baseline.

        Raises:
            UserError: an input is nowhere and cannot be made again.
        """
        self._bring_reward_files()
        base, data = self._base(), self._data()
        starter = base == AGAIN or (data == AGAIN and self._is_drawn())
        if not starter:
            self._write_report()
        self._offer_baseline()
        pipelines = [*(["starter"] if starter else []), *(["data_preparation"] if data == AGAIN else [])]
        return {"data": data, "base model": base}, pipelines

    def _bring_reward_files(self) -> None:
        """The files and folders that options of rewards name: the commit's, or the present ones."""
        for fact in sorted(fact for fact in self.facts if fact.startswith(FILE)):
            reward, _, option = fact.removeprefix(FILE).partition(": ")
            options, output, wanted = self.tree["rewards"][reward]["options"], self.tree["output"], self.facts[fact]
            there = option_files(options, output, self.code).get(option)
            if there == wanted:
                continue
            now = option_files(options, output, self.project).get(option)
            if now != wanted:
                raise UserError(
                    f"The option {option} of reward {reward} named a file or folder with the digest {wanted} in the"
                    f" run. Present: {now or 'gone'}; at its commit: {there or 'none'}. Put it back as it was."
                )
            path = dict(named_paths(options, output, self.project))[option]
            _link(path, self.code / path.relative_to(self.project))

    def _data(self) -> str:
        own = self.facts["parameters"]["output"]
        target = self.code / self.tree["output"]
        manifest = self.project / own / RECORDS
        if self._is_wanted(manifest):
            _take(manifest, target / RECORDS)
            _link(manifest.parent / "images", target / IMAGES)
            return AS_IT_IS
        found = {name: self._from_dvc(f"{own}/{name}") for name in (RECORDS, IMAGES)}
        manifest_found, images = found[RECORDS], found[IMAGES]
        if manifest_found is not None:
            _take(manifest_found, target / RECORDS)
            if images is not None:
                _link(images, target / IMAGES)
            if self._is_wanted(target / RECORDS):
                return FROM_DVC
            shutil.rmtree(target / RECORDS.partition("/")[0], ignore_errors=True)
        self._bring_raw()
        return AGAIN

    def _is_wanted(self, manifest: Path) -> bool:
        """Whether the prepared records are those of the training, and their images as the manifest says."""
        if not manifest.is_file():
            self.tried.append(f"there are no prepared records at {manifest}")
            return False
        if RecordTable(manifest).digest != self.facts["data"]:
            self.tried.append(f"the prepared records at {manifest} have another digest")
            return False
        changed = next(_changed_images(manifest), None)
        if changed is not None:
            self.tried.append(f"{changed} is not the image that was prepared")
        return changed is None

    def _bring_raw(self) -> None:
        """The data that are prepared again; what the starter draws needs none."""
        path = self.tree["data"]["path"]
        if self._is_drawn() or Path(path).expanduser().is_absolute():
            return
        present, target = self.project / path, self.code / path
        if target.exists():
            return
        digest = self._hash_of(path)
        if digest is not None:
            found = self._from_dvc(path)
            if found is not None:
                _link(found, target)
                return
        if present.exists():
            _link(present, target)
            return
        why = "\n".join(f"  {line}" for line in self.tried)
        raise UserError(f"The data of the run are nowhere: {path} does not exist, and\n{why}\nTry: dvc pull")

    def _base(self) -> str:
        model, content = str(self.facts["model"]), self.facts.get("model_content")
        if may_be_hub_id(model) and not (self.project / model).exists() and content is None:
            return "from the model hub"
        present = self.project / Path(model).expanduser()
        # A run of an older version has no digest of the files.
        if present.is_dir() and content in (None, content_digest(present)):
            self._put_model(present)
            return AS_IT_IS
        found = None if content is None else self._from_dvc(model)
        if found is not None and content_digest(found) == content:
            self._put_model(found)
            return FROM_DVC
        if self.tree["model"]["path"] is None:
            return AGAIN
        state = "has other files now than when the run was trained" if present.exists() else "does not exist"
        raise UserError(
            f"The base model of the run, {model}, {state}. Put the files back (or: dvc pull), so that their digest is"
            f" {content}."
        )

    def _put_model(self, source: Path) -> None:
        """A copy, for the starter writes into the folder; a given model is only read."""
        given = self.tree["model"]["path"]
        if given is None:
            shutil.copytree(source, self.code / self.tree["starter"]["model"], dirs_exist_ok=True)
        elif not Path(given).expanduser().is_absolute() and not (self.code / given).exists():
            _link(source, self.code / given)

    def _write_report(self) -> None:
        """What the starter would have said of the model that was brought."""
        given, starter = self.tree["model"]["path"], self.tree["starter"]
        report = {
            "dataset": starter["dataset"] if given is None else self.tree["data"]["path"],
            "model": given or starter["model"],
            "digest": self.facts["model_digest"],
            "content": self.facts.get("model_content"),
        }
        file = self.code / self.tree["output"] / REPORT
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report), encoding="utf-8")

    def _offer_baseline(self) -> None:
        """The present baseline: the pipeline keeps it where it is the one that it would draw."""
        present = self.project / self.facts["parameters"]["output"] / BASELINE
        if present.is_dir():
            shutil.copytree(present, self.code / self.tree["output"] / BASELINE, dirs_exist_ok=True)

    def _is_drawn(self) -> bool:
        return bool(self.tree["data"]["path"] == self.tree["starter"]["dataset"])

    def _hash_of(self, path: str) -> str | None:
        return self.hashes.get(Path(path).as_posix())

    def _from_dvc(self, path: str) -> Path | None:
        """What the training read, by its DVC hash; None where DVC does not know it or has lost it."""
        digest = self._hash_of(path)
        if digest is None:
            self.tried.append(f"DVC recorded no hash of {path}")
            return None
        try:
            return restore(self.project, digest, path, self.folder)
        except UserError as error:
            self.tried.append(str(error))
            self.note(str(error))
            return None


def _changed_images(manifest: Path) -> Iterator[Path]:
    """Images that are missing, or have another sha256 than the manifest says."""
    import pyarrow.parquet as pq

    rows = pq.read_table(manifest, columns=["target_image", "target_sha256", "source_images", "source_sha256"])
    for row in rows.to_pylist():
        names = [row["target_image"], *(row["source_images"] or [])]
        sums = [row["target_sha256"], *(row["source_sha256"] or [])]
        for name, expected in zip(names, sums, strict=True):
            if name is None:
                continue
            image = manifest.parent / name
            if not image.is_file() or file_digest(image) != expected:
                yield image


def _take(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _link(source: Path, target: Path) -> None:
    """Lets ``target`` be ``source``, which is only read; what is there makes room."""
    if not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    target.symlink_to(source.resolve())
