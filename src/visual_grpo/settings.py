"""Kedro's settings of this project."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from omegaconf.resolvers import oc

from visual_grpo.hooks.ending import EndingHooks
from visual_grpo.hooks.inputs_and_outputs import InputHooks, OutputHooks
from visual_grpo.hooks.parameters import ParameterHooks, ProjectConfigLoader
from visual_grpo.hooks.tracking import TrackingHooks
from visual_grpo.operations.session import Session

PROJECT_PATH = Path(__file__).resolve().parents[2]

# The user's rewards, worlds and families are files in the project's root. At the end of the path, so that it hides no
# package.
sys.path.append(str(PROJECT_PATH))

# pluggy calls the last first, and those that are marked `tryfirst` before the others. So before a pipeline runs, inputs
# are looked up, parameters checked and completed, folders locked; then the steps are counted and MLflow's run begins.
HOOKS = (OutputHooks(), ParameterHooks(), InputHooks(), TrackingHooks(), EndingHooks())
# Where a user has kedro-mlflow it would begin a second run; the other two write files that nobody asked for.
DISABLE_HOOKS_FOR_PLUGINS = ("kedro_mlflow", "kedro-telemetry", "kedro-viz")
SESSION_CLASS = Session

CONFIG_LOADER_CLASS = ProjectConfigLoader
CONFIG_LOADER_ARGS: dict[str, Any] = {
    "base_env": "base",
    "default_run_env": "local",
    # An environment or --params changes single keys and leaves their neighbours.
    "merge_strategy": {"parameters": "soft"},
    "custom_resolvers": {"oc.env": oc.env},
}
