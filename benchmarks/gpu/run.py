"""Measures this project on a GPU: every part in its own process, with a time limit; tables last, JSON beside.

    make gpu-bench ARGS=first                        # 430 seconds
    make gpu-bench ARGS=second                       # 430 seconds
    python benchmarks/gpu/run.py --seconds 200 facts sd3
    python benchmarks/gpu/run.py --device cpu --tiny --seconds 3000

The folder ``--out`` gets results.json (every row), tables.txt and log.txt after each part. Where diffusers is missing,
the wheels of `make gpu-kit` are installed into a folder of their own first.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KIT = ROOT / ".gpu"
SITE = Path(tempfile.gettempdir(), f"visual-grpo-wheels-{platform.python_version()}")
SHOWN = 11_000
"""Characters of the tables that are printed."""
NO_DEVICE = 77
"""Exit code of a process that cannot use the device."""
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # Asks the driver: CUDA that is started before a fork is lost to it.
    "TOKENIZERS_PARALLELISM": "false",
}
PRELOADED = ["preloaded"]
WRITTEN = 20.0
"""Seconds from one writing of the results to the next, also within a part: whatever ends all of this loses no more."""


@dataclass(frozen=True)
class Part:
    seconds: float
    """Most that it may take."""
    jobs: Mapping[str, str]
    """Name -> package:function(rows, machine, name), each in its own process. Several run at a time only where their
    seconds mean little."""


def _model(name: str, seconds: float) -> dict[str, Part]:
    return {name: Part(seconds, {name: "models:run"})}


FIRST = {
    "facts": Part(20, {"facts": "facts:run"}),
    **_model("sd3", 170),
    **_model("z_image", 60),
    **_model("flux", 70),
    **_model("qwen_image", 80),
    **_model("wan", 60),
    **_model("ltx", 50),
    **_model("flux2_klein", 150),
}
SECOND = {
    # Fewer bits are asked for memory and errors: their seconds, beside the learning, are an upper bound.
    "learning": Part(
        300, {"learning": "learning:run", "flux2_klein_8bit": "models:run", "flux2_klein_4bit": "models:run"}
    ),
    **_model("glm_decoder", 60),
    # One is timed while the other compiles.
    "tokens": Part(200, {"qwen_vl_3b": "models:run", "glm": "models:run"}),
}
SMALL = ("sam2", "sd3", "qwen2_5_vl", "glm_image", "flux2_klein", "z_image", "flux", "qwen_image")
ON_REQUEST = {"correct": Part(90, dict.fromkeys(SMALL, "correct:run"))}
TRIED = 3
"""Jobs of a part where all is tiny; the tests have the other families."""
PARTS = FIRST | SECOND | ON_REQUEST
GROUPS = {"first": FIRST, "second": SECOND}
"""Parts in order of value: what does not fit into the seconds that are left is the last."""
SECONDS = 430.0
"""Of a group."""


@dataclass(kw_only=True)
class Driver:
    options: argparse.Namespace
    end: float
    """``time.monotonic()`` at which all is over."""
    work: Path
    ended: list[dict[str, Any]] = field(default_factory=list)
    failed: bool = False
    context: Any = field(default_factory=lambda: get_context("forkserver"))

    def run(self) -> None:
        self.context.set_forkserver_preload(PRELOADED)
        first = self.context.Process(target=time.sleep, args=(0,))  # Imports, of which no part is to pay.
        first.start()
        first.join()
        print(f"imported: {self.end - time.monotonic():.0f} s are left", flush=True)
        for name in self.options.parts:
            self._run_part(name, PARTS[name])
            self._write()

    def _run_part(self, name: str, part: Part) -> None:
        until = min(time.monotonic() + part.seconds * (20 if self.options.tiny else 1), self.end)
        waiting = list(part.jobs)[: TRIED if self.options.tiny else None]
        running, written = dict[BaseProcess, tuple[str, float, Any]](), time.monotonic()
        while waiting or running:
            if time.monotonic() - written > WRITTEN:
                self._write()
                written = time.monotonic()
            while waiting and len(running) < (os.cpu_count() or 1) and until - time.monotonic() > 10:
                job = waiting.pop(0)
                running[self._start(name, part, job, until)] = job, time.monotonic(), self.context
            if not running:  # No time is left to start them.
                self.ended += [{"part": name, "job": job, "end": "no time left", "seconds": 0.0} for job in waiting]
                return
            for process, (job, began, context) in list(running.items()):
                process.join(0.05)
                if process.is_alive() and time.monotonic() < until:
                    continue
                del running[process]
                end = _ended(process)
                if end == NO_DEVICE and context.get_start_method() == "forkserver":
                    print(f"{job}: a forked process cannot use the device; each part starts anew.", flush=True)
                    self.context = get_context("spawn")
                    waiting.append(job)
                    continue
                seconds = time.monotonic() - began
                self.ended.append({"part": name, "job": job, "end": end, "seconds": seconds})
        print(f"{name}: {self.end - time.monotonic():.0f} s are left", flush=True)

    def _start(self, name: str, part: Part, job: str, until: float) -> BaseProcess:
        plans = KIT / "plans.json"
        given = {
            "device": self.options.device,
            "tiny": self.options.tiny,
            "out": Path(self.options.out),
            "until": until,
            "plans": json.loads(plans.read_text(encoding="utf-8"))["plans"] if plans.is_file() else {},
            "card": {row["what"]: row["measured"] for row in self._rows() if row["table"] == "card"},
        }
        folder = self.work / f"{name}-{job}"
        folder.mkdir(exist_ok=True)
        process: BaseProcess = self.context.Process(target=work, args=(part.jobs[job], name, job, folder, given))
        process.start()
        return process

    def _rows(self) -> list[dict[str, Any]]:
        files = [file for part in self.options.parts for file in sorted(self.work.glob(f"{part}-*/rows.jsonl"))]
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        return [json.loads(line) for line in lines if line.endswith("}")]  # A kill may leave half a line.

    def _write(self) -> None:
        """After each part: what is there stays, whatever comes."""
        out = Path(self.options.out)
        out.mkdir(parents=True, exist_ok=True)
        rows = self._rows()
        self.failed = any(row["table"] == "errors" for row in rows) or any(end["end"] != 0 for end in self.ended)
        result = {"command": sys.argv[1:], "seconds_left": self.end - time.monotonic(), "ended": self.ended}
        (out / "results.json").write_text(json.dumps({**result, "rows": rows}, indent=1), encoding="utf-8")
        (out / "tables.txt").write_text(resolve_name("summary:tables")(rows, self.ended), encoding="utf-8")
        logs = (f"== {log.parent.name}\n{log.read_text(errors='replace')}" for log in sorted(self.work.glob("*/log")))
        (out / "log.txt").write_text("\n".join(logs), encoding="utf-8")


def work(function: str, part: str, job: str, folder: Path, given: dict[str, Any]) -> None:
    """Runs one job of a part in this process, whose output goes into a log."""
    os.setsid()  # What it starts is killed with it.
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    recording, torch = resolve_name("recording"), resolve_name("torch")
    rows = recording.Recorder(part, folder / "rows.jsonl")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")  # Nothing that an earlier call has compiled.
    torch.set_num_threads(1)
    try:
        torch.zeros(1, device=given["device"])
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(NO_DEVICE)
    resolve_name("visual_grpo.common.quiet_libraries:silence_libraries")()
    with rows.guarded(job):
        resolve_name(function)(rows, recording.Machine(work=folder, **given), job)


def _ended(process: BaseProcess) -> int | str:
    """How a process ended, which is killed if it has not."""
    if not process.is_alive():
        return process.exitcode if process.exitcode is not None else "unknown"
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # It is not the leader of its group yet.
        process.kill()
    process.join()
    return "killed: its time was over"


def install_wheels() -> None:
    """Installs the carried wheels, which stay for the next call."""
    if not SITE.is_dir():
        fresh = SITE.with_suffix(".fresh")
        shutil.rmtree(fresh, ignore_errors=True)
        wheels = sorted(map(str, (KIT / "wheels").glob("*.whl")))
        if not wheels:
            sys.exit("diffusers is missing, and so are the wheels of make gpu-kit (.gpu/wheels).")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--disable-pip-version-check", "--target", str(fresh), *wheels], check=True)
        fresh.rename(SITE)
    sys.path.insert(0, str(SITE))


def prepare_environment() -> None:
    """Makes this process and those that it starts import this checkout, and the wheels where they are needed."""
    if importlib.util.find_spec("diffusers") is None:
        install_wheels()
    sys.path[:0] = [str(HERE), str(ROOT / "src"), str(ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:3], *([str(SITE)] if str(SITE) in sys.path else [])])
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", default=list(GROUPS), help="groups or parts, in this order; default: groups"
    )
    parser.add_argument("--seconds", type=float, help=f"for all parts together; default: {SECONDS:.0f} a group")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, to try all parts on a CPU")
    parser.add_argument("--out", default=os.environ.get("OUT", str(KIT / "out")), help="folder of the results")
    options = parser.parse_args(words)
    if unknown := [name for name in options.parts if name not in (*GROUPS, *PARTS)]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join([*GROUPS, *PARTS])}")
    options.seconds = options.seconds or SECONDS * max(1, sum(name in GROUPS for name in options.parts))
    options.parts = [part for name in options.parts for part in GROUPS.get(name, [name])]
    return options


def main() -> None:
    options = _arguments()
    end = time.monotonic() + options.seconds
    prepare_environment()
    with tempfile.TemporaryDirectory(prefix="visual-grpo-gpu-") as folder:
        driver = Driver(options=options, end=end, work=Path(folder))
        driver.run()
    print(Path(options.out, "tables.txt").read_text(encoding="utf-8")[-SHOWN:], flush=True)
    sys.exit(driver.failed)


if __name__ == "__main__":
    main()
