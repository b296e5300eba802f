"""Who is told how a retraining ended, and what becomes of a telling that fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from visual_grpo.config import MonitorConfig, RetrainConfig
from visual_grpo.retraining.monitor import fallen_score
from visual_grpo.retraining.notice import ATTEMPTS, is_due, notify

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


def test_an_address_gets_the_summary(listener: Listener, tmp_path: Path) -> None:
    assert notify(RetrainConfig(notify=listener.address), SUMMARY, tmp_path) is None
    assert listener.bodies == [SUMMARY]


def test_a_server_in_trouble_is_asked_again_one_that_refuses_is_not(listener: Listener, tmp_path: Path) -> None:
    listener.codes = [503, 200]
    assert notify(RetrainConfig(notify=listener.address), SUMMARY, tmp_path) is None
    assert len(listener.bodies) == 2
    listener.codes = [500]
    assert str(notify(RetrainConfig(notify=listener.address), SUMMARY, tmp_path)).endswith("it answered 500")
    assert len(listener.bodies) == 2 + ATTEMPTS
    listener.codes = [403]
    assert str(notify(RetrainConfig(notify=listener.address), SUMMARY, tmp_path)).endswith("it answered 403")
    assert len(listener.bodies) == 3 + ATTEMPTS


def test_a_dead_address_is_told_of_without_its_token(listener: Listener, tmp_path: Path) -> None:
    dead = listener.address.replace(str(listener.server.server_port), "1")
    problem = notify(RetrainConfig(notify=dead), SUMMARY, tmp_path)
    assert problem == "The address of retrain.notify was not told how it ended: ConnectionError"


def test_a_command_gets_the_summary_as_its_input(tmp_path: Path) -> None:
    assert notify(RetrainConfig(notify="cat > told.json"), SUMMARY, tmp_path) is None
    assert json.loads((tmp_path / "told.json").read_text()) == SUMMARY
    problem = notify(RetrainConfig(notify="echo no mail >&2; exit 7"), SUMMARY, tmp_path)
    assert problem == "The command of retrain.notify ended with exit code 7: no mail"


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


def test_a_command_may_print_what_is_no_text(tmp_path: Path) -> None:
    settings = RetrainConfig(notify="printf '\\377'; exit 3", notify_when="always")
    problem = notify(settings, SUMMARY, tmp_path)
    assert problem is not None
    assert problem.startswith("The command of retrain.notify ended with exit code 3: ")
    assert fallen_score(MonitorConfig(command="printf '\\377\\n0.5'", floor=0.9), tmp_path) == 0.5
