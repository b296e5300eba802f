"""A voter's browser: requests to the page's server, and pairs to show."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.rewards.votes.voters import pair, picture
from visual_grpo.common.images import to_pil
from visual_grpo.rewards.votes.choices import Ballot


def ballot(folder: Path, count: int = 4, seed: int = 0) -> Ballot:
    """With pictures in ``folder``."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    pairs = [pair(number) for number in range(count)]
    for number, own in enumerate(pairs):
        for name, own_seed in ((own.first, 2 * number), (own.second, 2 * number + 1)):
            to_pil(picture(own_seed)).save(folder / name)
    return Ballot(pairs, folder / "choices.jsonl", seed)


class Browser:
    """Talks to one server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.host, self.port, self.base = parts.hostname, parts.port, parts.path

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[HTTPResponse, bytes]:
        """``path`` is relative to the page unless it begins with /."""
        connection = HTTPConnection(self.host, self.port or 80, timeout=10)
        try:
            connection.request(method, path if path.startswith("/") else self.base + path, body, headers or {})
            response = connection.getresponse()
            return response, response.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        response, content = self.send("GET", path)
        assert response.status == 200, content
        return json.loads(content)

    def post(self, path: str, expected: int = 200, **body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        response, content = self.send("POST", path, json.dumps(body).encode(), headers)
        assert response.status == expected, content
        return json.loads(content)
