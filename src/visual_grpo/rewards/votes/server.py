"""The page on this machine alone: static text, the pictures of the pairs, and the choices.

It answers on 127.0.0.1 only, under a secret path and for this host's name, so that neither other machines nor other
users or pages of this one can read or choose.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, Body, FastAPI, HTTPException, Request, Response
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles

from visual_grpo.common.errors import UserError
from visual_grpo.rewards.votes.choices import Ballot, InvalidVoteError

HOST = "127.0.0.1"
Said = Annotated[str, Body(embed=True)]
"""A text of the request's JSON object."""
_GRACE = 2
"""Seconds for answers that are on their way when the page ends; a client that has stalled is not waited for."""
_PAGE = Path(__file__).parent / "page"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing runs but the page's own script, and nothing loads but its pictures."""


@contextmanager
def served(ballot: Ballot, voter: str, port: int = 0) -> Iterator[str]:
    """Serves until the block ends; gives the page's address. Raises UserError if the port is taken."""
    try:
        listening = socket.create_server((HOST, port))
    except OSError as error:
        raise UserError(
            f"vote.port {port} cannot be used: {error.strerror}. Choose a different port, or 0 for any"
        ) from error
    token = secrets.token_urlsafe(24)
    app = create_app(ballot, voter, token)
    config = uvicorn.Config(
        app,
        # Nothing is logged: the terminal is for people, and the path is secret.
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=_GRACE,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="vote")
    thread.start()
    try:
        yield f"http://{HOST}:{listening.getsockname()[1]}/{token}/"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def create_app(ballot: Ballot, voter: str, token: str) -> FastAPI:
    """The page and its requests; all are coroutines without an await, so that they run one after the other."""
    app = FastAPI(openapi_url=None, exception_handlers={InvalidVoteError: _refused, OSError: _not_stored})
    router = APIRouter(prefix=f"/{token}")

    @app.middleware("http")
    async def harden(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call(request)
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cache-Control"] = "no-store"
        return response

    @router.get("/state")
    async def state(voter: str = voter) -> dict[str, Any]:
        return ballot.state(voter)

    @router.get("/picture/{name}")
    async def picture(name: str) -> Response:
        file = ballot.pictures().get(name)
        if file is None or not file.is_file():
            raise HTTPException(404)
        return Response(file.read_bytes(), media_type="image/png")

    @router.post("/choice")
    async def choose(voter: Said, pair: Said, choice: Said) -> dict[str, Any]:
        return ballot.choose(voter, pair, choice)

    @router.post("/undo")
    async def undo(voter: Said) -> dict[str, Any]:
        return ballot.undo(voter)

    @router.post("/finish")
    async def finish() -> dict[str, bool]:
        ballot.finished.set()
        return {"finished": True}

    app.include_router(router)
    app.mount(f"/{token}", StaticFiles(directory=_PAGE, html=True))
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return app


async def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 409)


async def _not_stored(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"the choice was not stored: {getattr(error, 'strerror', error)}"}, 507)
