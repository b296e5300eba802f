"""A hub with a repository or two, spoken to by the real client; afterwards nobody answers."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESET = (0, "reset")
"""Refuses by a connection that is reset in the middle of a file of weights."""
FILES = (403, "Files")
"""Refuses files only, and says what they are."""
_SAYS_WHAT_IT_HAS = {"GatedRepo", FILES[1], RESET[1]}


@contextmanager
def hub_at(address: str) -> Iterator[None]:
    """Makes the client ask ``address``; without it, tests would ask the real hub."""
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    with (
        patch.multiple("huggingface_hub.constants", ENDPOINT=address, HUGGINGFACE_CO_URL_TEMPLATE=template),
        patch("huggingface_hub.hf_api.api.endpoint", address),  # That of diffusers, made at its import.
        patch("datasets.config.HF_ENDPOINT", address),
    ):
        yield


@dataclass
class Repository:
    name: str
    folder: Path
    commit: str
    refused: tuple[int, str] | None
    kind: Literal["models", "datasets"]
    former: str | None
    """Earlier name, which leads to the present one."""
    asked: list[str] = field(default_factory=list)
    """The files that were downloaded."""

    def __post_init__(self) -> None:
        found = [file for file in self.folder.rglob("*") if file.is_file()]
        self.files = {file.relative_to(self.folder).as_posix(): file.read_bytes() for file in found}
        self.sums = {path: hashlib.sha1(content).hexdigest() for path, content in self.files.items()}

    @property
    def address(self) -> str:
        return f"/{self.name}" if self.kind == "models" else f"/datasets/{self.name}"

    def info(self) -> Any:
        siblings = [{"rfilename": p, "size": len(content), "blobId": self.sums[p]} for p, content in self.files.items()]
        gated = "auto" if self.refused is not None and self.refused[1] == "GatedRepo" else False
        return {"id": self.name, "sha": self.commit, "gated": gated, "siblings": siblings}

    def entries(self, below: str, *, recursive: bool) -> Any:
        """The files and folders below a folder."""
        inside = [PurePosixPath(path) for path in self.files if path.startswith(f"{below}/" if below else "")]
        folders = {str(folder) for path in inside for folder in path.parents} - {".", below}
        listed: list[dict[str, Any]] = [
            {"type": "directory", "path": folder, "size": 0, "oid": "0"} for folder in sorted(folders)
        ]
        listed += [
            {"type": "file", "path": str(path), "size": len(self.files[str(path)]), "oid": self.sums[str(path)]}
            for path in inside
        ]
        here = below or "."
        return [entry for entry in listed if recursive or str(PurePosixPath(entry["path"]).parent) == here]

    def refusal(self, path: str, revision: str, file: str) -> tuple[int, str] | None:
        if not path.startswith(f"{self.address}/resolve/"):
            return 401, "RepoNotFound"
        if self.refused is None and revision not in ("main", self.commit):
            return 404, "RevisionNotFound"
        refused = None if self.refused == RESET else self.refused
        return refused or (None if file in self.files else (404, "EntryNotFound"))


class Hub(ThreadingHTTPServer):
    repositories: list[Repository]


class Handler(BaseHTTPRequestHandler):
    server: Hub

    @property
    def repository(self) -> Repository:
        """The one that the request names; the first for a name that no repository has."""
        first, *others = self.server.repositories
        path = f"{unquote(urlsplit(self.path).path)}/"
        return next((other for other in others if f"/{other.name}/" in path), first)

    def do_GET(self) -> None:
        repository, url = self.repository, urlsplit(self.path)
        path = unquote(url.path)
        revision, _, file = path.partition("/resolve/")[2].partition("/")
        api, asked = f"/api/{repository.kind}/{repository.name}", parse_qs(url.query)
        if path == f"/api/{repository.kind}":
            owners, names = asked.get("author", []), [each.name for each in self.server.repositories]
            self.listed([{"id": name} for name in names if not owners or name.partition("/")[0] in owners])
        elif repository.former and f"/{repository.former}/" in f"{path}/":
            self.send(b"", "", 307, location=self.path.replace(repository.former, repository.name))
        elif path.startswith(f"{api}/auth-check"):
            self.send(b"", "", *(repository.refused or (200, "")))
        elif path.startswith(api) and repository.refused and repository.refused[1] not in _SAYS_WHAT_IT_HAS:
            self.send(b"", "", *repository.refused)
        elif f"{path}/".startswith(f"{api}/tree/"):
            below = path.removeprefix(f"{api}/tree/").partition("/")[2]
            self.listed(repository.entries(below, recursive=asked.get("recursive", [""])[0].lower() == "true"))
        elif f"{path}/".startswith(f"{api}/paths-info/"):
            wanted = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode()).get("paths", [])
            self.listed([entry for entry in repository.entries("", recursive=True) if entry["path"] in wanted])
        elif f"{path}/".startswith(f"{api}/"):
            known = path.partition("/revision/")[2] in ("", "main", repository.commit)
            self.listed(repository.info()) if known else self.send(b"", "", 404, "RevisionNotFound")
        elif why := repository.refusal(path, revision, file):
            self.send(b"", "", *why)
        elif self.command == "GET" and repository.refused == RESET and file.endswith((".safetensors", ".jsonl")):
            self.send(repository.files[file], repository.sums[file], broken=True)
        else:
            repository.asked.extend([file] if self.command == "GET" else [])
            self.send(repository.files[file], repository.sums[file])

    do_HEAD = do_POST = do_GET  # noqa: N815 (names of the server's)

    def listed(self, facts: Any) -> None:
        self.send(json.dumps(facts).encode(), "")

    def send(
        self, content: bytes, tag: str, status: int = 200, code: str = "", *, broken: bool = False, location: str = ""
    ) -> None:
        self.send_response(status)
        headers = {
            "Content-Length": str(len(content)),
            "ETag": f'"{tag}"',
            "X-Repo-Commit": self.repository.commit,
        }
        told = {"X-Error-Code": code, "X-Error-Message": code, "Location": location}
        for header in (headers | {name: value for name, value in told.items() if value}).items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if broken else content if self.command != "HEAD" else b"")

    def log_message(self, *_: object) -> None: ...


@contextmanager
def hub(
    name: str,
    folder: Path,
    *,
    commit: str = COMMIT,
    refused: tuple[int, str] | None = None,
    kind: Literal["models", "datasets"] = "models",
    former: str | None = None,
    beside: Mapping[str, Path] | None = None,
) -> Iterator[list[str]]:
    """Serves ``folder`` as the repository ``name``, whose main is at ``commit``; yields the files that were downloaded.

    With ``refused`` it is refused with this status and the hub's code for it, or by `RESET` or `FILES`. ``former`` is
    an earlier name. ``beside`` are models that nobody is refused, by their names.
    """
    server = Hub(("127.0.0.1", 0), Handler)
    server.repositories = [Repository(name, folder, commit, refused, kind, former)]
    server.repositories += [Repository(*each, commit, None, "models", None) for each in (beside or {}).items()]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        # Of a download that broke off, which is tried again five times.
        without_waiting = patch("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda seconds: None))
        with hub_at(f"http://127.0.0.1:{server.server_port}"), without_waiting:
            yield server.repositories[0].asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def counted() -> Iterator[list[str]]:
    """A hub that refuses; yields the requests that it gets."""
    requests: list[str] = []

    class Counting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(f"{self.command} {self.path}")
            self.send_error(503)

        do_HEAD = do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Counting)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        with hub_at(f"http://127.0.0.1:{server.server_port}"):
            yield requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
