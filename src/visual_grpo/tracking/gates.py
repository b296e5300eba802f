"""Which adapters asked to become champion, and when: tags of the registered model, one for each gate.

The error of a year is divided among the gates of a year, so that they must be counted; and what was judged once need
not be judged again. The same adapter with the same settings comes to the same decision, and is one gate.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from visual_grpo.tracking.registry import make_registered_model
from visual_grpo.tracking.registry_client import Server

PREFIX = "gate."
YEAR = timedelta(days=365)
PROMOTED, REFUSED = "promoted", "not promoted"
_OF_ADAPTER, _OF_SETTINGS = 32, 8
"""Characters of both digests in a tag's name."""
_VALUE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00) .+")


def note_gate(tracking_uri: str, name: str, digest: str, settings: str, *, promoted: bool) -> None:
    """Notes the decision on the adapter with ``digest``; the same gate again keeps the first date."""
    server, key = Server.registry(tracking_uri), _key(digest, settings)
    make_registered_model(server, name)
    date = _gates(server, name).get(key, datetime.now(UTC)).isoformat(timespec="seconds")
    value = f"{date} {PROMOTED if promoted else REFUSED}"
    server.ask(lambda client: client.set_registered_model_tag(name, f"{PREFIX}{key}", value))


def is_judged(tracking_uri: str, name: str, digest: str, settings: str = "") -> bool:
    """Whether the gate has decided on the adapter with this digest; with these settings, where they are given."""
    return any(key.startswith(_key(digest, settings)) for key in _gates(Server.registry(tracking_uri), name))


def gates_of_a_year(tracking_uri: str, name: str, *, but: tuple[str, str]) -> int:
    """How many gates there were within the last 365 days, beside that of this adapter and these settings."""
    since = datetime.now(UTC) - YEAR
    return sum(date >= since for key, date in _gates(Server.registry(tracking_uri), name).items() if key != _key(*but))


def _gates(server: Server, name: str) -> dict[str, datetime]:
    """Key -> when; tags that somebody else has set are none."""
    if server.is_empty:
        return {}
    model = server.get(lambda client: client.get_registered_model(name))
    tags = {} if model is None else model.tags
    found = {tag.removeprefix(PREFIX): _VALUE.fullmatch(value) for tag, value in tags.items() if tag.startswith(PREFIX)}
    return {key: datetime.fromisoformat(match[1]) for key, match in found.items() if match is not None}


def _key(digest: str, settings: str) -> str:
    return f"{digest[:_OF_ADAPTER]}.{settings[:_OF_SETTINGS]}"
