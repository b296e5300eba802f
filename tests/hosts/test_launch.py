"""What is settled before any process connects: torchrun's variables, the secret, the command of rank 0, the files."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_training import parameters
from visual_grpo import command, joined_files, processes
from visual_grpo.errors import UserError
from visual_grpo.hosts.arguments import with_processes
from visual_grpo.hosts.launch import Launch, launcher
from visual_grpo.hosts.secret import found_secret, given_secret, made_secret
from visual_grpo.sharing import crew
from visual_grpo.sharing.crew import Crew, Member
from visual_grpo.sharing.sockets import listen

ENVIRONMENT = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "41000",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "7",
    "TORCHELASTIC_ERROR_FILE": "/logs/7_x/attempt_0/1/error.json",
}
LONG = "0123456789abcdef"


def launch(**changes: Any) -> Launch:
    return replace(Launch.of(ENVIRONMENT), **changes)


def test_torchruns_variables() -> None:
    found = launch()
    assert (found.rank, found.local_rank, found.here, found.count, found.run) == (3, 1, 2, 4, "7")
    assert not found.on_one_host
    assert launch(count=2).on_one_host


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": None}, "RANK is not in the environment. Expected\ntorchrun --nnodes=2"),
        ({"VISUAL_GRPO_PORT": "70000"}, "VISUAL_GRPO_PORT is '70000'; expected the number of a port"),
        ({"VISUAL_GRPO_JOIN_SECONDS": "-1"}, "VISUAL_GRPO_JOIN_SECONDS is '-1'; expected seconds"),
    ],
    ids=["torchrun", "port", "seconds"],
)
def test_variables_that_are_none(changes: dict[str, str | None], said: str) -> None:
    given = {name: value for name, value in (ENVIRONMENT | changes).items() if value is not None}
    with pytest.raises(UserError, match=said):
        Launch.of(given)


@pytest.mark.parametrize(
    ("changes", "interface"),
    [
        ({}, ""),
        ({"count": 2}, "127.0.0.1"),
        ({"address": "127.0.0.1"}, "127.0.0.1"),
        ({"address": "localhost"}, "127.0.0.1"),
    ],
    ids=["hosts", "one", "loopback", "localhost"],
)
def test_all_interfaces_are_listened_to_for_other_hosts_only(changes: dict[str, Any], interface: str) -> None:
    assert launch(**changes).interface == interface
    with listen("127.0.0.1", 0) as server:
        assert server.getsockname()[0] == "127.0.0.1"
        with pytest.raises(UserError, match="Another program has it"):
            listen("127.0.0.1", server.getsockname()[1])


@pytest.mark.parametrize(
    ("given", "said"),
    [({}, "is not set, but the processes are on several hosts"), ({"VISUAL_GRPO_SECRET": "short"}, "5 characters")],
    ids=["none", "short"],
)
def test_several_hosts_need_a_secret_that_nobody_guesses(given: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=f"VISUAL_GRPO_SECRET .*{said}.*openssl rand") as refused:
        given_secret(launch(), dict(given))
    assert "short" not in str(refused.value)


def test_the_secret_is_hidden_everywhere_and_not_passed_on() -> None:
    environment = {"VISUAL_GRPO_SECRET": LONG, "HOME": "/"}
    assert given_secret(launch(), environment) == LONG.encode()
    assert environment == {"HOME": "/"}


def test_one_host_makes_its_own_secret_where_nobody_else_reads(tmp_path: Path) -> None:
    private = tmp_path / "7_x"
    (private / "attempt_0").mkdir(parents=True)
    private.chmod(0o700)
    here = launch(count=2, folder=private / "attempt_0")
    assert given_secret(here, {}) is None
    with pytest.raises(FileNotFoundError):
        found_secret(here)
    made = made_secret(here)
    assert found_secret(here) == made
    assert len(made) == 64
    (file,) = (private / "attempt_0").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    private.chmod(0o750)
    with pytest.raises(UserError, match=r"no place for a secret.*export VISUAL_GRPO_SECRET="):
        made_secret(here)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["run"], ["run", "--params=distributed.processes=4"]),
        (["run", "--params=seed=3", "--env=a"], ["run", "--params=seed=3,distributed.processes=4", "--env=a"]),
        (["run", "--params", 'name="a, b=c"'], ["run", "--params", 'name="a, b=c",distributed.processes=4']),
        (
            ["run", "--params=distributed.processes=4"],
            ["run", "--params=distributed.processes=4,distributed.processes=4"],
        ),
    ],
    ids=["none", "one", "apart", "same"],
)
def test_rank_0_runs_the_command_with_as_many_processes(given: list[str], expected: list[str]) -> None:
    assert with_processes(given, 4) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["run", "--params=distributed.processes=2"], "distributed.processes is 2, but torchrun has started 4"),
        (["registry", "list"], "takes the word run .* got 'registry list'"),
        ([], "got 'nothing'"),
    ],
    ids=["processes", "word", "nothing"],
)
def test_a_command_that_is_none(given: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        with_processes(given, 4)


def test_what_is_printed_to_go_on_is_torchruns_line() -> None:
    command.use_launcher(["torchrun", "--nnodes=2", "-m", "visual_grpo.hosts"])
    try:
        shown = str(command.Command(None, ("--pipeline=train",), {"seed": 3, "distributed.processes": 4}))
    finally:
        command.use_launcher([])
    assert shown == "torchrun --nnodes=2 -m visual_grpo.hosts run --pipeline=train --params=seed=3"
    assert launcher() == ["torchrun", "OPTIONS", "-m", "visual_grpo.hosts"], "these tests are not of torchrun's"


def test_another_machine_must_have_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, adapters, pictures = (tmp_path / name for name in ("model", "adapters", "out/05_model_input"))
    for folder in (model, adapters, pictures):
        folder.mkdir(parents=True)
        (folder / "a.json").write_text("1")
    config = parameters(tmp_path, data={"task": "i2i"}).model_copy(update={"output": "out"})
    files = joined_files.digests(config, "model", "adapters", None)
    assert list(files) == ["model", "adapters", "out/05_model_input/"]
    joined_files.check_same(files)
    for name, folder in (("model", model), ("adapters", adapters), ("out/05_model_input/", pictures)):
        (folder / "a.json").write_text("22")
        with pytest.raises(
            UserError, match=f"^{name} is another than that of the first process, on .* Expected the same"
        ):
            joined_files.check_same(files)
        (folder / "a.json").write_text("1")
    adapters.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"^adapters is not there, on"):
        joined_files.check_same(files)
    joined_files.check_same({"org/of-the-hub": None})


def test_a_process_takes_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert processes.own_device("cuda", 1) == "cuda:1"
    assert processes.own_device("cpu", 5) == "cpu"
    with pytest.raises(UserError, match="has 2 GPUs, but processes of torchrun's up to local rank 2"):
        processes.own_device("cuda", 2)


def test_secrets_of_rewards_do_not_leave_the_first_process(tmp_path: Path) -> None:
    """The connection is not encrypted."""
    from multiprocessing import Pipe

    ours, theirs = Pipe()
    config = parameters(
        tmp_path,
        distributed={"processes": 2},
        rewards={"judge": {"function": "a:b", "weight": 1.0, "options": {"api_key": "$JUDGE_KEY"}}},
    )
    with Crew([Member(rank=1, host="there", pid=os.getpid(), connection=ours)], 1):
        assert crew.present() is not None
        workers = processes.start_workers(config, str(tmp_path), None)
        assert workers is not None
        sent = theirs.recv_bytes().decode()
    assert '"build": "build_share"' in sent
    assert "sk-not-for-others" not in sent


def test_without_torchrun_one_line_says_how(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "visual_grpo.hosts", "run"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: torchrun starts python -m visual_grpo.hosts, but RANK, ")
    assert "Traceback" not in done.stderr
