"""Workers that a reward starts for itself, and what they read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor

from examples.words.signs import WORDS, draw, prompt_of
from tests.markdown import ROOT
from tests.rewards.remote.processes import WORKERS
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.common.images import to_tensor
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.remote import local_worker
from visual_grpo.rewards.remote.http_reward import HttpReward
from visual_grpo.rewards.remote.local_worker import KEY, python_of, started_worker
from visual_grpo.rewards.reward import FunctionReward

READER = """
import os, time
from serve import Texts, serve

def load():
    if os.environ.get("FAILS"):
        raise FileNotFoundError("no weights")
    time.sleep(float(os.environ.get("LOADS_FOR", 0)))
    print("loaded 3 of 3 files", flush=True)
    def score(request):
        if "die" in request.prompts:
            os._exit(3)
        print(100_000 * "scored ")
        said = {255: "cab", 9: 5}
        return Texts([said.get(image.getpixel((0, 0))[0], str(os.getpid())) for image in request.images])
    return score

serve("reader-" + os.environ.get("KIND", "1"), load)
"""
WORDY = [PromptRecord(id=name, prompt=name) for name in ('a "CAB"', 'a "CAT"', "a cat", 'a "DOG"', 'a "DOG"')]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with an installed worker that reads white images as "cab", and others as its process id."""
    for name in ("reader", "bare"):
        folder = tmp_path / "workers" / name
        folder.mkdir(parents=True)
        (folder / "worker.py").write_text(READER)
    (tmp_path / "workers" / "serve.py").symlink_to(WORKERS / "serve.py")
    python = tmp_path / ".venv-workers" / "reader" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for running in local_worker._running.values():
        local_worker._end(running.process, running.errors)
    local_worker._running.clear()


def grey(*values: int) -> list[Tensor]:
    return [torch.full((3, 8, 8), value, dtype=torch.uint8) for value in values]


def refusal(reward: HttpReward) -> str:
    try:
        reward.check_machine()
    except UserError as error:
        return str(error)
    return ""


def eventually(condition: Callable[[], bool]) -> bool:
    ends = time.monotonic() + 20
    while not (held := condition()) and time.monotonic() < ends:
        time.sleep(0.05)
    return held


def test_texts_are_scored_as_ocr_scores_them(project: Path) -> None:
    reward = FunctionReward("reader", HttpReward(worker="workers/reader", retries=0), max_failed_share=0.5)
    reward.check_machine()
    output = reward(WORDY, grey(255, 255, 255, 0, 9))
    expected = torch.tensor([1, 2 / 3, torch.nan, 0, torch.nan])
    torch.testing.assert_close(output.values, expected, equal_nan=True)
    assert output.parts["accuracy"].tolist()[:2] == [1, 0]
    assert output.failed == {4: "its text is 5, not a string"}


def test_a_process_starts_one_for_each_environment_and_says_when_it_has_ended(project: Path) -> None:
    rewards = [HttpReward(worker="workers/reader", environment={"KIND": kind}, retries=0) for kind in ("a", "a", "b")]
    for reward in rewards:
        reward.check_machine()
    assert rewards[0].url == rewards[1].url != rewards[2].url
    other = HttpReward(worker="workers/reader", environment={"KIND": "b"}, model="reader-a")
    with pytest.raises(UserError, match=r"asks for 'reader-a', and the worker at .* has 'reader-b'"):
        other.check_machine()
    rewards[2]([PromptRecord(id="d", prompt="die")], grey(0))
    assert eventually(lambda: "the worker workers/reader has ended with exit code 3" in refusal(rewards[2]))
    rewards[2].check_machine()  # Another one.


@pytest.mark.parametrize(
    ("options", "told", "remedy"),
    [
        ({"worker": "workers/bare"}, r"workers/bare is not installed: it has no .venv-workers/bare/bin/python", "bare"),
        ({"worker": "workers/raeder"}, "worker is 'workers/raeder'; expected the folder of a worker", None),
        (
            {"worker": "workers/reader", "environment": {"FAILS": "1"}},
            "(?s)has ended with exit code 1:.*FileNotFoundError: no weights",
            None,
        ),
    ],
)
def test_a_worker_that_cannot_start(project: Path, options: dict[str, Any], told: str, remedy: str | None) -> None:
    with pytest.raises(UserError, match=told) as caught:
        HttpReward(**options).check_machine()
    assert caught.value.remedy == (None if remedy is None else Remedy(make=f"install-worker NAME={remedy}"))


def test_only_the_process_that_started_it_is_answered(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address is no secret on this machine, nor are its arguments."""
    monkeypatch.setenv(KEY, "of a worker elsewhere")
    reward = HttpReward(worker="workers/reader")
    reward.check_machine()
    for key in (None, "of a worker elsewhere", ""):
        with pytest.raises(UserError, match="answered 401"):
            HttpReward(reward.url, api_key=key)(WORDY[:1], grey(255))
    assert reward(WORDY[:1], grey(255)).values.tolist() == [1]
    running = started_worker("workers/reader", {})
    assert len(running.key) >= 32
    assert running.key not in Path(f"/proc/{running.process.pid}/cmdline").read_text()
    with pytest.raises(UserError, match="has its own key"):
        HttpReward(worker="workers/reader", api_key="mine")


def test_a_worker_that_is_not_ready_is_told_and_given_up(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local_worker, "SILENCE", 1.0)
    monkeypatch.setattr(local_worker, "PATIENCE", 3.0)
    with pytest.raises(UserError, match=r"workers/reader was not ready within 3 s and was ended") as caught:
        HttpReward(worker="workers/reader", environment={"LOADS_FOR": "60"}).check_machine()
    assert caught.value.remedy == Remedy(make="worker NAME=reader")
    told = [record.getMessage() for record in caplog.records if "is not ready after" in record.getMessage()]
    assert told == [f"The worker workers/reader is not ready after {s} s; it is given up after 3 s" for s in (1, 2)]


def test_it_ends_with_the_process_that_started_it_however_that_ends(project: Path) -> None:
    code = (
        "import time; from visual_grpo.rewards.remote.local_worker import started_worker;"
        "print(started_worker('workers/reader', {}).process.pid, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        worker = Path("/proc", parent.stdout.readline().strip(), "cmdline")
        assert b"--until-eof" in worker.read_bytes()
        parent.send_signal(signal.SIGKILL)
    assert eventually(lambda: not worker.exists())


def installed(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> FunctionReward:
    """A worker with its real weights; skips the test where it is not installed."""
    monkeypatch.chdir(ROOT)
    if not python_of(name).is_file():
        pytest.skip(f"make install-worker NAME={name}")
    return FunctionReward(name, HttpReward(worker=f"workers/{name}", **options))


ENGINES = [
    ("tesseract", {"TESSERACT_LAYOUT": "line"}, 0.9),
    ("tesseract", {"TESSERACT_LAYOUT": "word"}, 0.4),
    ("tesseract", {}, 0.9),
    ("easyocr", {"EASYOCR_LAYOUT": "line"}, 0.7),
    ("easyocr", {}, 0.8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "environment", "least"), ENGINES)
def test_engines_read_drawn_words(
    name: str, environment: dict[str, str], least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = installed(name, monkeypatch, environment=environment)
    words = WORDS[::8]
    others = words[1:] + words[:1]
    images = [to_tensor(draw(word, 64, 256)) for word in words]
    right, wrong = (reward([PromptRecord(id=w, prompt=prompt_of(w)) for w in own], images) for own in (words, others))
    assert right.parts["accuracy"].mean() >= least
    assert wrong.parts["accuracy"].max() == 0


@pytest.mark.slow
def test_a_classifier_tells_photographs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = installed("efficientnet", monkeypatch)
    sources = (Image.fromarray(load_sample_image(f"{name}.jpg")) for name in ("flower", "china"))
    photographs = [to_tensor(source.resize((224, 224))) for source in sources]
    asked = [["daisy"], ["palace"], ["daisy", "palace"], ["a word of no class"], []]
    records = [
        PromptRecord(id=str(row), prompt="", metadata={"objects": [{"label": label} for label in labels]})
        for row, labels in enumerate(asked)
    ]
    flower, china = (reward(records, [photograph] * len(records)).values for photograph in photographs)
    assert flower[0] > 10 * china[0]
    assert china[1] > 10 * flower[1]
    torch.testing.assert_close(flower[2], (flower[0] + flower[1]) / 2)
    assert flower.isnan().tolist() == [False, False, False, True, True]
