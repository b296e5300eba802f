"""Hides the warnings, notices and progress bars of other libraries, and sets what else they take from the environment.

Kedro calls ``silence_libraries`` through the entry point ``kedro.init``, before it loads plugins: mlflow reads
its environment variables at import time, which is before the project's settings are read.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from visual_grpo.common.errors import sanitize

_ENVIRONMENT = {
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # A dead server is noticed in seconds; tracking tries again by itself. Jitter would use Python's random state.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
    "KEDRO_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "ORT_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # Read when torch is imported.
}

_QUIET = (
    # Failed requests with tracebacks: the exception, or tracking's own line, tells what matters.
    *("mlflow.store.db.utils", "urllib3.connectionpool"),
    "mlflow.utils.environment",  # An environment without pip.
    "bitsandbytes.backends.cpu.ops",  # Kernels that are missing on some processors and that nothing here calls.
)
"""Loggers that say nothing a user needs."""


class SafeRecord(logging.LogRecord):
    """A message of the log, with escapes for what a terminal would act on."""

    def getMessage(self) -> str:  # noqa: N802 (a name of the library's)
        return sanitize(super().getMessage())


def silence_libraries() -> None:
    """Hides the warnings and notices of installed libraries, and shortens torch's spinning, unless the environment or
    ``python -W`` says otherwise; makes the messages of the log `SafeRecord`."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        Path.home()
    except RuntimeError:  # A container's user without a name: MLflow could not be imported.
        os.environ["HOME"] = tempfile.gettempdir()
    if "OMP_WAIT_POLICY" not in os.environ:
        # libgomp's threads spin while they wait for each other. By its default of 300000 turns they take a busy
        # machine's cores from the thread that they wait for. Read when torch is imported.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    logging.setLogRecordFactory(SafeRecord)  # Kedro permits no handler but its own.
    sys.excepthook = _without_traceback_of_ctrl_c
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if not sys.warnoptions:
        # Not a warnings filter: mlflow and kedro insert filters that take precedence when they are imported.
        logging.captureWarnings(True)
        logging.getLogger("py.warnings").addFilter(_is_our_own)


@contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Hides the progress bars and warnings of diffusers and transformers while a local folder is loaded or saved."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    libraries = (of_diffusers, of_transformers)
    shown = [library for library in libraries if library.is_progress_bar_enabled()]
    before = [library.get_verbosity() for library in libraries]
    for library in shown:
        library.disable_progress_bar()
    for library in libraries:
        library.set_verbosity_error()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()
        for library, verbosity in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)


def _without_traceback_of_ctrl_c(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """While a command starts, nothing else handles Ctrl-C yet."""
    if issubclass(kind, KeyboardInterrupt):
        print("Stopped.", file=sys.stderr)  # noqa: T201
    else:
        print(sanitize("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)  # noqa: T201


def _is_our_own(record: logging.LogRecord) -> bool:
    """Returns whether a captured warning ("path:line: category: text") points at code outside site-packages."""
    path = record.getMessage().partition(": ")[0]
    return "site-packages" not in path and "dist-packages" not in path
