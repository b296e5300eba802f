"""A hub with one repository, spoken to by the real client; afterwards nobody answers."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_at(address: str) -> Iterator[None]:
    """Makes the client ask ``address``; without it, tests would ask the real hub."""
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    with (
        patch.multiple("huggingface_hub.constants", ENDPOINT=address, HUGGINGFACE_CO_URL_TEMPLATE=template),
        patch("huggingface_hub.hf_api.api.endpoint", address),  # That of diffusers, made at its import.
    ):
        yield


@dataclass
class Repository:
    name: str
    folder: Path
    commit: str
    refused: tuple[int, str] | None
    asked: list[str] = field(default_factory=list)
    """The files that were downloaded."""

    def __post_init__(self) -> None:
        found = [file for file in self.folder.rglob("*") if file.is_file()]
        self.files = {file.relative_to(self.folder).as_posix(): file.read_bytes() for file in found}
        self.sums = {path: hashlib.sha1(content).hexdigest() for path, content in self.files.items()}

    def listed(self, *, tree: bool) -> bytes:
        facts: Any = [(path, len(content), self.sums[path]) for path, content in self.files.items()]
        if tree:
            return json.dumps(
                [{"type": "file", "path": p, "size": size, "oid": sha} for p, size, sha in facts]
            ).encode()
        siblings = [{"rfilename": path, "size": size, "blobId": sha} for path, size, sha in facts]
        return json.dumps({"id": self.name, "sha": self.commit, "siblings": siblings}).encode()

    def refusal(self, path: str, revision: str, file: str) -> tuple[int, str] | None:
        if not path.startswith(f"/{self.name}/resolve/"):
            return 401, "RepoNotFound"
        if self.refused is None and revision not in ("main", self.commit):
            return 404, "RevisionNotFound"
        return self.refused or (None if file in self.files else (404, "EntryNotFound"))


class Hub(ThreadingHTTPServer):
    repository: Repository


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        repository, path = self.server.repository, self.path.partition("?")[0]
        revision, _, file = path.partition("/resolve/")[2].partition("/")
        if f"{path}/".startswith(f"/api/models/{repository.name}/"):
            self.send(repository.listed(tree="/tree/" in path), "")
        elif why := repository.refusal(path, revision, file):
            self.send(b"", "", *why)
        else:
            repository.asked.extend([file] if self.command == "GET" else [])
            self.send(repository.files[file], repository.sums[file])

    def do_HEAD(self) -> None:
        self.do_GET()

    def send(self, content: bytes, tag: str, status: int = 200, code: str = "") -> None:
        self.send_response(status)
        headers = {
            "Content-Length": str(len(content)),
            "ETag": f'"{tag}"',
            "X-Repo-Commit": self.server.repository.commit,
        }
        for header in (headers | ({"X-Error-Code": code} if code else {})).items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(content if self.command == "GET" else b"")

    def log_message(self, *_: object) -> None: ...


@contextmanager
def hub(
    name: str, folder: Path, *, commit: str = COMMIT, refused: tuple[int, str] | None = None
) -> Iterator[list[str]]:
    """Serves ``folder`` as the repository ``name``, whose main is at ``commit``; yields the files that were downloaded.

    With ``refused`` its files are refused with this status and the hub's code for it.
    """
    server = Hub(("127.0.0.1", 0), Handler)
    server.repository = Repository(name, folder, commit, refused)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        with hub_at(f"http://127.0.0.1:{server.server_port}"):
            yield server.repository.asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
