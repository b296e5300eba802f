"""How much people like an image, whatever its prompt, by LAION's aesthetic predictor."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.rewards.learned.clip import Clip
from visual_grpo.rewards.learned.compute import Compute
from visual_grpo.rewards.learned.origin import Origin
from visual_grpo.rewards.learned.weights_file import read_weights
from visual_grpo.types import PromptRecord

_HEAD_REPOSITORY, _HEAD_FILE = "trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth"
_SUFFIXES = (".pth", ".pt", ".safetensors")


class Aesthetic:
    """LAION aesthetic score, about 1 to 10 as people gave marks, mostly 4 to 7.

    The improved aesthetic predictor (Schuhmann et al. 2022, arXiv 2210.08402; sac+logos+ava1-l14-linearMSE): five
    linear layers 768-1024-128-64-16-1 without activations on the CLIP ViT-L/14 embedding of unit length. It does not
    see the prompt: with it alone every prompt gets the same pretty picture.

    Args:
        model: a folder or hub id of a transformers ``CLIPModel`` with its processor.
        revision: branch, tag or commit of a hub id.
        head: a file with the layers' weights, or a folder with aesthetic-model.pth; null is the hub's
            trl-lib/ddpo-aesthetic-predictor.
        head_revision: branch, tag or commit of the head's hub id.
        device: ``auto`` is the accelerator if there is one.
        dtype: of the CLIP model: ``float32``, ``bfloat16`` or ``float16``.
        batch_size: images at a time; null is 1 on a CPU and 16 on an accelerator.
    """

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        revision: str | None = None,
        head: str | None = None,
        head_revision: str | None = None,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int | None = None,
    ) -> None:
        self.clip = Clip(Compute("aesthetic", device, dtype, batch_size), model, revision)
        self.head = head or _HEAD_REPOSITORY
        self._head_revision = head_revision

    def check_machine(self) -> None:
        """Raises UserError if the device, the model or the head is not there."""
        self.clip.check_machine()
        if self._file is None:
            self._origin.check()

    @property
    def origins(self) -> Sequence[Origin]:
        return [*self.clip.origins, *([self._origin] if self._file is None else [])]

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> list[float]:
        return [float(self._mark(embedding)) for embedding in self.clip.images(samples)]

    def _mark(self, embedding: Tensor) -> Tensor:
        """[1], of one embedding [d]; one at a time, since a product may round differently with more rows."""
        for weight, bias in self._layers:
            embedding = F.linear(embedding, weight, bias)
        return embedding

    @property
    def _file(self) -> Path | None:
        """The head where the option names a file."""
        path = Path(self.head).expanduser()
        if path.suffix not in _SUFFIXES:
            return None
        if not path.is_file():
            raise UserError(f"aesthetic: its head is {self.head!r}, which is not a file on this machine")
        return path

    @property
    def _origin(self) -> Origin:
        return Origin(
            reward="aesthetic",
            option="head",
            path=self.head,
            revision=self._head_revision,
            needed=((_HEAD_FILE,),),
            patterns=(_HEAD_FILE,),
        )

    @cached_property
    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weight [out, in] and bias [out] of each layer, float32 on the CPU."""
        file = self._file or self._origin.folder() / _HEAD_FILE
        weights = read_weights("aesthetic", file)
        numbers = sorted(int(found[1]) for name in weights if (found := re.fullmatch(r"layers\.(\d+)\.weight", name)))
        try:
            layers = [(weights[f"layers.{n}.weight"].float(), weights[f"layers.{n}.bias"].float()) for n in numbers]
        except KeyError as error:
            raise UserError(f"aesthetic: {file} lacks {error.args[0]}") from error
        _check(file, [weight.shape for weight, _ in layers], self.clip.model.config.projection_dim)
        return layers


def _check(file: Path, shapes: Sequence[torch.Size], width: int) -> None:
    """Raises UserError unless the layers lead from an embedding to one number."""
    sizes = [shape[1] for shape in shapes] + [shape[0] for shape in shapes[-1:]]
    chained = all(one[0] == other[1] for one, other in itertools.pairwise(shapes))
    if not shapes or not chained or sizes[0] != width or sizes[-1] != 1:
        found = "-".join(map(str, sizes)) or "none"
        raise UserError(
            f"aesthetic: the head {file} must have linear layers layers.N from {width}, the width of the model's"
            f" embedding, to 1, such as {width}-1024-128-64-16-1; got {found}"
        )
