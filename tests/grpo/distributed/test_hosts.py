"""Two hosts that are two network namespaces of this machine, each with a torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.grpo.distributed.commands import LEARNED, LONG, ROW_BY_ROW, Running, command, difference, prepare, weights
from tests.grpo.distributed.test_toys import is_there
from tests.small_project import paste

ADDRESSES = ("10.231.7.1", "10.231.7.2")
TORCHRUN = (
    ".venv/bin/torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=10.231.7.1:29400"
    " --local-addr={address} --rdzv-conf=is_host={first} -m kedro"
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Their names; a cable lies between them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need ip and the rights of root")
    names = (f"grpo-a-{os.getpid()}", f"grpo-b-{os.getpid()}")
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "grpo0", "netns", names[0], "type", "veth", "peer", "name", "grpo0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "grpo0")
            ip("-n", name, "link", "set", "grpo0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def lines(names: tuple[str, str], pipelines: str, more: str) -> list[str]:
    return [
        f"ip netns exec {name} env GLOO_SOCKET_IFNAME=grpo0 "
        + command("ar", pipelines, more, TORCHRUN.format(address=address, first=int(address == ADDRESSES[0])))
        for name, address in zip(names, ADDRESSES, strict=True)
    ]


@pytest.mark.slow
def test_two_hosts_train_and_judge_together_and_the_loss_of_one_ends_both(
    namespaces: tuple[str, str], tmp_path: Path
) -> None:
    project = tmp_path / "project"
    output = prepare(project, "ar", LEARNED)
    params = f"{LEARNED},{ROW_BY_ROW}"
    done = paste(command("ar", "train", params), project)
    assert done.returncode == 0, done.stderr[-2000:]
    alone = weights(output)
    with Running(lines(namespaces, "train,evaluate", params), project) as hosts:
        said = hosts.ended(600)
        assert [own.returncode for own in hosts.commands] == [0, 0], said
    assert difference(alone, weights(output)) < 1e-5
    first, second = sorted(said, key=lambda own: -len(own[0]))
    assert "2 processes train together." in first[0]
    assert second[0] == ""

    checkpoints = output / "06_models/checkpoints"
    before = set(checkpoints.glob("step-*"))
    with Running(lines(namespaces, "train", f"{params},{LONG},resume=never"), project) as hosts:
        hosts.wait_for(lambda: set(checkpoints.glob("step-*")) - before)
        ranks = [pid for own in hosts.commands for pid in hosts.below(own.pid)]
        assert len(ranks) == 2
        ip("-n", namespaces[1], "link", "set", "grpo0", "down")
        began = time.monotonic()
        while any(is_there(pid) for pid in ranks) and time.monotonic() < began + 60:
            time.sleep(0.2)
        spent = time.monotonic() - began
        assert spent < 30, "a rank goes on without the other"
        said = hosts.ended(60)
        sys.stdout.write(f"after {spent:.1f} s: {said}")
    assert any("Another process of this command has ended" in error for _, error in said)
