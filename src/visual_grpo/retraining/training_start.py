"""What the next training is given beside the configuration: the adapter that it starts from, and its seed.

It is in a file that DVC watches (``conf/ENV/start.yml``): a training that starts from something else is another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from visual_grpo.errors import UserError

KEY = "train_params"
_START, _SEED = "train.start", "train.seed"


class TrainingStart:
    """The file's parameters; writes only what changes."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def set_start(self, start: str | None) -> bool:
        """Lets the training start from an adapter, None = from the base model; whether that is another than before."""
        return self._set({**self._read(), _START: start})

    def next_seed(self, configured: int) -> int:
        """Gives the training the seed after that of the last one, ``configured`` where none was given."""
        given = self._read()
        seed = int(given.get(_SEED, configured)) + 1
        self._set({**given, _SEED: str(seed)})
        return seed

    def _read(self) -> dict[str, str]:
        if not self.file.is_file():
            return {}
        tree = yaml.safe_load(self.file.read_text(encoding="utf-8")) or {}
        text = tree.get(KEY) if isinstance(tree, Mapping) else None
        if not isinstance(text, str):
            raise UserError(f"{self.file}: expected {KEY}: with a text such as train.seed=3, got {text!r}")
        pairs = [part.partition("=") for part in text.split(",") if part.strip()]
        return {name.strip(): value.strip() for name, _, value in pairs}

    def _set(self, parameters: Mapping[str, str | None]) -> bool:
        kept = {name: value for name, value in parameters.items() if value is not None}
        if kept == self._read():
            return False
        comments = [line for line in self._lines() if line.startswith("#")]
        text = ",".join(f"{name}={value}" for name, value in kept.items())
        draft = self.file.with_name(f"{self.file.name}.new")
        draft.write_text("".join(f"{line}\n" for line in comments) + f'{KEY}: "{text}"\n', encoding="utf-8")
        draft.replace(self.file)
        return True

    def _lines(self) -> list[str]:
        return self.file.read_text(encoding="utf-8").splitlines() if self.file.is_file() else []
