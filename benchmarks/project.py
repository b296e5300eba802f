"""The configuration and the records of a project's folder, as `kedro run` would see them there."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project
from omegaconf import OmegaConf

from visual_grpo.config import Parameters
from visual_grpo.data.manifest import RecordTable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="the project's folder; default: here")
    parser.add_argument("--params", default="", help="parameters, as for kedro run")
    parser.add_argument("--env", help="the Kedro environment, as for kedro run")


def load(arguments: argparse.Namespace) -> tuple[Parameters, RecordTable]:
    """Changes into the folder."""
    os.chdir(arguments.folder)
    bootstrap_project(Path.cwd())
    changes: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(filter(None, arguments.params.split(",")))))
    with KedroSession.create(Path.cwd(), env=arguments.env, runtime_params=changes) as session:
        context = session.load_context()  # type: ignore[attr-defined]  # the abstract session lacks it
        return context.catalog.load("parameters"), context.catalog.load("records")
