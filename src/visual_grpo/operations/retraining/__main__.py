"""Retrains if there is a reason to, and promotes what is better.

Exit codes: 0 promoted, or nothing to do; 1 failed, the last line says why; 3 trained and not promoted; 4 another
retraining of the same folder is running; 5 the time limit retrain.hours has passed; 6 the data were refused; 128 + N
stopped by the signal N.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from visual_grpo.common import console, quiet_libraries
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import InUseError, hold, release, write_atomically
from visual_grpo.common.processes import OutOfTimeError, ProgramError, signal_of, terminate_as_interrupt
from visual_grpo.operations.command import render
from visual_grpo.operations.retraining.job import Code, DataRefusedError, Retraining, notify, summary
from visual_grpo.operations.retraining.project import Project, read_project, read_settings

LOCK, SUMMARY = ".retraining.lock", "retraining.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m visual_grpo.operations.retraining", description=__doc__)
    parser.add_argument("--env", help="Kedro's environment; without it the default")
    parser.add_argument("--dry-run", action="store_true", help="say what would happen, and train nothing")
    options = parser.parse_args(arguments)
    environment = options.env
    try:
        with terminate_as_interrupt():
            project = read_project(Path.cwd(), environment)
            try:
                lock = hold(Path(project.config.output) / LOCK)
            except InUseError as error:
                console.note(f"A retraining is already running: {error}.")
                return Code.BUSY
            if options.dry_run:
                release()  # A retraining may start meanwhile.
                return _foresee(project)
            return _retrain(project, lock)
    except (UserError, OSError) as error:  # Of the system: a checkout that cannot be written.
        ended = summary(Code.FAILED, render(error), reason=None)
        console.note(f"Error: {render(error)}\nRetraining: {ended['sentence']} (exit code {Code.FAILED})")
        with suppress(Exception):  # Somebody is told, unless what cannot be read says how.
            if not options.dry_run:
                notify(read_settings(Path.cwd(), environment), ended)
        return Code.FAILED
    except KeyboardInterrupt as stop:
        console.note("Stopped.")
        return 128 + signal_of(stop)


def _foresee(project: Project) -> int:
    try:
        console.note(f"Dry run: {Retraining(project).foreseen()}")
    except ProgramError as error:
        raise UserError(render(error)) from error
    return Code.DONE


def _retrain(project: Project, lock: int) -> int:
    ended = _run(Retraining(project, lock))
    file = project.place("promotion_result").with_name(SUMMARY)
    write_atomically(file, json.dumps(ended, indent=2, ensure_ascii=False))
    took, code = timedelta(seconds=round(ended["seconds"])), int(ended["code"])
    console.note(f"Retraining of {ended['model']}: {ended['sentence']} ({took}, exit code {code})")
    notify(project.config.retrain, ended)
    return code


def _run(retraining: Retraining) -> dict[str, Any]:
    """Returns the summary, also of a failure, so that somebody is told."""
    try:
        return retraining.run()
    except DataRefusedError as error:
        return retraining.summary(Code.DATA_REFUSED, str(error))
    except OutOfTimeError:
        return retraining.summary(Code.OUT_OF_TIME, "the time limit retrain.hours is reached; the next call continues")
    except KeyboardInterrupt as stop:
        return retraining.summary(128 + signal_of(stop), "stopped by a signal; the next call continues")
    except (UserError, ProgramError) as error:
        return retraining.summary(Code.FAILED, render(error))
    except Exception as error:
        traceback.print_exc()
        return retraining.summary(Code.FAILED, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    quiet_libraries.silence_libraries()
    sys.exit(main())
