"""Perceptual similarity to the target by LPIPS, over torchvision's AlexNet."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor
from torchvision import models

from visual_grpo.common.device import resolve_device
from visual_grpo.common.digests import digest_once
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Needs, PromptRecord
from visual_grpo.rewards.learned.pretrained import read_weights
from visual_grpo.rewards.target import against_targets

_LEAST = 31
"""Pixels of the shorter side that are left with a feature in every layer."""
_NAMED_HASH = re.compile(r"-([0-9a-f]+)\.")
"""The digest in alexnet-owt-7be5be79.pth: the first digits of the content's sha256."""


class LpipsReward:
    """1 - LPIPS distance to the target image: 1 for the target itself, seldom below 0 (Zhang et al. 2018, arXiv
    1801.03924, version 0.1).

    The heads are in the wheel of ``lpips``; the features come from torchvision's AlexNet, trained on ImageNet, which
    the authors recommend as a metric.

    Args:
        backbone: a file with torchvision's weights; null is torchvision's own copy in TORCH_HOME, downloaded before the
            run.
        device: ``auto`` is the accelerator if there is one.
    """

    needs = Needs(target=True)

    def __init__(self, backbone: str | None = None, device: str = "auto") -> None:
        self.url: str = models.AlexNet_Weights.IMAGENET1K_V1.url
        self.file = None if backbone is None else Path(backbone).expanduser()
        self._device = device

    def check_machine(self) -> None:
        """Raises UserError if the device or the weights are not there, or these were changed after the download."""
        _ = self.device, self._weights_file()

    def _weights_file(self) -> Path:
        if self.file is not None:
            if not self.file.is_file():
                raise UserError(
                    f"lpips: its backbone is {str(self.file)!r}, which is not a file on this machine. Give the file of"
                    f" {self.url}, or null"
                )
            return self.file
        cached = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(self.url).path).name
        digest = _NAMED_HASH.findall(cached.name)[-1]
        if not cached.is_file():
            cached.parent.mkdir(parents=True, exist_ok=True)
            try:
                torch.hub.download_url_to_file(self.url, str(cached), hash_prefix=digest)
            except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: its content has a different hash.
                raise UserError(
                    f"lpips: the weights of its backbone are not on this machine and cannot be downloaded:"
                    f" {error}. Where there is a network, download {self.url}; then save it as {cached}, or set"
                    " rewards.lpips.options.backbone to the file's path"
                ) from error
        elif not digest_once(cached).startswith(digest):
            raise UserError(
                f"lpips: {cached} is not what torchvision published: its content does not match"
                " the hash at the end of its name. It was damaged or changed after the download. Delete it to download"
                " it again"
            )
        return cached

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            return 1 - against_targets(self._distance, prompts, samples)

    def _distance(self, sample: Tensor, target: Tensor) -> Tensor:
        if min(sample.shape[-2:]) < _LEAST:
            raise UserError(f"lpips: an image needs at least {_LEAST} pixels a side, got {list(sample.shape[-2:])}")
        pair = [image[None].to(self.device) * 2 - 1 for image in (sample, target)]
        distance: Tensor = self._module(*pair)
        return distance.flatten()[0].cpu()

    @property
    def device(self) -> torch.device:
        return resolve_device(self._device, "the option device of the reward lpips")

    @cached_property
    def _module(self) -> Any:
        file = self._weights_file()  # Of torchvision, downloaded if need be.
        weights = read_weights("lpips", file)
        # The package initialises weights before ours replace them, and calls torchvision by an argument's old name.
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import lpips

            module = lpips.LPIPS(net="alex", pnet_rand=True, verbose=False)
        # The package's names: net.slice2.3.weight is torchvision's features.3.weight.
        keys = {name: "features." + name.split(".", 2)[2] for name in module.state_dict() if name.startswith("net.")}
        try:
            module.load_state_dict({name: weights[key] for name, key in keys.items()}, strict=False)
        except (KeyError, RuntimeError) as error:  # RuntimeError: weights of other shapes.
            raise UserError(f"lpips: {file} does not hold the weights of torchvision's AlexNet: {error}") from error
        return module.eval().requires_grad_(False).to(self.device)
