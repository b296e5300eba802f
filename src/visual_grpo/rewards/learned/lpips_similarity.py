"""Perceptual similarity to the target by LPIPS."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.hardware.device import resolve_device
from visual_grpo.rewards.learned.backbone import Backbone
from visual_grpo.rewards.target import against_targets
from visual_grpo.types import Needs, PromptRecord

_LEAST = {"alex": 31, "vgg": 16, "squeeze": 17}
"""Pixels of the shorter side that are left with a feature in every layer."""


class LpipsReward:
    """1 - LPIPS distance to the target image: 1 for the target itself, seldom below 0 (Zhang et al. 2018, arXiv
    1801.03924, version 0.1).

    The heads are in the wheel of ``lpips``; the features are torchvision's, trained on ImageNet.

    Args:
        net: ``alex`` (the one that the authors recommend as a metric), ``vgg`` or ``squeeze``.
        backbone: a file with torchvision's weights of that net, ``.pth`` or ``.safetensors``; null is torchvision's own
            copy in TORCH_HOME, downloaded at the first use.
        device: ``auto`` is the accelerator if there is one.
    """

    needs = Needs(target=True)

    def __init__(self, net: str = "alex", backbone: str | None = None, device: str = "auto") -> None:
        self.backbone = Backbone("lpips", net, backbone)
        self._device = device

    def check_machine(self) -> None:
        """Raises UserError if the device or the weights are not there."""
        _ = self._on
        self.backbone.check()

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            return 1 - against_targets(self._distance, prompts, samples)

    def _distance(self, sample: Tensor, target: Tensor) -> Tensor:
        least = _LEAST[self.backbone.net]
        if min(sample.shape[-2:]) < least:
            raise UserError(
                f"lpips: images need at least {least} pixels a side for the net {self.backbone.net!r}, got"
                f" {list(sample.shape[-2:])}"
            )
        pair = [image[None].to(self._on) * 2 - 1 for image in (sample, target)]
        distance: Tensor = self._module(*pair)
        return distance.flatten()[0].cpu()

    @property
    def _on(self) -> torch.device:
        return resolve_device(self._device, "the option device of the reward lpips")

    @cached_property
    def _module(self) -> Any:
        weights = self.backbone.read()
        # The package draws weights before ours replace them, and calls torchvision by an argument's old name.
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import lpips

            module = lpips.LPIPS(net=self.backbone.net, pnet_rand=True, verbose=False)
        # The package's names: net.slice2.3.weight is torchvision's features.3.weight.
        own = {name: name.split(".", 2)[2] for name in module.state_dict() if name.startswith("net.")}
        self._check(weights, {key: module.state_dict()[name] for name, key in own.items()})
        module.load_state_dict({name: weights[key] for name, key in own.items()}, strict=False)
        return module.eval().requires_grad_(False).to(self._on)

    def _check(self, weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        for key, tensor in expected.items():
            got = list(weights[key].shape) if key in weights else "none"
            if got != list(tensor.shape):
                raise UserError(
                    f"lpips: {self.backbone.file} is no {self.backbone.net!r} of torchvision: its weight features.{key}"
                    f" must be {list(tensor.shape)}, got {got}"
                )
