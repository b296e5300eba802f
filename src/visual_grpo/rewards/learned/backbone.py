"""Features that torchvision's classifiers were trained to see: AlexNet, VGG-16, SqueezeNet 1.1, without their heads."""

from __future__ import annotations

import re
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.files import digest_once
from visual_grpo.rewards.learned.weights_file import read_weights

_WEIGHTS = {"alex": "AlexNet_Weights", "vgg": "VGG16_Weights", "squeeze": "SqueezeNet1_1_Weights"}
_PATIENCE = 5.0
"""Seconds in which the server must answer a first question."""
_FEATURES = "features."
_NAMED_HASH = re.compile(r"-([0-9a-f]+)\.")
"""As in alexnet-owt-7be5be79.pth: the first digits of the content's sha256."""


class Backbone:
    """The weights of ``net``: a file, or torchvision's own in TORCH_HOME, downloaded at the first use."""

    def __init__(self, reward: str, net: str, file: str | None) -> None:
        if net not in _WEIGHTS:
            raise UserError(f"{reward}: net must be one of {', '.join(_WEIGHTS)}, got {net!r}")
        self.reward, self.net = reward, net
        self.file = None if file is None else Path(file).expanduser()

    def check(self) -> None:
        """Raises UserError, with what to do, where the weights are neither here nor on a server that answers.

        So it does where torchvision's copy is here, and is not what was published.
        """
        if self.file is not None and not self.file.is_file():
            raise UserError(
                f"{self.reward}: its backbone is {str(self.file)!r}, which is not a file on this machine. Give the file"
                f" of {self._url}, or null"
            )
        if self.file is None and not self._cached.is_file():
            try:
                urlopen(Request(self._url, method="HEAD"), timeout=_PATIENCE).close()  # noqa: S310 - https
            except (OSError, HTTPException) as error:
                raise self._not_here(error) from error
        elif self.file is None:
            self._check_published()

    def read(self) -> dict[str, Tensor]:
        """Tensors by their index among the features, as ``0.weight``. Raises UserError."""
        self.check()
        weights = self._downloaded() if self.file is None else read_weights(self.reward, self.file)
        own = {name.removeprefix(_FEATURES): value for name, value in weights.items() if name.startswith(_FEATURES)}
        if not own:
            raise UserError(
                f"{self.reward}: {self.file} holds no weights named {_FEATURES}..., as torchvision's {self.net} has,"
                f" but {', '.join(list(weights)[:3]) or 'none'}"
            )
        return own

    def _downloaded(self) -> dict[str, Tensor]:
        if not self._cached.is_file():
            try:
                torch.hub.load_state_dict_from_url(self._url, map_location="cpu", check_hash=True, weights_only=True)
            except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: not the file that its name tells.
                raise self._not_here(error) from error
        return read_weights(self.reward, self._cached)

    def _check_published(self) -> None:
        if not digest_once(self._cached).startswith(_NAMED_HASH.findall(self._cached.name)[-1]):
            raise UserError(
                f"{self.reward}: {self._cached} is not what torchvision published: its content does not have the hash"
                " that its name ends with. It was damaged or changed after the download. Delete it, and it is"
                " downloaded again"
            )

    @property
    def _url(self) -> str:
        from torchvision import models

        url: str = getattr(models, _WEIGHTS[self.net]).IMAGENET1K_V1.url
        return url

    @property
    def _cached(self) -> Path:
        """Where torchvision keeps it."""
        return Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(self._url).path).name

    def _not_here(self, error: BaseException) -> UserError:
        return UserError(
            f"{self.reward}: the weights of its backbone {self.net!r} are not on this machine and cannot be downloaded:"
            f" {error}. Where there is a network, download {self._url}; then save it as {self._cached}, or set"
            f" rewards.{self.reward}.options.backbone to the file's path"
        )
