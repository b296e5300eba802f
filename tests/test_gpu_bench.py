"""`make gpu-bench` as far as a CPU can tell: every part runs on small models, and none ends another."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from visual_grpo.models.execution import VARIANTS, compile_blocks
from visual_grpo.models.lora_layers import is_compiled
from visual_grpo.operations.plan.dry_run import planned_model, planned_trainer, records_for

ROOT = Path(__file__).parents[1]
KIT = ROOT / "benchmarks/gpu"
TABLES = {
    "versions",
    "card",
    "loading",
    "sampler against replay",
    "phases",
    "metrics",
    "beside a plain loop",
    "first compiled step",
    "compiled blocks",
    "skipped",
    "kedro run",
    "learning",
    "verdict",
}
BITS = ["flux2_klein_8bit", "flux2_klein_4bit"]
PLAIN = ["sd3", "z_image", "flux", "qwen_image", "wan", "ltx", "flux2_klein"]


def run(script: Path, folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Runs the driver; returns how it ended, and its results."""
    command = [sys.executable, "-W", "ignore", str(script), "--device", "cpu", "--out", str(folder / "out"), *words]
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done, json.loads((folder / "out/results.json").read_text(encoding="utf-8"))


def table(results: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if row["table"] == name]


@pytest.mark.slow
def test_every_part_runs_on_small_models(tmp_path: Path) -> None:
    done, results = run(KIT / "run.py", tmp_path, "--tiny", "--seconds", "6000")
    assert table(results, "errors") == []
    assert [row for row in results["ended"] if row["end"] != 0] == []
    without_bits = find_spec("bitsandbytes") is None
    assert {row["table"] for row in results["rows"]} == TABLES - (set() if without_bits else {"skipped"})
    steps = [row["model"] for row in table(results, "phases") if row["phase"].startswith("step of")]
    # Two jobs of a part run side by side: what they write has no order.
    assert {row["model"] for row in table(results, "skipped")} == set(BITS * without_bits)
    assert sorted(steps) == sorted([*PLAIN, *([] if without_bits else BITS), "glm_decoder", "qwen_vl_3b", "glm"])
    # The log-probs of the plain loop's replay are those of its sampler.
    beside = table(results, "beside a plain loop")
    assert [(row["model"], row["largest_log_ratio"] < 1e-2) for row in beside] == [(name, True) for name in PLAIN]
    assert [row["model"] for row in table(results, "compiled blocks")] == ["flux2_klein"]
    whens = [row["when"] for row in table(results, "sampler against replay") if row["model"] == "flux2_klein"]
    assert whens == ["before an update", "after one update", "compiling", "compiled"]
    assert (tmp_path / "out/learning/evaluation/samples.png").is_file()
    assert done.returncode == 0, done.stderr
    assert "0 errors; 0 of" in done.stdout


@pytest.mark.slow
def test_small_models_agree_with_diffusers_and_with_themselves(tmp_path: Path) -> None:
    done, results = run(KIT / "run.py", tmp_path, "--tiny", "--seconds", "6000", "correct")
    for row in table(results, "trainings"):
        same = {row[name] for name in ("again", "resumed", "checkpointing", "offload") if name in row}
        assert (row["finite"], same) == ("yes", {0.0}), row
    assert {row["passed"] for row in table(results, "against diffusers")} == {"7 of 7 checks"}
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("peak", "said"), [(5.0, []), (7.0, ["the plan's peak is 7.0 GB, and this card has 6.5 GB"])])
def test_a_card_with_less_memory_than_the_plan_skips_the_model_with_a_line(
    peak: float, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(KIT)
    recording, models = import_module("recording"), import_module("models")
    given = {"tiny": False, "work": tmp_path, "out": tmp_path, "until": math.inf, "plans": {}, "card": {}}
    rows, machine = recording.Recorder("part", tmp_path / "rows"), recording.Machine(device="cuda", **given)
    card = SimpleNamespace(total_memory=6.8e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert models.fits(rows, machine, "sd3", {"replay": {"peak_gb": peak}}) == (not said)
    lines = (tmp_path / "rows").read_text().splitlines() if said else []
    assert [json.loads(line)["reason"][: len(text)] for line, text in zip(lines, said, strict=True)] == said


BROKEN = """
    import os, signal, sys, time
    sys.path[:0] = [{kit!r}, {here!r}]
    import run

    def fine(rows, machine, job):
        rows.add("fine", job=job, left=machine.left(), compiled=os.environ["TORCHINDUCTOR_CACHE_DIR"])

    def waits(rows, machine, job):
        rows.add("before it waits", value=1.0)
        results = machine.out / "results.json"
        while not results.is_file() or "before it waits" not in results.read_text():
            time.sleep(0.1)

    def fails(rows, machine, job):
        raise ValueError("as told")

    def crashes(rows, machine, job):
        os.kill(os.getpid(), signal.SIGSEGV)

    def hangs(rows, machine, job):
        rows.add("before it hangs", value=1.0)
        time.sleep(600)

    if __name__ == "__main__":
        run.PRELOADED, run.WRITTEN = [], 1.0
        run.PARTS = {{n: run.Part(20, {{n: f"broken:{{n}}"}}) for n in ("waits", "fails", "crashes", "hangs", "fine")}}
        run.main()
"""


@pytest.mark.slow
def test_a_part_that_fails_crashes_or_hangs_ends_alone(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(dedent(BROKEN).format(kit=str(KIT), here=str(tmp_path)), encoding="utf-8")
    done, results = run(script, tmp_path, "--seconds", "300", "waits", "fails", "crashes", "hangs", "fine")
    assert [(row["part"], row["end"]) for row in results["ended"]] == [
        ("waits", 0),  # It saw its row written before its end.
        ("fails", 0),
        ("crashes", -11),
        ("hangs", "killed: its time was over"),
        ("fine", 0),
    ]
    assert [row["error"] for row in table(results, "errors")] == ["ValueError: as told"]
    assert len(table(results, "before it hangs")) == 1
    assert [Path(row["compiled"]).parent.name for row in table(results, "fine")] == ["fine-fine"]
    assert "1 errors; 2 of 5 processes did not come to their end" in done.stdout
    assert done.returncode == 1


def test_every_process_that_cannot_use_the_device_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(KIT)
    driver = import_module("run")
    started: list[str] = []

    def start(self: Any, name: str, part: Any, job: str, until: float) -> Any:
        started.append(f"{job} by {self.context.get_start_method()}")
        code = driver.NO_DEVICE if self.context.get_start_method() == "forkserver" else 0
        return type("Ended", (), {"join": lambda *_: None, "is_alive": lambda _: False, "exitcode": code})()

    monkeypatch.setattr(driver.Driver, "_start", start)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    options = SimpleNamespace(tiny=False, parts=[], out=str(tmp_path))
    running = driver.Driver(options=options, end=time.monotonic() + 100, work=tmp_path)
    running._run_part("part", driver.Part(90, {"one": "", "other": ""}))
    assert started == ["one by forkserver", "other by forkserver", "one by spawn", "other by spawn"]
    assert [(row["job"], row["end"]) for row in running.ended] == [("one", 0), ("other", 0)]


def test_what_all_parts_import_leaves_bitsandbytes_to_them(tmp_path: Path) -> None:
    """It starts CUDA, which a forked process could not use then."""
    (tmp_path / "bitsandbytes.py").write_text("raise SystemExit('it was imported')", encoding="utf-8")
    script = "import importlib.util, preloaded; print(importlib.util.find_spec('bitsandbytes').origin)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, KIT, ROOT / "src", ROOT)))}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == [str(tmp_path / "bitsandbytes.py")], done.stderr


def test_blocks_are_compiled_by_a_torch_without_a_limit_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(KIT)
    models = import_module("models")

    def before_2_13(model: Any, *, fullgraph: bool = False, dynamic: bool | None = None) -> Any:
        return model

    monkeypatch.setattr(torch, "compile", before_2_13)
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    blocks = torch.nn.Sequential(torch.nn.Linear(2, 2))
    vars(blocks)["_no_split_modules"] = ["Linear"]
    with models.recompile_limit():
        compile_blocks(blocks)
        assert is_compiled(blocks)
        assert torch._dynamo.config.recompile_limit == VARIANTS


def test_a_learning_that_takes_too_long_leaves_its_lines_and_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(KIT)
    learning, recording = import_module("learning"), import_module("recording")
    report = tmp_path / "output/08_reporting/of_the_base.txt"
    report.parent.mkdir(parents=True)
    report.touch()
    monkeypatch.setattr(learning, "_KEDRO", "import time; print('trains', flush=True); time.sleep(60)")
    until = time.monotonic() + learning.SPARE + 2
    given = {"tiny": True, "work": tmp_path, "out": tmp_path / "out", "until": until, "plans": {}, "card": {}}
    rows, machine = recording.Recorder("part", tmp_path / "rows"), recording.Machine(device="cpu", **given)
    with pytest.raises(RuntimeError, match="a kill: its time was over"):
        learning.run(rows, machine, "learning")
    assert "trains" in capfd.readouterr().out
    assert (tmp_path / "out/learning/of_the_base.txt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("weight", "forwards"), [(0.0, 0), (0.1, 2)])
def test_the_plain_loop_has_a_reference_where_the_configuration_has_a_penalty(
    weight: float, forwards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(KIT)
    cases, plain_loop, recording = (import_module(name) for name in ("cases", "plain_loop", "recording"))
    given = {"tiny": True, "work": tmp_path, "out": tmp_path, "until": math.inf, "plans": {}, "card": {}}
    folder = cases.small_folder("flux", recording.Machine(device="cpu", **given))
    changes = {"model": {"device": "cpu"}, "grpo": {"kl_weight": weight}}
    config = cases.small("flux", "dit", folder, changes)
    policy = planned_trainer(planned_model(config, measured=True)).policy
    with records_for(config.data, 10, 1) as records:
        loop = plain_loop.PlainLoop(policy, config, records, 2)
        with patch.object(loop.adapter, "disabled", wraps=loop.adapter.disabled) as disabled:
            loop.step()
    assert disabled.call_count == forwards


def test_every_model_has_a_part_and_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(KIT)
    cases, recording, driver = (import_module(name) for name in ("cases", "recording", "run"))
    measured = [job for part in driver.PARTS.values() for job, work in part.jobs.items() if work == "models:run"]
    assert sorted(measured) == sorted(cases.RELEASED)
    assert set(cases.COMPILED) <= set(measured)
    given = {"tiny": False, "work": tmp_path, "out": tmp_path, "until": math.inf, "plans": {}, "card": {}}
    machine = recording.Machine(device="cuda", **given)
    found = {name: cases.released(name, machine) for name in cases.RELEASED}
    assert {config.grpo.prompts_per_step for config in found.values()} == {1}
    assert [name for name, config in found.items() if config.model.base_weights != "full"] == BITS


def test_what_travels_has_a_locked_version() -> None:
    locks = (ROOT / "requirements.lock", ROOT / "quantised.lock")
    lines = [line for lock in locks for line in lock.read_text(encoding="utf-8").splitlines()]
    locked = {match[1] for line in lines if (match := re.match(r"([a-z0-9-]+)==", line))}
    carried = (KIT / "carried.txt").read_text(encoding="utf-8").split()
    assert {"bitsandbytes", "diffusers", "peft", "transformers"} <= set(carried) <= locked
