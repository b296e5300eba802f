"""The page on this machine alone: static text, the pictures of the pairs, and the choices.

It answers on 127.0.0.1 only, and only under a secret path, so that neither other machines nor other users or pages of
this one can read or choose. A request whose Host is another name comes from a page elsewhere that was given this
address by its name server, and is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from visual_grpo.errors import UserError
from visual_grpo.pipelines.vote.ballot import Ballot, RefusedError

HOST = "127.0.0.1"
LONGEST_BODY = 10_000
"""Bytes of a request; a choice has about a hundred."""
PATIENCE = 20.0
"""Seconds that a connection may be silent."""
_PAGE = Path(__file__).parent / "page"


class Server(ThreadingHTTPServer):
    """Serves a ballot; ``url`` is the page's."""

    daemon_threads = True

    def __init__(self, ballot: Ballot, voter: str, port: int = 0) -> None:
        self.ballot, self.voter = ballot, voter
        self.token = secrets.token_urlsafe(24)
        self.page, self.policy = _page()
        super().__init__((HOST, port), _Handler)
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        self.url = f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hangs up is no error of the command."""


@contextmanager
def served(ballot: Ballot, voter: str, port: int = 0) -> Iterator[Server]:
    """Serves until the block ends.

    Raises:
        UserError: the port is taken.
    """
    try:
        server = Server(ballot, voter, port)
    except OSError as error:
        raise UserError(f"vote.port {port} cannot be used: {error.strerror}. Choose another, or 0 for any") from error
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="vote")
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = PATIENCE
    server_version, sys_version = "vote", ""

    def do_GET(self) -> None:
        path = self._inside()
        if path is None:
            return
        if path == "":
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        elif path == "state":
            voter = parse_qs(urlsplit(self.path).query).get("voter", [self.server.voter])[0]
            self._json(HTTPStatus.OK, self.server.ballot.state(voter))
        elif path.startswith("picture/"):
            self._picture(path.removeprefix("picture/"))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")

    def do_POST(self) -> None:
        path = self._inside()
        if path is None:
            return
        ballot = self.server.ballot
        actions: Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
            "choice": (("voter", "pair", "choice"), ballot.choose),
            "undo": (("voter",), ballot.undo),
            "finish": ((), self._finish),
        }
        if path not in actions:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
            return
        keys, act = actions[path]
        body = self._body(keys)
        if body is None:
            return
        try:
            self._json(HTTPStatus.OK, act(*(body[key] for key in keys)))
        except RefusedError as error:
            self._refuse(HTTPStatus.CONFLICT, str(error))
        except OSError as error:
            self._refuse(HTTPStatus.INSUFFICIENT_STORAGE, f"the choice was not stored: {error.strerror}")

    def _finish(self) -> dict[str, bool]:
        self.server.ballot.finished.set()
        return {"finished": True}

    def _inside(self) -> str | None:
        """The path after the token; None where it is another, which has been answered."""
        if self.headers.get("Host", "") not in self.server.hosts:
            self._refuse(HTTPStatus.FORBIDDEN, "this page is only for this machine")
            return None
        token, slash, path = urlsplit(self.path).path.removeprefix("/").partition("/")
        if not slash or not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "open the address that the command printed, with all of its characters")
            return None
        return path

    def _body(self, keys: tuple[str, ...]) -> dict[str, str] | None:
        """The JSON object of texts that was sent; None where it is anything else, which has been answered."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LONGEST_BODY:
            self._refuse(HTTPStatus.BAD_REQUEST, f"Content-Length must be a number up to {LONGEST_BODY}")
            return None
        if self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send application/json")
            return None
        try:
            found = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in keys):
            self._refuse(HTTPStatus.BAD_REQUEST, f"send a JSON object with the texts {', '.join(keys) or '(none)'}")
            return None
        return found

    def _picture(self, name: str) -> None:
        ballot = self.server.ballot
        shown = {Path(file).name: file for file in ballot.pictures()}
        try:
            content = (ballot.file.parent / shown[name]).read_bytes()
        except (KeyError, OSError):
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such picture")
            return
        self._send(HTTPStatus.OK, content, "image/png")

    def _json(self, status: HTTPStatus, value: Mapping[str, Any]) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._json(status, {"error": why})

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": self.server.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # The name is that of the overridden method.
        """Nothing: the terminal is for people, and the path is secret."""


def _page() -> tuple[bytes, str]:
    """The page, and a policy that lets nothing run but its own script and nothing load but its pictures."""
    script, style, page = ((_PAGE / name).read_text(encoding="utf-8") for name in ("vote.js", "vote.css", "vote.html"))
    page = page.replace("{{ style }}", style).replace("{{ script }}", script)
    policy = (
        "default-src 'none'; img-src 'self' data:; connect-src 'self';"
        f" script-src {_digest(script)}; style-src {_digest(style)};"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.encode(), policy


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
