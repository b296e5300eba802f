"""Serves a function that scores images over HTTP (FastAPI), as docs/reward_workers.md describes."""

from __future__ import annotations

import argparse
import base64
import hmac
import io
import math
import os
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from PIL import Image
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException

KEY = "WORKER_API_KEY"
"""Environment variable: the key that clients must send, if it is set."""
GRACE = 5
"""Seconds that Ctrl-C leaves to requests that are on their way."""


@dataclass(frozen=True)
class Request:
    """B images to score, with what belongs to them."""

    images: Sequence[Image.Image]
    """RGB."""
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]
    sources: Sequence[Sequence[Image.Image]]
    """The images that were edited, per image."""


Scores = Sequence[float | None]


@dataclass(frozen=True)
class Texts:
    """What is written in B images; the client scores it."""

    texts: Sequence[str]


Score = Callable[[Request], Scores | tuple[Scores, Mapping[str, Scores]] | Texts]
"""Returns B scores, None = unscored, optionally with named parts; or B texts."""


_reasons: list[str] = []
"""Why images of the request that is being scored have no score."""


def unscored(reason: str) -> None:
    """Says why an image has no score, here and in the answer, so that the user of the trainer sees it."""
    sys.stderr.write(f"unscored: {reason}\n")
    _reasons.append(reason)


class Body(BaseModel):
    """The JSON of POST /score."""

    images: list[str]
    prompts: list[str]
    metadata: list[dict[str, Any]] | None = None
    sources: list[list[str]] | None = None

    def decoded(self) -> Request:
        count = len(self.images)
        metadata, sources = self.metadata or [{}] * count, self.sources or [[]] * count
        if not count == len(self.prompts) == len(metadata) == len(sources):
            raise HTTPException(422, "prompts, metadata and sources must be as many as the images")
        return Request(
            [picture(i) for i in self.images], self.prompts, metadata, [[picture(s) for s in o] for o in sources]
        )


def picture(text: str) -> Image.Image:
    try:
        return Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG", "JPEG"]).convert("RGB")
    except (ValueError, OSError, Image.DecompressionBombError) as error:
        raise HTTPException(422, f"an image cannot be read: {error}") from error


class Worker:
    """Loads the model beside the server, so that /health answers meanwhile."""

    def __init__(self, name: str, load: Callable[[], Score], hint: str) -> None:
        self.name, self.load, self.hint = name, load, hint
        self.score: Score | None = None
        self.one_at_a_time = threading.Lock()

    def health(self) -> dict[str, Any]:
        return {"status": "ok" if self.score else "loading", "model": self.name}

    def answer(self, body: Body) -> dict[str, Any]:
        if self.score is None:
            raise HTTPException(503, "the weights are still being loaded", {"Retry-After": "5"})
        request = body.decoded()
        with self.one_at_a_time:
            _reasons.clear()
            returned: Any = self.score(request)
            reason = _reasons[0] if _reasons else None
        if isinstance(returned, Texts):
            return {"model": self.name, "texts": list(returned.texts)}
        # Scores themselves may be a tuple.
        has_parts = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
        scores, parts = returned if has_parts else (returned, {})
        plain_parts = {name: plain(own) for name, own in parts.items()}
        return {"model": self.name, "scores": plain(scores), "parts": plain_parts, "unscored": reason}

    def load_weights(self) -> None:
        try:
            self.score = self.load()
        except BaseException as error:
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0][:300]
            # After the traceback, where it is seen.
            sys.stderr.write(f"\nError: {self.name} could not be loaded: {type(error).__name__}: {first}\n")
            sys.stderr.write(f"{self.hint}\n" if self.hint else "")
            sys.stderr.flush()
            os._exit(1)  # A worker without weights would say "loading" for ever.
        say(f"{self.name}: ready")


def plain(scores: Scores) -> list[float | None]:
    return [None if score is None else number(score) for score in scores]


def number(score: Any) -> float:
    if isinstance(score, str | bytes | bool):  # What a model said is not yet what it means.
        raise TypeError(f"a score must be a number or None, got {score!r}")
    if not math.isfinite(score):  # A model that overflowed has judged nothing.
        raise ValueError("the model gave a score that is not finite")
    return float(score)


def application(worker: Worker, key: str | None) -> FastAPI:
    app = FastAPI(openapi_url=None)

    @app.exception_handler(StarletteHTTPException)
    def refused(_: HttpRequest, error: StarletteHTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    def malformed(_: HttpRequest, error: RequestValidationError) -> JSONResponse:
        problems = "; ".join(f"{'.'.join(map(str, own['loc']))}: {own['msg']}" for own in error.errors())
        return JSONResponse({"error": problems}, 422)

    @app.get("/health")
    def health() -> dict[str, Any]:
        return worker.health()

    @app.middleware("http")
    async def authorise(request: HttpRequest, call: Callable[[HttpRequest], Awaitable[Response]]) -> Response:
        """Checks the key before the body is read, which would take many times its size of memory."""
        given = request.headers.get("Authorization", "")
        if key and request.url.path != "/health" and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            return JSONResponse({"error": "the key is missing or wrong"}, 401)
        return await call(request)

    @app.post("/score")
    def score(body: Body) -> dict[str, Any]:
        try:
            return worker.answer(body)
        except HTTPException:
            raise
        except Exception as error:  # The model's code: the client is told, the worker lives on.
            traceback.print_exc()
            raise HTTPException(500, f"{type(error).__name__}: {error}") from error

    return app


def serve(name: str, load: Callable[[], Score], hint: str = "") -> None:
    """Serves until Ctrl-C.

    Args:
        name: name and version of the weights; clients check it.
        load: called once; returns the function that scores.
        hint: where the weights come from and how to choose others; printed if loading fails.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--until-eof", action="store_true", help="end with stdin: with the process that holds it")
    given = parser.parse_args()
    key = os.environ.get(KEY)
    if key == "":
        sys.exit(f"Error: {KEY} is empty, so that anybody could ask. Give it the key, or unset it to ask for none")
    try:
        listener = socket.create_server((given.host, given.port))
    except (OSError, OverflowError) as error:
        sys.exit(
            f"Error: cannot listen at {given.host}:{given.port}: {error}. Another worker may run there: stop it, or"
            " choose another port (make worker NAME=... PORT=8766; then set the reward's option url)"
        )
    worker = Worker(name, load, hint)
    say(f"{name}: http://{given.host}:{listener.getsockname()[1]}, loading")
    threading.Thread(target=start, args=(worker, given.until_eof), daemon=True).start()
    if given.until_eof:
        threading.Thread(target=end_with_stdin, daemon=True).start()
    config = uvicorn.Config(application(worker, key), log_level="warning", timeout_graceful_shutdown=GRACE)
    server = uvicorn.Server(config)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def start(worker: Worker, until_eof: bool) -> None:
    worker.load_weights()
    if until_eof:  # Nobody reads stdout from here on: a full pipe would stop the worker.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
