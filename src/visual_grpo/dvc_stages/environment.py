"""A Kedro environment as its DVC stages see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kedro.config import MissingConfigException, OmegaConfigLoader
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from visual_grpo.config import Parameters
from visual_grpo.config.outputs import UNNAMED_ENVIRONMENTS, with_output_folders
from visual_grpo.config.validation import validate
from visual_grpo.errors import UserError, nearest_hint

BASE, DEFAULT = "base", "local"
CONF = Path("conf")
START = "start.yml"
"""In the environment's folder: further parameters of the training."""
_SKIPPED = ("dvc.yaml", "dvc.lock", START, "logging.yml", "credentials.yml", ".gitignore", ".gitkeep")
"""Files of an environment on which no result depends."""


@dataclass(frozen=True)
class Environment:
    """A Kedro environment as its stages see it."""

    name: str | None
    """None = the default."""
    config: Parameters
    catalog: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, name: str | None) -> Environment:
        """Raises UserError for an unknown environment or one that is not valid."""
        from visual_grpo.settings import CONFIG_LOADER_ARGS

        name = None if name in UNNAMED_ENVIRONMENTS else name
        if name is not None and not (CONF / name).is_dir():
            known = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())
            raise UserError(
                f"There is no environment {name!r} in {CONF}.{nearest_hint(name, known)} There are: {', '.join(known)}"
            )
        loader = OmegaConfigLoader(str(CONF.resolve()), env=name or DEFAULT, **CONFIG_LOADER_ARGS)
        try:
            config = validate(with_output_folders(loader["parameters"], name))
        except (MissingConfigException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise UserError(f"{CONF / (name or BASE)}: {error}") from error
        OmegaConf.register_new_resolver("output", lambda: config.output, replace=True)
        return cls(name, config, loader["catalog"])

    @property
    def file(self) -> Path:
        """Where its stages are written."""
        return Path("dvc.yaml") if self.name is None else CONF / self.name / "dvc.yaml"

    @property
    def start(self) -> Path:
        return CONF / (self.name or BASE) / START

    @property
    def option(self) -> str:
        return "" if self.name is None else f" --env={self.name}"

    def parameter_files(self) -> list[Path]:
        own = [] if self.name is None else sorted((CONF / self.name).glob("parameters*.yml"))
        return [CONF / BASE / "parameters.yml", *own]

    def other_files(self) -> list[str]:
        """What else its configuration is: of the default its local part, which no two people share."""
        if self.name is None:
            return [f"{CONF / DEFAULT}"]
        files = [file for file in sorted((CONF / self.name).rglob("*")) if file.is_file()]
        return [f.as_posix() for f in files if f.name not in _SKIPPED and f not in self.parameter_files()]
