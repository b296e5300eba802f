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
    "joined": lambda gpu, cpu: torch.cat([gpu, cpu]),
    "embedding": lambda gpu, cpu: F.embedding(cpu[0].long(), gpu),
    "gathered": lambda gpu, cpu: gpu.gather(1, cpu.long()),
    "host rows by device numbers": lambda gpu, cpu: cpu[gpu[:, 0].long()],
    "host values into device rows": lambda gpu, cpu: gpu.__setitem__(torch.tensor([0]), cpu[:1]),
    "chosen by a host mask": lambda gpu, cpu: torch.where(cpu > 0, gpu, gpu),
    "added to a host tensor": lambda gpu, cpu: cpu.add_(gpu),
    "added to a host number": lambda gpu, cpu: cpu.sum().add_(gpu.sum()),
    "a host number to multiply matrices with": lambda gpu, cpu: torch.dot(gpu[0], cpu[0]),
    "noise of a host generator": lambda gpu, cpu: torch.randn(2, device=DEVICE, generator=torch.Generator()),
}
ALLOWED: dict[str, tuple[Case, int]] = {
    "a number of Python": (lambda gpu, cpu: gpu * 2.0, 0),
    "a host number": (lambda gpu, cpu: gpu * cpu.sum(), 0),
    "filled": (lambda gpu, cpu: gpu.__setitem__((slice(None), 0), 1.0), 0),
    "rows by host numbers": (lambda gpu, cpu: gpu[cpu[:, 0].long()], 1),
    "rows by a list": (lambda gpu, cpu: gpu[[1, 0]], 1),
    "rows by a device mask": (lambda gpu, cpu: gpu[gpu[:, 0] > 0], 1),
    "copied here": (lambda gpu, cpu: gpu.cpu(), 1),
    "copied there": (lambda gpu, cpu: cpu.to(gpu), 1),
    "copied into": (lambda gpu, cpu: gpu.copy_(cpu), 1),
    "asked": (lambda gpu, cpu: bool((gpu > 0).all()), 1),
    "as a list": (lambda gpu, cpu: gpu.tolist(), 1),
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
        if name.startswith(("embedding", "gathered", "host rows")):
            gpu, cpu = gpu.abs() % 3, cpu.abs() % 3
        with pytest.raises(DeviceMixError):
            REFUSED[name](gpu, cpu)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_cuda_does_is_done_and_counted(name: str) -> None:
    case, copies = ALLOWED[name]
    with Accelerator() as accelerator:
        gpu, cpu = both()
        before = accelerator.count()
        if name == "rows by host numbers":
            cpu = cpu.abs() % 3
        case(gpu, cpu)
        assert accelerator.count() - before == copies


def test_an_array_is_refused() -> None:
    with Accelerator(), pytest.raises(TypeError, match="can't convert"):
        both()[0].numpy()


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


def test_the_optimiser_takes_the_kernels_for_all_parameters_at_once() -> None:
    parameters = [torch.ones(3).requires_grad_(), torch.full((2, 2), 2.0).requires_grad_()]

    def updated(own: list[Tensor]) -> list[Tensor]:
        optimiser = torch.optim.AdamW(own, lr=0.1)
        for _ in range(2):
            for parameter in own:
                parameter.grad = parameter.detach() ** 2
            torch.nn.utils.clip_grad_norm_(own, 1.0)
            optimiser.step()
        return [parameter.detach().cpu() for parameter in own]

    with Accelerator():
        found = updated([parameter.detach().to(DEVICE).requires_grad_() for parameter in parameters])
    expected = updated([parameter.detach().clone().requires_grad_() for parameter in parameters])
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_nothing_is_left_of_it() -> None:
    with Accelerator():
        pass
    assert torch.tensor([1]).device.type == "cpu"
    assert "to" not in vars(Tensor)
    assert not torch.__future__.get_overwrite_module_params_on_conversion()
