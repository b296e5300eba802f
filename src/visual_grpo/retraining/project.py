"""The project that is retrained: its parameters and MLflow's address, as ``kedro run`` would read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click import ClickException

from visual_grpo.config import Parameters
from visual_grpo.config.outputs import UNNAMED_ENVIRONMENTS
from visual_grpo.errors import UserError
from visual_grpo.retraining.commands import Commands
from visual_grpo.retraining.job import Retraining
from visual_grpo.retraining.stages import Stages
from visual_grpo.retraining.training_start import TrainingStart
from visual_grpo.session import EXPECTED, Session, expected_error
from visual_grpo.tracking.registry_client import tracking_uri


@dataclass(frozen=True)
class Project:
    """An environment of the project in the working folder."""

    config: Parameters
    environment: str | None
    """Kedro's; None = the default one."""
    tracking_uri: str

    def retraining(self, commands: Commands) -> Retraining:
        """DVC's files are beside the environment's parameters; those of the default one in the project's folder."""
        own = Path() if self.environment is None else Path("conf") / self.environment
        return Retraining(
            config=self.config,
            environment=self.environment,
            tracking_uri=self.tracking_uri,
            stages=Stages(own / "dvc.yaml", commands),
            start=TrainingStart(Path("conf") / (self.environment or "base") / "start.yml"),
            commands=commands,
        )


def read_project(folder: Path, environment: str | None) -> Project:
    """Reads the parameters; checks them as ``kedro run`` does.

    Raises:
        UserError: this is no folder of a project, or its parameters are wrong.
    """
    from kedro.framework.startup import bootstrap_project

    if not (folder / "pyproject.toml").is_file() or not (folder / "conf").is_dir():
        raise UserError(f"{folder} is not the folder of a Visual GRPO project: run this in the project's folder.")
    bootstrap_project(folder)
    name = None if environment in UNNAMED_ENVIRONMENTS else environment
    try:
        with Session.create(project_path=folder, env=name) as session:
            context: Any = session.load_context()  # type: ignore[attr-defined]
            config: Parameters = context.catalog.load("parameters")
            return Project(config, name, tracking_uri())
    except ClickException as error:  # As of an environment that is not there.
        raise UserError(error.message) from error
    except EXPECTED as error:
        raise UserError(str(expected_error(error))) from error
