"""Devices and cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from visual_grpo.common.device import map_on_cores, require_fast, resolve_device
from visual_grpo.common.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two cores and one torch thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["gpu", "xpu", "cuda:x"])
def test_a_device_that_no_model_runs_on_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"model.device is '{name}'; expected auto, cpu, cuda or cuda:N."):
        resolve_device(name)


@pytest.mark.parametrize(
    ("present", "built_with", "said"),
    [
        (0, None, r"no CUDA device \(built without CUDA: install a CUDA build of torch\); use auto or cpu"),
        (0, "13.0", "no CUDA device; use auto or cpu"),
        (2, "13.0", "2 CUDA devices; use auto or cpu"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_with_what_is(
    present: int, built_with: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: present)
    monkeypatch.setattr(torch.version, "cuda", built_with)
    with pytest.raises(UserError, match=f"model.device is 'cuda:2', but torch finds {said}"):
        resolve_device("cuda:2")
    assert present == 0 or resolve_device("cuda:1") == torch.device("cuda:1")


def test_a_gpu_without_bfloat16_is_refused_before_it_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = {"including_emulation": True}
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **given: {**emulated, **given}["including_emulation"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with pytest.raises(UserError, match=r"model.dtype is bfloat16, which Tesla T4 does not compute in; use float16"):
        require_fast("bfloat16", torch.device("cuda"))
    require_fast("float16", torch.device("cuda"))
    require_fast("bfloat16", CPU)


@pytest.mark.usefixtures("two_cores")
def test_two_batches_are_under_way_on_two_cores() -> None:
    both = threading.Barrier(2, timeout=30)

    def meet(item: int) -> int:
        both.wait()
        return -item

    assert map_on_cores(meet, range(6), CPU) == [0, -1, -2, -3, -4, -5]


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(("threads", "device"), [(2, CPU), (1, torch.device("cuda"))])
def test_one_batch_at_a_time_where_torch_has_every_core_or_a_gpu_computes(threads: int, device: torch.device) -> None:
    torch.set_num_threads(threads)
    names = map_on_cores(lambda item: threading.current_thread().name, range(3), device)
    assert set(names) == {threading.current_thread().name}


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("gradient", [False, True])
def test_a_gradient_is_recorded_only_where_it_is_asked_for(count: int, gradient: bool) -> None:
    weight = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(not gradient):
        seen = map_on_cores(lambda item: (weight * item).requires_grad, range(count), CPU, gradient=gradient)
        assert torch.is_grad_enabled() is not gradient
    assert seen == [gradient] * count
