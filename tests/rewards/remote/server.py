"""A reward worker with planted faults, run as a process: ``python server.py PORT PLAN``.

PLAN is what it does with its first POST requests, separated by commas; with later ones it does what its last word says.
A prompt with ``!`` names what to do with a request that has it. An image's score is its mean / 255. It is a worker and,
at /v1, a vision-language model: P(yes) is then the score of the last image, and the text states ten times of it.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image, ImageStat

PLAN = sys.argv[2].split(",")
LOCK = threading.Lock()
LOG: list[dict[str, Any]] = []
"""What was asked: served at /log."""
NOT_NUMBERS = {"nan": "NaN", "true": "true", "big": "1e400", "null": "null"}
STATUSES = {"500": 500, "503": 503, "422": 422, "404": 404, "401": 401, "302": 302, "429": 429, "429later": 429}
TEXTS = {
    "rubbish": "\x1b[31m\x00\xff",
    "html": "<html>Bad gateway</html>",
    "empty": "",
    "array": "[1, 2]",
    "deep": "[" * 9999,
    "huge": '{"scores": [' + "0.0, " * 2_000_000 + "0.0]}",
}
SECONDS = {"hang": 3600, "late": 0.5, "slow": 0.15}


def mean(image: str) -> float:
    return sum(ImageStat.Stat(Image.open(io.BytesIO(base64.b64decode(image)))).mean) / 3 / 255


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.endswith("/models"):
            names = ["mean", "other"] if PLAN[0] == "two" else ["mean"]
            data = [{"id": name, "object": "model", "created": 0, "owned_by": "us"} for name in names]
            return self.send(json.dumps({"object": "list", "data": data}))
        if self.path == "/log":
            return self.send(json.dumps(LOG))
        return self.send(json.dumps({"status": "loading" if PLAN[0] == "loading" else "ok", "model": "mean"}))

    def do_POST(self) -> None:
        sent = asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/chat/completions"):
            content = asked["messages"][-1]["content"]
            urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
            asked = {"images": [url.partition(",")[2] for url in urls], "prompts": [content[-1]["text"]], "chat": sent}
        with LOCK:
            todo = PLAN[min(len(LOG), len(PLAN) - 1)]
            LOG.append({"at": time.monotonic(), "auth": self.headers.get("Authorization"), "sent": sent})
        planted = [found[1] for prompt in asked["prompts"] if (found := re.search(r"!(\w+)", prompt))]
        self.do(planted[0] if planted else todo, asked)

    def do(self, todo: str, asked: dict[str, Any]) -> None:
        time.sleep(SECONDS.get(todo, 0))
        if todo == "die":
            os._exit(1)
        if todo in STATUSES:
            return self.fail(todo)
        if todo in TEXTS:
            return self.send(TEXTS[todo])
        if todo in ("cut", "drip"):
            return self.break_off(drip=todo == "drip")
        return self.send(answer(todo, asked))

    def fail(self, todo: str) -> None:
        after = {"429": "0", "429later": "3600"}.get(todo, "")
        self.send("a fault", STATUSES[todo], {"Location": "http://elsewhere/", "Retry-After": after})

    def send(self, text: str, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = text.encode("latin-1")
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def break_off(self, *, drip: bool) -> None:
        """An answer that never ends; dripping, always a byte before a timeout between bytes."""
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        self.wfile.write(b'{"scores": [0.5')
        for _ in range(10_000 if drip else 0):
            self.wfile.write(b"5")
            self.wfile.flush()
            time.sleep(0.05)
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True


def answer(todo: str, asked: dict[str, Any]) -> str:
    """JSON, or what is nearly so."""
    if "chat" in asked:
        return completion(todo, mean(asked["images"][-1]), "length" if asked["chat"]["max_tokens"] == 1 else "stop")
    scores = [str(mean(image)) for image in asked["images"]]
    for row, prompt in enumerate(asked["prompts"]):
        if todo in NOT_NUMBERS and (todo in PLAN or prompt.startswith("!")):
            scores[row] = NOT_NUMBERS[todo]
    rest: dict[str, Any] = {"model": "another"} if todo == "another" else {}
    if todo in ("parts", "parts99"):
        rest |= {"parts": {"double": [0.0] * (99 if todo == "parts99" else len(scores))}, "texts": None}
    if todo == "short":
        del scores[-1]
    return f'{{"scores": [{", ".join(scores)}], {json.dumps({"parts": None, **rest})[1:]}'


def completion(todo: str, score: float, finish: str) -> str:
    """Half of the probability is on other words."""
    top = [(" Yes", score / 4), ("yes", score / 4), ("No", (1 - score) / 2), ("Perhaps", 0.5)]
    entries = [{"token": token, "logprob": math.log(p) if p > 0 else -9999.0} for token, p in top]
    texts = {"prose": "It depends.", "two_scores": "3 or 4", "unfinished": "It asks for 3 cubes. Looking at the"}
    if todo == "prose":
        entries = [{"token": "It", "logprob": -0.1}, {"token": "Yes", "logprob": -5.0}]
    text = texts.get(todo, f"Fine.\nScore: {10 * score:.4f}")
    finish = "length" if todo == "unfinished" else finish
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}
    if todo != "bare":
        choice["logprobs"] = {"content": [{**entries[0], "top_logprobs": entries}]}
    choices = [] if todo == "nochoice" else [choice]
    return json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "mean", "choices": choices})


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


if __name__ == "__main__":
    server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
