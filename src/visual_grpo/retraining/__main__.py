"""``python -m visual_grpo.retraining [--env NAME]``: retrains where there is a reason to, and promotes what is better.

Exit codes: see `outcome.Code`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from visual_grpo import console, files, third_party_output
from visual_grpo.errors import UserError
from visual_grpo.retraining.commands import Commands
from visual_grpo.retraining.job import Retraining
from visual_grpo.retraining.notice import notify
from visual_grpo.retraining.outcome import Code, DataRefusedError, Outcome, OutOfTimeError, StageFailedError
from visual_grpo.retraining.project import read_project
from visual_grpo.stopping import signal_of, terminate_as_interrupt
from visual_grpo.visible_text import visible

LOCK, SUMMARY = ".retraining.lock", "08_reporting/retraining.json"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m visual_grpo.retraining", description=__doc__)
    parser.add_argument("--env", help="Kedro's environment; without it the default")
    environment = parser.parse_args(arguments).env
    try:
        with terminate_as_interrupt():
            return _retrain(environment)
    except UserError as error:
        console.note(f"Error: {visible(str(error))}")
        return Code.FAILED
    except KeyboardInterrupt as stop:
        console.note("Stopped.")
        return 128 + signal_of(stop)


def _retrain(environment: str | None) -> int:
    project = read_project(Path.cwd(), environment)
    config, output = project.config, Path(project.config.output)
    began = time.monotonic()
    try:
        files.hold(output / LOCK)
    except UserError as error:
        console.note(f"Another retraining is running: {error}")
        return Code.BUSY
    try:
        hours = config.retrain.hours
        commands = Commands(
            project=Path.cwd(),
            deadline=None if hours is None else began + hours * 3600,
        )
        outcome = _ended(project.retraining(commands))
        summary = outcome.as_json() | {"ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        _write(output / SUMMARY, summary)
        console.note(outcome.line)
        problem = notify(config.retrain, summary, Path.cwd())
        if problem is not None:
            console.note(f"Warning: {problem}")
        return outcome.code
    finally:
        files.release()


def _ended(retraining: Retraining) -> Outcome:
    """How it ends, also where it fails: somebody is told of that too."""
    try:
        return retraining.run()
    except DataRefusedError as error:
        return retraining.outcome(Code.DATA_REFUSED, str(error))
    except OutOfTimeError:
        hours = retraining.config.retrain.hours
        return retraining.outcome(Code.OUT_OF_TIME, f"the {hours:g} h of retrain.hours are over; the next call goes on")
    except KeyboardInterrupt as stop:
        return retraining.outcome(128 + signal_of(stop), "stopped by a signal; the next call goes on")
    except (UserError, StageFailedError) as error:
        return retraining.outcome(Code.FAILED, visible(str(error)))
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr)  # noqa: T201
        return retraining.outcome(Code.FAILED, f"{type(error).__name__}: {error}")


def _write(file: Path, summary: dict[str, Any]) -> None:
    files.write_atomically(file, json.dumps(summary, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    third_party_output.silence_libraries()
    sys.exit(main())
