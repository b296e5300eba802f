"""The summary of a retraining, who is told, and the score that somebody else measures."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from visual_grpo.config import MonitorConfig, RetrainConfig
from visual_grpo.errors import UserError
from visual_grpo.retraining.job import monitored
from visual_grpo.retraining.outcome import ATTEMPTS, Outcome, is_due, notify

SUMMARY = {"code": 0, "sentence": "promoted", "reason": "data changed"}


class Listener:
    """A web address that keeps what it is sent; answers with each of ``codes`` in turn, the last one from then on."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.codes = [200]
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                listener.bodies.append(json.loads(body))
                self.send_response(listener.codes.pop(0) if len(listener.codes) > 1 else listener.codes[0])
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/hook?token=abc"


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.mark.parametrize(
    ("codes", "asked", "problem"),
    [([200], 1, None), ([503, 200], 2, None), ([500], ATTEMPTS, "it answered 500"), ([403], 1, "it answered 403")],
)
def test_an_address_gets_the_summary_again_while_its_server_is_in_trouble(
    listener: Listener, tmp_path: Path, codes: list[int], asked: int, problem: str | None
) -> None:
    listener.codes = codes
    told = notify(RetrainConfig(notify=listener.address), SUMMARY, tmp_path)
    assert told is None if problem is None else str(told).endswith(problem)
    assert listener.bodies == [SUMMARY] * asked


def test_a_dead_address_is_told_of_without_its_token(listener: Listener, tmp_path: Path) -> None:
    dead = listener.address.replace(str(listener.server.server_port), "1")
    problem = notify(RetrainConfig(notify=dead), SUMMARY, tmp_path)
    assert problem == "The address of retrain.notify was not told how it ended: ConnectionError"


def test_a_command_gets_the_summary_as_its_input(tmp_path: Path) -> None:
    assert notify(RetrainConfig(notify="cat > told.json"), SUMMARY, tmp_path) is None
    assert json.loads((tmp_path / "told.json").read_text()) == SUMMARY
    problem = notify(RetrainConfig(notify="echo no mail >&2; exit 7"), SUMMARY, tmp_path)
    assert problem == "The command of retrain.notify failed: no mail"


@pytest.mark.parametrize(
    ("when", "code", "reason", "due"),
    [
        ("work", 0, None, False),
        ("work", 0, "data", True),
        ("work", 3, "data", True),
        ("work", 1, None, True),
        ("always", 0, None, True),
        ("failure", 0, "data", False),
        ("failure", 3, "data", False),
        ("failure", 6, "data", True),
    ],
)
def test_when_somebody_is_told(when: Any, code: int, reason: str | None, due: bool) -> None:
    assert is_due(RetrainConfig(notify_when=when), {"code": code, "reason": reason}) is due


def test_a_score_is_the_last_line_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert monitored(MonitorConfig()) is None
    assert monitored(MonitorConfig(command="printf '\\377\\n0.5\\n'")) == 0.5
    for command, said in {
        "echo broken >&2; exit 3": "command failed: echo broken >&2; exit 3\nbroken",
        "echo nan": "must print a number as its last line, but printed 'nan'",
        "true": "but printed ''",
    }.items():
        with pytest.raises(UserError) as told:
            monitored(MonitorConfig(command=command))
        assert said in str(told.value)


def test_the_summary_is_one_line() -> None:
    outcome = Outcome(code=3, sentence="not promoted", model="m", seconds=3761.4)
    assert outcome.line == "Retraining of m: not promoted (1:02:41, exit code 3)"
    assert (outcome.as_json()["outcome"], Outcome(code=143, sentence="", model="").as_json()["outcome"]) == (
        "not_promoted",
        "stopped",
    )
