"""Which adapters asked to become champion, and when: tags of the registered model, one for each adapter.

The error of a year is divided among the gates of a year, so that they must be counted; and what was judged once need
not be judged again.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from visual_grpo.tracking.asking import Server
from visual_grpo.tracking.registry import make_registered_model

PREFIX = "gate."
YEAR = timedelta(days=365)
PROMOTED, REFUSED = "promoted", "not promoted"
_CHARACTERS = 32
"""Of the digest in a tag's name."""


def note_gate(tracking_uri: str, name: str, digest: str, *, promoted: bool) -> None:
    """Notes the decision on the adapter with this digest; a repeated gate replaces it, and keeps the first date."""
    server = Server(tracking_uri)
    make_registered_model(server, name)
    before = _gates(server, name).get(_key(digest))
    date = datetime.now(UTC).isoformat(timespec="seconds") if before is None else before.partition(" ")[0]
    value = f"{date} {PROMOTED if promoted else REFUSED}"
    server.ask(lambda client: client.set_registered_model_tag(name, f"{PREFIX}{_key(digest)}", value))


def is_judged(tracking_uri: str, name: str, digest: str) -> bool:
    """Whether the gate has decided on the adapter with this digest."""
    return _key(digest) in _gates(Server(tracking_uri), name)


def gates_of_a_year(tracking_uri: str, name: str, *, but: str) -> int:
    """How many adapters other than that with the digest ``but`` asked within the last 365 days."""
    since = datetime.now(UTC) - YEAR
    dates = {key: value.partition(" ")[0] for key, value in _gates(Server(tracking_uri), name).items()}
    return sum(datetime.fromisoformat(date) >= since for key, date in dates.items() if key != _key(but))


def _gates(server: Server, name: str) -> dict[str, str]:
    """Digest (its beginning) -> date and decision."""
    if server.is_empty:
        return {}
    model = server.get(lambda client: client.get_registered_model(name))
    tags = {} if model is None else model.tags
    return {tag.removeprefix(PREFIX): value for tag, value in tags.items() if tag.startswith(PREFIX)}


def _key(digest: str) -> str:
    return digest[:_CHARACTERS]
