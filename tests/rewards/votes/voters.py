"""Pictures, pairs and voters with a known taste."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from visual_grpo.common.images import to_pil
from visual_grpo.rewards.votes.choices import FIRST, SECOND, Ballot, Choice, Pair, append_line

AT = "2026-01-02T03:04:05+00:00"


def picture(seed: int, side: int = 24) -> Tensor:
    """Noise of a random colour and contrast."""
    generator = torch.Generator().manual_seed(seed)
    colour = torch.rand(3, 1, 1, generator=generator)
    noise = torch.rand(3, side, side, generator=generator) - 0.5
    return ((colour * 0.8 + 0.1 + noise * 0.3 * float(torch.rand(1, generator=generator))).clamp(0, 1) * 255).byte()


def redness(sample: Tensor) -> float:
    return float(sample[0].double().mean() - sample[1:].double().mean()) / 255


def pair(number: int, prompt: str = "", source: str = "draw", family: str = "") -> Pair:
    prompt = prompt or f"prompt {number % 20}"
    return Pair(
        pair=f"pair{number}",
        source=source,
        prompt=prompt,
        record=f"record {prompt}",
        family=family or prompt,
        unit=f"record {prompt}",
        first=f"pictures/{2 * number}.png",
        second=f"pictures/{2 * number + 1}.png",
    )


def choice(of: Pair, said: str, voter: str = "ann") -> Choice:
    return Choice(of=of, voter=voter, choice=said, shown_left=FIRST, at=AT)


def save_pictures(folder: Path, number: int, source: str = "draw") -> Pair:
    """Saves the pictures of the pair ``number``, whose seeds are 2 * number and the next."""
    own = pair(number, source=source)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    to_pil(picture(2 * number)).save(folder / own.first)
    to_pil(picture(2 * number + 1)).save(folder / own.second)
    return own


def voted(folder: Path, count: int, noise: float = 0.0, source: str = "draw") -> Path:
    """A file of ``count`` choices of the redder picture, of which a share of ``noise`` is turned round."""
    generator = torch.Generator().manual_seed(7)
    for number in range(count):
        own = save_pictures(folder, number, source)
        first = redness(picture(2 * number)) > redness(picture(2 * number + 1))
        turned = float(torch.rand(1, generator=generator)) < noise
        append_line(folder / "choices.jsonl", choice(own, FIRST if first != turned else SECOND).line())
    return folder / "choices.jsonl"


def ballot(folder: Path, count: int = 4, seed: int = 0) -> Ballot:
    """With pictures in ``folder``."""
    return Ballot([save_pictures(folder, number) for number in range(count)], folder / "choices.jsonl", seed)


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
