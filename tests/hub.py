"""A hub with one repository, spoken to by the real client; afterwards nobody answers."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import patch

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_at(address: str) -> AbstractContextManager[object]:
    """Makes the client ask ``address``; without it, tests would ask the real hub."""
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    return patch.multiple("huggingface_hub.constants", ENDPOINT=address, HUGGINGFACE_CO_URL_TEMPLATE=template)


@contextmanager
def hub(name: str, folder: Path) -> Iterator[list[str]]:
    """Serves ``folder`` as the repository ``name``; yields the files that were downloaded."""
    files = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    sums = {path: hashlib.sha1(content).hexdigest() for path, content in files.items()}
    tree = [{"type": "file", "path": path, "size": len(files[path]), "oid": sums[path]} for path in files]
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            file = path.partition("/resolve/")[2].partition("/")[2]
            if path.startswith(f"/api/models/{name}/"):
                self.send(json.dumps(tree if "/tree/" in path else {"id": name, "sha": COMMIT}).encode(), "")
            elif path.startswith(f"/{name}/resolve/") and file in files:
                asked.extend([file] if self.command == "GET" else [])
                self.send(files[file], sums[file])
            else:
                self.send(b"", "", 404)

        def do_HEAD(self) -> None:
            self.do_GET()

        def send(self, content: bytes, tag: str, status: int = 200) -> None:
            self.send_response(status)
            headers = {"Content-Length": str(len(content)), "ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}
            for header in (headers | ({} if status == 200 else {"X-Error-Code": "EntryNotFound"})).items():
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(content if self.command == "GET" else b"")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        with hub_at(f"http://127.0.0.1:{server.server_port}"):
            yield asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
