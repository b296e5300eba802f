"""Ends ``kedro run`` when it does not succeed.

Expected errors end with a message, Ctrl-C with one line, bugs with a traceback.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from kedro.config import MissingConfigException
from kedro.framework import project as framework
from kedro.framework.session import KedroSession
from kedro.io import DatasetError
from omegaconf.errors import ConfigTypeError, OmegaConfBaseException
from yaml import YAMLError

from visual_grpo.common import console, files
from visual_grpo.common.errors import UserError, nearest_hint, sanitize, user_error
from visual_grpo.common.machine_errors import machine_fault
from visual_grpo.common.processes import signal_of, tell_reason, terminate_as_interrupt
from visual_grpo.operations.command import Command, render
from visual_grpo.tracking.tracker import Tracker

EXPECTED = (UserError, DatasetError, MissingConfigException, OmegaConfBaseException, YAMLError)


class Session(KedroSession):
    """A Kedro session whose MLflow run never stays open and whose expected errors are readable."""

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> KedroSession:
        """Creates a `KedroSession`; raises click.ClickException for a different project's code or no environment."""
        session = super().create(*args, **kwargs)
        project, name = Path(session.store["project_path"]), str(framework.PACKAGE_NAME)
        code = Path(str(sys.modules[name].__file__)).resolve().parent
        if (
            code != (project / "src" / name).resolve()
        ):  # A different clone's environment is active, or .venv was copied.
            raise click.ClickException(
                f"The code that would run is {code}, but this project is {project}, whose commit would be recorded."
                " Use this project's own environment.\nRun: make setup && source .venv/bin/activate"
            )
        environment = session.store.get("env")
        configuration = Path(kwargs.get("conf_source") or project / framework.settings.CONF_SOURCE)
        if environment and configuration.is_dir() and not (configuration / environment).is_dir():
            known = sorted(folder.name for folder in configuration.iterdir() if folder.is_dir())
            raise click.ClickException(
                f"The environment {environment!r} does not exist in {configuration}.{nearest_hint(environment, known)}"
                f" Environments: {', '.join(known)}"
            )
        # Until Kedro tells the hooks which pipelines run.
        replace(Command.from_run_params(session.store), source=kwargs.get("conf_source")).set_current()
        return session

    def run(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Runs the pipelines.

        Raises:
            click.ClickException: an error that the user can correct.
            click.exceptions.Exit: stopped by a signal; the code is 128 + the signal's number.
        """
        try:
            with terminate_as_interrupt():
                result: dict[str, Any] = super().run(*args, **kwargs)
                return result
        except KeyboardInterrupt as stop:
            with suppress(KeyboardInterrupt):  # Another Ctrl-C ends the wait for MLflow.
                Tracker.active().end("KILLED")
            console.note("Stopped.")
            raise click.exceptions.Exit(128 + signal_of(stop)) from None
        except SystemExit:  # Of code that the command calls, such as a reward's.
            Tracker.active().end("FAILED")
            raise
        except Exception as error:
            Tracker.active().end("FAILED")
            expected = expected_error(error)
            message = f"{type(error).__name__}: {error}" if expected is None else sanitize(render(expected).strip())
            tell_reason(message)
            if expected is None:
                raise
            ended = click.ClickException(message)
            ended.exit_code = getattr(expected, "exit_code", 1)  # type: ignore[misc] # click reads it of the exception.
            raise ended from error
        finally:
            files.release()


def expected_error(error: BaseException) -> BaseException | None:
    """Returns the error to show to the user, or None for a bug.

    A `UserError` anywhere in the chain of causes comes first, unless memory ran out: a model that could not be loaded
    for want of it is not damaged, as the `UserError` then says.
    """
    fault = machine_fault(error)
    found = fault if fault is not None and fault.remedy else user_error(error) or fault
    if found is not None:
        return found
    if isinstance(error, ConfigTypeError):
        return UserError(f"--params or conf/ has a list where a section is expected, or the reverse: {error}")
    return error if isinstance(error, EXPECTED) else None
