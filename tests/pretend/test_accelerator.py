"""The pretend GPU refuses what CUDA refuses, lets pass what CUDA lets pass, and counts what waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.pretend.accelerator import DEVICE, Accelerator, DeviceMixError

Case = Callable[[Tensor, Tensor], Any]
REFUSED: dict[str, Case] = {
    "sum of two": lambda gpu, cpu: gpu + cpu,
    "matrix product": lambda gpu, cpu: gpu @ cpu.t(),
    "embedding": lambda gpu, cpu: F.embedding(cpu[0].abs().long() % 3, gpu),
    "host rows by device numbers": lambda gpu, cpu: cpu[gpu[:, 0].abs().long() % 3],
    "host values into device rows": lambda gpu, cpu: gpu.__setitem__(torch.tensor([0]), cpu[:1]),
    "chosen by a host mask": lambda gpu, cpu: torch.where(cpu > 0, gpu, gpu),
    "added to a host tensor": lambda gpu, cpu: cpu.add_(gpu),
    "a host number to multiply matrices with": lambda gpu, cpu: torch.dot(gpu[0], cpu[0]),
    "noise of a host generator": lambda gpu, cpu: torch.randn(2, device=DEVICE, generator=torch.Generator()),
}
ALLOWED: dict[str, tuple[Case, int]] = {
    "a number of Python": (lambda gpu, cpu: gpu * 2.0, 0),
    "a host number": (lambda gpu, cpu: gpu * cpu.sum(), 0),
    "rows by host numbers": (lambda gpu, cpu: gpu[cpu[:, 0].abs().long() % 3], 1),
    "rows by a device mask": (lambda gpu, cpu: gpu[gpu[:, 0] > 0], 1),
    "copied here": (lambda gpu, cpu: gpu.cpu(), 1),
    "copied into": (lambda gpu, cpu: gpu.copy_(cpu), 1),
    "asked": (lambda gpu, cpu: bool((gpu > 0).all()), 1),
    "places": (lambda gpu, cpu: gpu.nonzero(), 1),
    "a literal": (lambda gpu, cpu: torch.tensor([1, 2], device=gpu.device), 1),
    "made there": (lambda gpu, cpu: torch.zeros(3, device=gpu.device) + gpu.new_ones(3) + torch.ones_like(gpu[0]), 0),
}


def both() -> tuple[Tensor, Tensor]:
    values = torch.arange(9.0).view(3, 3) - 4
    return values.to(DEVICE), values.clone()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_is_refused(name: str) -> None:
    with Accelerator():
        gpu, cpu = both()
        with pytest.raises(DeviceMixError):
            REFUSED[name](gpu, cpu)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_cuda_does_is_done_and_counted(name: str) -> None:
    case, copies = ALLOWED[name]
    with Accelerator() as accelerator:
        gpu, cpu = both()
        before = accelerator.count()
        case(gpu, cpu)
        assert accelerator.count() - before == copies


@pytest.mark.parametrize("crossing", ["there", "there and back"])
def test_gradients_are_those_of_the_cpu(crossing: str) -> None:
    def gradient(x: Tensor, weight: Tensor) -> Tensor:
        twice = torch.cat([x[:1], x[torch.tensor([1, 1])]]) @ weight
        turned = torch.view_as_real(torch.view_as_complex(twice.view(3, 2, 2)) * torch.tensor([1j, 2.0]).to(x.device))
        head, tail = turned.flatten(1).split([1, 3], 1)
        scores = tail.sum(1).cpu() if crossing == "there and back" else tail.sum(1)
        scores.square().sum().to(x.device).backward()
        del head
        assert weight.grad is not None
        assert weight.grad.device == weight.device
        return weight.grad.cpu()

    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4) / 7
    expected = gradient(x, weight.clone().requires_grad_())
    with Accelerator():
        found = gradient(x.to(DEVICE), weight.to(DEVICE).requires_grad_())
    assert torch.equal(expected, found)


def test_nothing_is_left_of_it() -> None:
    with Accelerator(), pytest.raises(TypeError, match="can't convert"):
        both()[0].numpy()
    assert torch.tensor([1]).device.type == "cpu"
    assert "to" not in vars(Tensor)
    assert not torch.__future__.get_overwrite_module_params_on_conversion()
