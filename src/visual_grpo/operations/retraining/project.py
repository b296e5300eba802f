"""``python -m visual_grpo.operations.retraining.project [--env NAME]``: fills in what DVC's stages depend on.

``dvc.yaml`` is written by hand for all environments. This copies it to an environment and writes the two files that it
reads: ``params.yaml`` next to it, with the environment's folders, and ``OUTPUT/dvc_parameters.json``, with the
parameters that decide each stage's result.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from click import ClickException

from visual_grpo import provenance
from visual_grpo.common import quiet_libraries
from visual_grpo.common.digests import digest_once
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import from_here, write_atomically
from visual_grpo.common.importing import code_digest
from visual_grpo.config import Parameters, RetrainConfig
from visual_grpo.config.decides import DEPENDS_ON
from visual_grpo.config.places import UNNAMED_ENVIRONMENTS, place
from visual_grpo.config.validation import validate
from visual_grpo.data.manifest import IMAGES
from visual_grpo.operations.command import render, split_params
from visual_grpo.operations.session import EXPECTED, Session, expected_error
from visual_grpo.starter.worlds import own_functions

STAGES, PARAMETERS = Path("dvc.yaml"), "dvc_parameters.json"
TRAIN_PARAMS = "train_params"
DATASETS = (
    *("base_model", "records", "data_report", "baseline", "adapters", "training_history"),
    *("evaluation", "evaluation_report", "result"),
)
"""Datasets of the catalog that dvc.yaml names as the catalog does."""
HEADER = """\
# The values of dvc.yaml, written by `make repro` and `make retrain`; train_params is yours too:
# further parameters of the stage train, as --params has them, such as grpo.steps=100,seed=3
"""


@dataclass(frozen=True)
class Project:
    """An environment of the project in the working folder; None = the default one."""

    config: Parameters
    environment: str | None

    @property
    def option(self) -> str:
        return "" if self.environment is None else f"--env={self.environment}"

    @property
    def stages(self) -> Path:
        """Its dvc.yaml; params.yaml and dvc.lock are next to it."""
        return STAGES if self.environment is None else Path("conf") / self.environment / STAGES

    @property
    def values(self) -> Path:
        return self.stages.with_name("params.yaml")

    def place(self, dataset: str) -> Path:
        return place(self.config.output, dataset)

    def training_params(self) -> dict[str, str]:
        written = yaml.safe_load(self.values.read_text(encoding="utf-8")) if self.values.is_file() else {}
        return dict(split_params(str(written.get(TRAIN_PARAMS) or "")))

    def write(self, **training: str | None) -> bool:
        """Brings all three files up to date; returns whether dvc.yaml or params.yaml had to change.

        ``training`` replaces parameters of the training; None removes one.
        """
        parameters = self.training_params() | training
        params = ",".join(f"{name}={value}" for name, value in parameters.items() if value is not None)
        values = yaml.safe_dump({**self._folders(), TRAIN_PARAMS: params}, sort_keys=False)
        texts = {self.stages: STAGES.read_text(encoding="utf-8"), self.values: HEADER + values}
        stale = {path: text for path, text in texts.items() if not path.is_file() or path.read_text("utf-8") != text}
        for path, text in stale.items():
            write_atomically(path, text)
        write_atomically(
            Path(self.config.output) / PARAMETERS,
            json.dumps(stage_parameters(self.config, parameters.get("train.start")), indent=1),
        )
        return bool(stale)

    def _folders(self) -> dict[str, str]:
        starter, config = self.config.starter, self.config
        own_model = None if config.model_is_pretrained else _here(config.model.path)
        return {
            "project": "." if self.environment is None else "../..",
            "option": self.option,
            "output": self.config.output,
            "rendered_data": starter.dataset,
            "pretrained_model": starter.model,
            # A hub has no file that DVC could look at.
            "data": _here(config.data.path) or starter.dataset,
            "model": own_model or starter.model,
            "starter_reads": own_model or "requirements.lock",
            **{name: self._inside(self.place(name)) for name in DATASETS},
            "images": self._inside(self.place("records").with_name(IMAGES)),
            # Not `trained`, which is a column of the result in `dvc exp show`.
            "trained_samples": self._inside(self.place("trained")),
        }

    def _inside(self, path: Path) -> str:
        """Returns a path as a stage has it; raises UserError for one that DVC cannot keep."""
        if from_here(path).is_absolute():
            raise UserError(f"The catalog has {path} outside of the project, where DVC keeps no result of a stage.")
        return from_here(path).as_posix()


def stage_parameters(config: Parameters, start: str | None = None) -> dict[str, Any]:
    """Returns, by stage, the parameters and digests of the user's files that decide its result.

    ``start`` replaces ``train.start``.
    """
    tree = config.public()
    decided_by = {"parameters": tree, **provenance.code(config)}
    read = {function: code_digest(function) for function in own_functions(config)}
    if config.model.lora is not None:
        read["lora"] = _content(config.model.lora)
    decided = {pipeline: provenance.values(decided_by, about) for pipeline, about in DEPENDS_ON.items()}
    return {
        "starter": {**{name: tree[name] for name in ("data", "model", "seed", "starter")}, **read},
        "data_preparation": {"data": tree["data"]},
        **decided,
        "train": {**decided["train"], "train.start": _content(start or config.train.start)},
    }


def _content(named: str) -> str:
    """Returns the sha256 of a file; the name of anything else, such as a LoRA on the hub or a training's adapters."""
    file = Path(named).expanduser()
    return digest_once(file) if file.is_file() else named


def read_project(folder: Path, environment: str | None) -> Project:
    """Reads the parameters as ``kedro run`` does. Raises UserError without a project, and for wrong parameters."""
    from kedro.framework.startup import bootstrap_project

    if not (folder / "pyproject.toml").is_file() or not (folder / "conf").is_dir():
        raise UserError(f"{folder} is not the folder of a Visual GRPO project: run this in the project's folder.")
    bootstrap_project(folder)
    name = None if environment in UNNAMED_ENVIRONMENTS else environment
    try:
        with Session.create(project_path=folder, env=name) as session:
            context: Any = session.load_context()  # type: ignore[attr-defined]
            # Not of the catalog, for which Kedro imports all pipelines, and they the libraries of models.
            return Project(validate(context.config_loader["parameters"]), name)
    except ClickException as error:  # The environment does not exist.
        raise UserError(error.message) from error
    except UserError:
        raise
    except EXPECTED as error:
        raise UserError(str(expected_error(error))) from error


def read_settings(folder: Path, environment: str | None) -> RetrainConfig:
    """Reads the section ``retrain`` alone, of parameters in which something else is wrong."""
    from kedro.config import OmegaConfigLoader
    from kedro.framework.project import settings

    loader = OmegaConfigLoader(str(folder / "conf"), env=environment or "local", **settings.CONFIG_LOADER_ARGS)
    return RetrainConfig.model_validate(loader["parameters"]["retrain"])


def _here(path: str) -> str | None:
    """Returns a path relative to the project where it is inside; None if the file or folder does not exist."""
    full = Path(path).expanduser()
    return from_here(full).as_posix() if full.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m visual_grpo.operations.retraining.project", description=__doc__)
    parser.add_argument("--env", help="Kedro's environment; without it the default")
    parser.add_argument("--check", action="store_true", help="fail where dvc.yaml or params.yaml was out of date")
    arguments = parser.parse_args()
    try:
        project = read_project(Path.cwd(), arguments.env)
        if project.write() and arguments.check:
            raise UserError(f"{project.values} was out of date and has been updated: run the command again.")
    except (UserError, OSError) as error:
        sys.stderr.write(f"Error: {render(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    quiet_libraries.silence_libraries()
    sys.exit(main())
