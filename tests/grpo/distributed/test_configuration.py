"""What is settled, or refused, before any process starts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.training.few_steps import parameters
from visual_grpo.common.errors import LostRankError, UserError
from visual_grpo.common.processes import STORE
from visual_grpo.config.policy import DistributedConfig
from visual_grpo.grpo.distributed import launch, ranks, torchrun
from visual_grpo.operations.command import Command
from visual_grpo.operations.preflight.check import check
from visual_grpo.tracking import run_context


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"distributed": {"processes": 3}},
            "a step of ar has 2 prompts .*Expected at most 2",
        ),
        ({"distributed": {"processes": 0}}, "greater than or equal"),
        ({"distributed": {"sharded": True}}, "sharded needs processes of at least 2"),
    ],
)
def test_what_processes_cannot_do_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path, pipeline_folder: Path
) -> None:
    with pytest.raises((UserError, ValueError), match=said):
        check(parameters(tmp_path, **{"model": {"path": str(pipeline_folder)}, **changes}))


def test_each_process_needs_a_gpu(tmp_path: Path, pipeline_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"path": str(pipeline_folder), "device": "cuda"}
    config = parameters(tmp_path, distributed={"processes": 3}, model=model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"distributed.processes is 3, but this machine has 2 GPUs"):
        check(config)


def test_torchruns_number_of_processes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DistributedConfig().processes == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert DistributedConfig().processes == DistributedConfig(processes=2).processes == 4


def test_the_line_that_goes_on_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    shown = str(Command(None, ("--pipeline=train",), {"seed": 3}))
    assert shown == "torchrun OPTIONS -m kedro run --pipeline=train --params=seed=3"
    monkeypatch.setenv(STORE, "a file")
    assert str(Command(None, ("--pipeline=train",), {})).endswith("kedro run --pipeline=train")
    monkeypatch.setattr("sys.argv", ["kedro/__main__.py", "run", "--pipeline=train"])
    assert run_context.command().endswith("/kedro run --pipeline=train")


def test_a_session_in_python_is_one_process() -> None:
    with pytest.raises(UserError, match=r"distributed\.processes is 2, but a session in Python"):
        torchrun.rerun(2)


def test_hosts_with_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text("1")

    def gathered(compute: Any) -> list[Any]:
        host, (code, packages, files) = compute()
        return [(host, (code, packages, files)), ("other", (code, packages, ["another"]))]

    monkeypatch.setattr(ranks, "all_gather", gathered)
    with pytest.raises(
        UserError, match=rf"^other and .* differ in packages, code or .* of {tmp_path}. Expected the same"
    ):
        launch._require_same_hosts([tmp_path])


@pytest.mark.parametrize("others_secret", ["", "a guess", "the secret"])
def test_who_does_not_know_the_secret_is_no_rank(others_secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have connected before the real rank, and says something else or nothing."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(launch, "_PATIENCE", timedelta(seconds=0.5))
    store = dist.HashStore()  # type: ignore[attr-defined]

    def join(rank: int) -> Any:
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))

    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(join, range(2)))
        other = pool.submit(launch.recognise, groups[1], others_secret) if others_secret else None
        with nullcontext() if others_secret == "the secret" else pytest.raises(LostRankError):
            launch.recognise(groups[0], "the secret")
        assert other is None or (other.exception() is None) is (others_secret == "the secret")
