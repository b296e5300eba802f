"""Serves a function that scores images, as docs/reward_workers.md describes. Needs the standard library and Pillow."""

from __future__ import annotations

import argparse
import base64
import hmac
import io
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image

KEY = "WORKER_API_KEY"
"""Environment variable: the key that clients must send, if it is set."""
MOST_BYTES = 512_000_000


@dataclass(frozen=True)
class Request:
    """What is to be scored: B images with what belongs to them."""

    images: Sequence[Image.Image]
    """RGB."""
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]
    sources: Sequence[Sequence[Image.Image]]
    """The images that were edited, of each."""


Scores = Sequence[float | None]
Score = Callable[[Request], Scores | tuple[Scores, Mapping[str, Scores]]]
"""B scores, None = unscored; with named parts, if there are any."""


class BadRequestError(Exception):
    """The request cannot be scored, whoever asks again."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


class Worker:
    """Loads the model beside the server, so that /health answers meanwhile."""

    def __init__(self, name: str, load: Callable[[], Score]) -> None:
        self.name = name
        self.load = load
        self.score: Score | None = None
        self.one_at_a_time = threading.Lock()

    def health(self) -> dict[str, Any]:
        return {"status": "ok" if self.score else "loading", "model": self.name}

    def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.score is None:
            raise BadRequestError("the weights are still being loaded", 503)
        request = parsed(body)
        with self.one_at_a_time:
            returned = self.score(request)
        scores, parts = returned if isinstance(returned, tuple) else (returned, {})
        return {"model": self.name, "scores": plain(scores), "parts": {name: plain(own) for name, own in parts.items()}}


def plain(scores: Scores) -> list[float | None]:
    return [None if score is None else number(score) for score in scores]


def number(score: Any) -> float:
    if isinstance(score, str | bytes | bool):  # What a model said is not yet what it means.
        raise TypeError(f"a score must be a number or None, got {score!r}")
    return float(score)


def parsed(body: Mapping[str, Any]) -> Request:
    images, prompts = body.get("images"), body.get("prompts")
    if not isinstance(images, list) or not isinstance(prompts, list) or len(images) != len(prompts):
        raise BadRequestError("images and prompts must be lists of the same length")
    metadata, sources = body.get("metadata") or [{}] * len(images), body.get("sources") or [[]] * len(images)
    if len(metadata) != len(images) or len(sources) != len(images):
        raise BadRequestError("metadata and sources must be as many as the images")
    return Request([picture(own) for own in images], prompts, metadata, [[picture(s) for s in own] for own in sources])


def picture(text: str) -> Image.Image:
    try:
        return Image.open(io.BytesIO(base64.b64decode(text, validate=True))).convert("RGB")
    except (ValueError, TypeError, OSError, Image.DecompressionBombError) as error:
        raise BadRequestError(f"an image cannot be read: {error}") from error


class Server(ThreadingHTTPServer):
    """Each request in a thread, which ends with the process."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], worker: Worker, key: str | None) -> None:
        super().__init__(address, Handler)
        self.worker = worker
        self.key = key


class Handler(BaseHTTPRequestHandler):
    """GET /health and POST /score."""

    protocol_version = "HTTP/1.1"
    timeout = 600
    server: Server

    def do_GET(self) -> None:
        if self.path == "/health":
            self.send(200, self.server.worker.health())
        else:
            self.send(404, {"error": "GET /health or POST /score"})

    def do_POST(self) -> None:
        try:
            self.send(200, self.server.worker.answer(self.body()))
        except BadRequestError as error:
            self.send(error.status, {"error": str(error)})
        except ConnectionError:  # The client has gone: its time was up.
            self.close_connection = True
        except Exception as error:  # The model's code: the client is told, the worker lives on.
            traceback.print_exc()
            self.send(500, {"error": f"{type(error).__name__}: {error}"})

    def body(self) -> Mapping[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            self.close_connection = True
            raise BadRequestError(f"the body must have a Content-Length of at most {MOST_BYTES}", 413)
        # Read in any case, else the next request on this connection would begin in its middle.
        content = self.rfile.read(int(length))
        given = self.headers.get("Authorization", "")
        if self.path != "/score":
            raise BadRequestError("GET /health or POST /score", 404)
        if self.server.key and not hmac.compare_digest(given.encode(), f"Bearer {self.server.key}".encode()):
            raise BadRequestError("another key is needed", 401)
        try:
            body = json.loads(content)
        except ValueError as error:
            raise BadRequestError("the body must be JSON") from error
        if not isinstance(body, dict):
            raise BadRequestError("the body must be a JSON object")
        return body

    def send(self, status: int, answer: Mapping[str, Any]) -> None:
        try:
            content = json.dumps(answer, allow_nan=False).encode()
        except ValueError:  # A model that overflowed has judged nothing.
            status, content = 500, b'{"error": "the model gave a score that is not finite"}'
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status == 503:
            self.send_header("Retry-After", "5")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Only errors are worth a line."""


def serve(name: str, load: Callable[[], Score], weights: str = "") -> None:
    """Serves until Ctrl-C.

    Args:
        name: of the weights, with their version: clients check it.
        load: called once; returns the function that scores.
        weights: where they come from, and how to name others: said where they cannot be loaded.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765)
    given = parser.parse_args()
    worker, key = Worker(name, load), os.environ.get(KEY)
    if key == "":
        sys.exit(f"Error: {KEY} is empty, so that anybody could ask. Give it the key, or unset it to ask for none")
    try:
        server = Server((given.host, given.port), worker, key)
    except (OSError, OverflowError) as error:
        sys.exit(
            f"Error: cannot listen at {given.host}:{given.port}: {error}. Another worker may run there: stop it, or"
            " choose another port (make worker NAME=... PORT=8766; then set the reward's option url)"
        )
    sys.stdout.write(f"{name}: http://{given.host}:{server.server_port}, loading\n")
    sys.stdout.flush()
    threading.Thread(target=_load, args=(worker, weights), daemon=True).start()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


def _load(worker: Worker, weights: str) -> None:
    try:
        worker.score = worker.load()
    except BaseException as error:
        traceback.print_exc()
        # After the traceback, where it is seen.
        sys.stderr.write(f"\nError: {worker.name} could not be loaded: {type(error).__name__}: {_first_line(error)}\n")
        sys.stderr.write(f"{weights}\n" if weights else "")
        sys.stderr.flush()
        os._exit(1)  # A worker without weights would say "loading" for ever.
    sys.stdout.write(f"{worker.name}: ready\n")
    sys.stdout.flush()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
