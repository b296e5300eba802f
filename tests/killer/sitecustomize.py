"""Python imports this by itself: kills the process (SIGKILL) some seconds after a function was called first.

``KILL_AT=module:qualified.name:seconds``. The folder is on the path of a process under test only.
"""

import functools
import importlib.abc
import importlib.util
import os
import signal
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(module: ModuleType, name: str, seconds: float) -> None:
    *path, last = name.split(".")
    owner: Any = functools.reduce(getattr, path, module)
    function = getattr(owner, last)

    @functools.wraps(function)
    def armed(*args: Any, **kwargs: Any) -> Any:
        threading.Timer(seconds, _kill).start() if seconds else _kill()
        return function(*args, **kwargs)

    setattr(owner, last, armed)


class _Arming(importlib.abc.MetaPathFinder):
    """Replaces the function as soon as its module is loaded, before another can import it by name."""

    def __init__(self, module: str, name: str, seconds: float) -> None:
        self.module, self.name, self.seconds = module, name, seconds

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _arm(module, self.name, self.seconds)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "KILL_AT" in os.environ:
    _module, _name, _seconds = os.environ["KILL_AT"].split(":")
    sys.meta_path.insert(0, _Arming(_module, _name, float(_seconds)))
