"""Processes that join the first one over a connection, as those of several machines do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sharing.build import KINDS, toys
from tests.sharing.joined import slow
from tests.sharing.test_policy import trainer
from tests.toys import records
from visual_grpo.errors import UserError
from visual_grpo.sharing import crew, sockets
from visual_grpo.sharing.crew import Crew
from visual_grpo.sharing.joining import gather, join
from visual_grpo.sharing.policy import SharedPolicy
from visual_grpo.sharing.workers import WorkerDiedError, Workers
from visual_grpo.threads import in_thread

ROOT = Path(__file__).parents[2]
SECRET = "only this test knows it"
FACTS = {"torch": "1", "python": "3"}


def other(
    server: socket.socket, rank: int, secret: str = SECRET, facts: Mapping[str, str] = FACTS
) -> subprocess.Popen[str]:
    words = ("tests.sharing.joined", str(server.getsockname()[1]), secret, str(rank), json.dumps(facts))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )


@contextmanager
def joined(*ranks: int) -> Iterator[tuple[Crew, list[subprocess.Popen[str]]]]:
    """A crew; its processes have ended afterwards."""
    server = sockets.listen("127.0.0.1", 0)
    processes = [other(server, rank) for rank in ranks]
    try:
        members = gather(server, SECRET.encode(), FACTS, ranks=set(ranks), seconds=60)
        with Crew(members, 2) as made:
            yield made, processes
    finally:
        ended(*processes)


def ended(*processes: subprocess.Popen[str]) -> list[str]:
    """What they wrote; those that do not end by themselves are killed."""
    said = []
    for process in processes:
        try:
            said.append("".join(process.communicate(timeout=20)))
        except subprocess.TimeoutExpired:
            process.kill()
            said.append("".join(process.communicate()))
    return said


def train(made: Crew, kind: str, build: Any = toys, **arguments: str) -> Any:
    """What one training by the crew learns."""
    own = KINDS[kind]()
    with Workers(made.count, build, [{"kind": kind, **arguments}] * (made.count - 1), made) as workers:
        workers.wait_until_ready()
        list(trainer(SharedPolicy("toy", own, workers)).fit(records(10)))
    return own.table


def test_they_serve_one_training_after_another_and_end_with_the_first_process() -> None:
    with joined(1, 2) as (made, processes):
        assert crew.present() is made
        assert [member.rank for member in made.members] == [1, 2]
        for kind in ("SeededTokens", "SeededSteps"):
            alone = KINDS[kind]()
            list(trainer(alone).fit(records(10)))
            torch.testing.assert_close(train(made, kind), alone.table, rtol=0, atol=1e-6)
        with pytest.raises(UserError, match="process 2: no such model"):
            train(made, "SeededTokens", where="build")
        with pytest.raises(UserError, match="process 2: the disk is full"):
            train(made, "Failing", where="replay user")
        train(made, "SeededTokens")
    assert crew.present() is None
    assert [process.returncode for process in processes] == [0, 0]


def test_they_fail_where_the_first_process_does_and_say_nothing() -> None:
    """So torchrun starts all of them again, or none."""
    server = sockets.listen("127.0.0.1", 0)
    process = other(server, 1)
    members = gather(server, SECRET.encode(), FACTS, ranks={1}, seconds=60)
    with pytest.raises(SystemExit), Crew(members, 2):
        raise SystemExit(3)
    assert ended(process) == [""]
    assert process.returncode == 1


def joining(server: socket.socket, rank: int, secret: str = SECRET, facts: Mapping[str, str] = FACTS) -> Future[Any]:
    """What `join` returns or raises, in this process."""
    address = server.getsockname()
    return in_thread(lambda: join(lambda: address, secret.encode, facts, rank=rank, seconds=5), "join")


@pytest.mark.parametrize(
    ("secret", "facts", "their_words", "our_words"),
    [
        (
            "another one",
            FACTS,
            "the first process has another secret than rank 2 on .*: set VISUAL_GRPO_SECRET",
            r"1 rank of torchrun's did not connect within 2 s: 2\..* Refused: 127.0.0.1 \(another VISUAL_GRPO_SECRET\)",
        ),
        (
            SECRET,
            {**FACTS, "torch": "2"},
            "differs from the first process's host: torch 2 instead of 1.*same commit",
            "rank 2: .* differs from the first process's host: torch 2 instead of 1.*same commit",
        ),
    ],
    ids=["secret", "version"],
)
def test_one_of_another_secret_or_version_is_refused(
    secret: str, facts: dict[str, str], their_words: str, our_words: str
) -> None:
    server = sockets.listen("127.0.0.1", 0)
    good, bad = joining(server, 1), joining(server, 2, secret, facts)
    with pytest.raises(UserError, match=our_words) as here:
        gather(server, SECRET.encode(), FACTS, ranks={1, 2}, seconds=2)
    with pytest.raises(UserError, match=their_words) as there:
        bad.result()
    good.result().close()
    for told in (here, there):
        assert SECRET not in str(told.value)
        assert "another one" not in str(told.value)


def test_a_stranger_holds_up_nobody_and_a_rank_that_does_not_come_is_named() -> None:
    server = sockets.listen("127.0.0.1", 0)
    address = server.getsockname()
    with socket.create_connection(address), socket.create_connection(address) as loud:
        loud.sendall(b"GET / HTTP/1.1\r\nHost: there\r\n\r\n")
        first = joining(server, 1)
        with pytest.raises(UserError, match=r"2 ranks of torchrun's did not connect within 1 s: 2, 3\."):
            gather(server, SECRET.encode(), FACTS, ranks={1, 2, 3}, seconds=1)
    first.result().close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_a_first_process_that_is_not_there_is_told() -> None:
    server = sockets.listen("127.0.0.1", 0)
    address = server.getsockname()
    server.close()
    with pytest.raises(UserError, match=r"rank 3 on .* cannot reach the first process within 1 s: .*VISUAL_GRPO_PORT"):
        join(lambda: address, SECRET.encode, FACTS, rank=3, seconds=1)


def test_a_machine_that_vanishes_is_noticed_by_the_system() -> None:
    server = sockets.listen("127.0.0.1", 0)
    theirs = joining(server, 1)
    (member,) = gather(server, SECRET.encode(), FACTS, ranks={1}, seconds=5)
    for connection in (member.connection, theirs.result()):
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, interval, probes = (
                same.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + interval * probes < 25
            assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) < 25_000
            assert same.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == bytes(16), "a rollout takes long"
        connection.close()


def test_one_that_is_killed_ends_what_the_first_process_does_and_all_others() -> None:
    """The first one waits for a rollout of another process, which takes a minute."""
    with joined(1, 2) as (made, processes), Workers(3, slow, [{"kind": "Slow"}] * 2, made) as workers:
        workers.wait_until_ready()
        training = trainer(SharedPolicy("toy", KINDS["SeededTokens"](), workers)).fit(records(10))
        threading.Timer(1.0, processes[1].kill).start()
        started = time.monotonic()
        with pytest.raises(WorkerDiedError, match=r"Process 3 \(rank 2 on .*, pid \d+\) is gone: .*torchrun"):
            next(training)
    assert processes[0].returncode == 1, "it was in the middle of a rollout"
    assert time.monotonic() - started < 20


def test_they_end_with_the_first_process_in_the_middle_of_a_rollout() -> None:
    server = sockets.listen("127.0.0.1", 0)
    process = other(server, 1)
    (member,) = gather(server, SECRET.encode(), FACTS, ranks={1}, seconds=60)
    workers = Workers(2, slow, [{"kind": "Slow"}], Crew([member], 2))
    workers.wait_until_ready()
    workers.others[0].ask(
        "roll_out", module="toy", name="", prompts=records(2), group_size=2, generator=torch.empty(0), share=[0, 2, 2]
    )
    time.sleep(1)
    member.connection.close()
    ended(process)
    assert process.returncode == 1


def test_a_loss_between_two_trainings_is_told_too() -> None:
    with joined(1) as (_, processes):
        processes[0].send_signal(signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="rank 1"):
            time.sleep(10)
