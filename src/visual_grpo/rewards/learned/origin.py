"""Where a pretrained model's files are: a folder, or the hub's cache, which is filled at the first use."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from visual_grpo.errors import UserError
from visual_grpo.hub_files import check_snapshot
from visual_grpo.saved_model import may_be_hub_id

log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"

CONFIG = ("config.json",)
WEIGHTS = ("model.safetensors", _INDEX)
IMAGE_PROCESSOR = ("preprocessor_config.json", "processor_config.json")
TOKENIZER = ("tokenizer.json", "vocab.json")
"""Files of which one must be there. Weights are read as safetensors only, which hold no code."""

_LOADED = ("*.json", "*.txt", "model*.safetensors")
"""What is downloaded: not the same weights in other formats."""
_PATIENCE = 5.0
"""Seconds in which the hub must answer a first question."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A model's folder or hub id, as an option of a reward names it."""

    reward: str
    option: str
    """``model``, ``processor``: the option's name, for messages."""
    path: str
    revision: str | None = None
    """Of a hub id: a branch, tag or commit; None = main."""
    model_type: str | None = None
    """What the files' config.json must call the model; None = it is not looked at."""
    needed: Sequence[Sequence[str]]
    """Of each entry, one file must be there."""
    patterns: Sequence[str] = _LOADED
    """Files that are downloaded."""

    def check(self) -> None:
        """Raises UserError, with what to do, where the files are neither here nor on a hub that answers.

        So it does where they are here, and are another model's, or one of a ``revision`` is not what the hub published.
        """
        found = self._local()
        if found is None:
            self._ask_hub()
            log.info("The reward %s downloads %s when it scores its first sample.", self.reward, self.path)
        else:
            self._check_content(found)

    def folder(self) -> Path:
        """The folder with the files, downloaded if need be. Raises UserError as `check` does."""
        found = self._local()
        if found is None:
            self._ask_hub()
            found = self._downloaded()
        self._check_content(found)
        return found

    def commit(self) -> str | None:
        """The commit of a hub id whose files are used; None for a folder. Raises UserError as `check` does."""
        if not may_be_hub_id(self.path):
            return None
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return self.revision
        found = self._local()
        return self._ask_hub() if found is None else found.name

    def _check_content(self, folder: Path) -> None:
        if self.revision is not None and may_be_hub_id(self.path):
            check_snapshot(self.path, self.revision, folder)
        if self.model_type is not None:
            self._check_type(folder, self.model_type)

    def _check_type(self, folder: Path, expected: str) -> None:
        try:
            config = json.loads((folder / CONFIG[0]).read_text(encoding="utf-8"))
            found = config.get("model_type")
        except (OSError, ValueError, AttributeError) as error:  # AttributeError: no JSON object.
            raise UserError(f"{self.reward}: {folder} has no readable config.json: {error}") from error
        if found != expected:
            classes = ", ".join(map(str, config.get("architectures") or ["no class"]))
            raise UserError(
                f"{self._named}, which must be a model of the type {expected!r}, and holds one of the type {found!r}"
                f" ({classes})"
            )

    def _local(self) -> Path | None:
        """The folder if all of it is on this machine; None for a hub id that must be downloaded."""
        if not may_be_hub_id(self.path):
            folder = Path(self.path).expanduser()
            if not folder.is_dir():
                raise UserError(f"{self._named}, which is not a folder on this machine. {self._remedy}")
            if missing := lacking(folder, self.needed):
                raise UserError(f"{self._named}, and this folder lacks {', '.join(missing)}. {self._remedy}")
            return folder
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            cached = Path(snapshot_download(self.path, revision=self.revision, local_files_only=True))
        except LocalEntryNotFoundError:
            return None
        except HFValidationError as error:
            raise UserError(f"{self._named}, which is neither a folder on this machine nor a hub id") from error
        return None if lacking(cached, self.needed) else cached

    def _ask_hub(self) -> str | None:
        """The commit that the hub would give now. Raises UserError where it does not answer."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.constants import is_offline_mode

        if is_offline_mode():
            raise self._not_here("HF_HUB_OFFLINE is set")
        file = self.needed[0][0]
        try:
            url = hf_hub_url(self.path, file, revision=self.revision)
            return get_hf_file_metadata(url, timeout=_PATIENCE).commit_hash
        except _unreachable() as error:
            raise self._not_here(_first_line(error)) from error

    def _downloaded(self) -> Path:
        from huggingface_hub import snapshot_download

        try:
            found = snapshot_download(self.path, revision=self.revision, allow_patterns=list(self.patterns))
        except _unreachable() as error:
            raise self._not_here(_first_line(error)) from error
        if missing := lacking(Path(found), self.needed):
            raise UserError(f"{self._named}, which has no {', '.join(missing)} on the hub. {self._remedy}")
        return Path(found)

    def _not_here(self, why: str) -> UserError:
        return UserError(f"{self._named}, which is not on this machine and cannot be downloaded: {why}. {self._remedy}")

    @property
    def _named(self) -> str:
        return f"{self.reward}: its {self.option} is {self.path!r}"

    @property
    def _remedy(self) -> str:
        files = "; ".join(" or ".join(names) for names in self.needed)
        how = f"Give a folder that holds {files}"
        if may_be_hub_id(self.path):
            patterns = " ".join(f"--include '{pattern}'" for pattern in self.patterns)
            revision = f" --revision {self.revision}" if self.revision else ""
            how = f"Where there is a network: hf download {self.path}{revision} {patterns} --local-dir FOLDER"
        return f"{how}; then set rewards.{self.reward}.options.{self.option} to the folder's path"


def lacking(folder: Path, needed: Sequence[Sequence[str]]) -> list[str]:
    """What a folder lacks of the files, and of the shards that an index of weights names."""
    missing = [" or ".join(names) for names in needed if not any((folder / name).is_file() for name in names)]
    index = folder / _INDEX
    if WEIGHTS in needed and index.is_file() and not (folder / WEIGHTS[0]).is_file():
        shards = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()
        missing += [name for name in sorted(set(shards)) if not (folder / name).is_file()]
    return missing


def _unreachable() -> tuple[type[BaseException], ...]:
    """What the hub's client raises: its own errors, and those of the HTTP library that it uses."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return HTTPError, OSError, ValueError


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
