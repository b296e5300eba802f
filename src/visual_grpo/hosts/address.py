"""Where rank 0 listens: told by torchrun's own store, which all its processes reach, unless the user names a port.

The store is open to everybody who reaches it. Nothing secret is told, and who listens at a false address has no secret.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

from visual_grpo.errors import UserError
from visual_grpo.hosts.launch import PORT, Launch

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_KEY = "visual_grpo/port"
_SECONDS = 10.0


def publish(launch: Launch, port: int) -> None:
    """Of rank 0."""
    if launch.own_port is None and launch.count > 1:
        _store(launch).set(_KEY, str(port))


def where(launch: Launch) -> tuple[str, int]:
    """Address and port; raises OSError where rank 0 has not told yet."""
    if launch.own_port is not None:
        return launch.first_host, launch.own_port
    store = _store(launch)
    if not store.check([_KEY]):
        raise OSError("rank 0 does not listen yet")
    return launch.first_host, int(store.get(_KEY))


@cache
def _store(launch: Launch) -> TCPStore:
    """Raises OSError where it cannot be reached."""
    if not launch.has_store:
        raise UserError(f"torchrun shares no store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE): set {PORT} to a free port.")
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    try:
        return TCPStore(launch.address, launch.port, is_master=False, timeout=timedelta(seconds=_SECONDS))
    except DistError as error:
        raise OSError(str(error).splitlines()[0]) from error
