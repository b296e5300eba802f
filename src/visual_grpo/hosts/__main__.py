"""``torchrun OPTIONS -m visual_grpo.hosts run ...``, on each host the same: ``kedro run`` by all of their processes.

Rank 0 runs the command with ``distributed.processes`` as many as torchrun has started; the others work for it. Exit
codes are those of ``kedro run``, and 1 of the others where rank 0 has not succeeded.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from visual_grpo import command, third_party_output
from visual_grpo.errors import UserError
from visual_grpo.hosts import address
from visual_grpo.hosts.arguments import with_processes
from visual_grpo.hosts.facts import facts
from visual_grpo.hosts.launch import Launch, launcher
from visual_grpo.hosts.secret import found_secret, given_secret, made_secret
from visual_grpo.visible_text import visible


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        launch = Launch.of(os.environ)
        secret = given_secret(launch, os.environ)
        if launch.rank == 0:
            return _lead(launch, secret, arguments)
        return _work(launch, secret)
    except UserError as error:
        # All processes of a host would say the same.
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            print(f"Error: {visible(str(error))}", file=sys.stderr)  # noqa: T201
        return 1


def _lead(launch: Launch, secret: bytes | None, arguments: Sequence[str]) -> int:
    """Rank 0: the command itself."""
    from visual_grpo.__main__ import main as run
    from visual_grpo.sharing.crew import Crew
    from visual_grpo.sharing.joining import gather
    from visual_grpo.sharing.sockets import listen

    command.use_launcher(launcher())
    threading.Thread(target=_stop_with_the_launcher, name="watch of torchrun", daemon=True).start()
    given = with_processes(arguments, launch.count)
    server = listen(launch.interface, launch.own_port or 0)
    known = made_secret(launch) if secret is None else secret
    address.publish(launch, server.getsockname()[1])
    ranks = set(range(1, launch.count))
    members = gather(server, known, facts(launch), ranks=ranks, seconds=launch.seconds)
    with Crew(members, launch.here, launch.first_host):
        run(given[1:])  # Ends with SystemExit.
    return 0


def _work(launch: Launch, secret: bytes | None) -> int:
    """Any other rank."""
    from visual_grpo import processes
    from visual_grpo.sharing.joining import join
    from visual_grpo.sharing.serving import serve

    if str(Path.cwd()) not in sys.path:  # The user's own family of models is a file there.
        sys.path.append(str(Path.cwd()))
    connection = join(
        lambda: address.where(launch),
        lambda: found_secret(launch) if secret is None else secret,
        facts(launch),
        rank=launch.rank,
        seconds=launch.seconds,
    )
    name = f"rank {launch.rank} on {socket.gethostname()}"
    return serve(connection, processes.builds(launch.local_rank), here=launch.here, name=name)


def _stop_with_the_launcher() -> None:
    """A torchrun that was killed can stop nobody any more: the training saves itself, and ends."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # Of torchrun's store: who connects, and tries again.
    third_party_output.silence_libraries()
    sys.exit(main(sys.argv[1:]))
