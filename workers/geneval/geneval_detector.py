"""Objects in a picture by Mask2Former, with what GenEval's detector (mmdet) does before and after the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from geneval_names import NAMES
from geneval_rules import CONFIDENCE, Found
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

SHORTER, LONGER = 800, 1333
"""A picture is scaled until its shorter side has the first or its longer side the second, in pixels."""
DIVISOR = 32
"""The network's input is filled up with the mean colour to a multiple of this many pixels."""
MOST_PROPOSALS = 100


@dataclass(frozen=True)
class Sizes:
    """Height and width of a picture, in pixels: as it came, as it is scaled, and with the filling."""

    original: tuple[int, int]
    scaled: tuple[int, int]
    filled: tuple[int, int]


def sizes_of(height: int, width: int) -> Sizes:
    factor = min(SHORTER / min(height, width), LONGER / max(height, width))
    scaled = (int(height * factor + 0.5), int(width * factor + 0.5))
    filled = (-(-scaled[0] // DIVISOR) * DIVISOR, -(-scaled[1] // DIVISOR) * DIVISOR)
    return Sizes((height, width), scaled, filled)


class Detector:
    """``Mask2FormerForUniversalSegmentation`` with COCO's 80 classes.

    Raises:
        ValueError: the weights know other classes.
    """

    def __init__(self, folder: str, device: str) -> None:
        from transformers import AutoImageProcessor, Mask2FormerForUniversalSegmentation

        model, told = Mask2FormerForUniversalSegmentation.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        if told["missing_keys"]:
            raise ValueError(f"{folder} lacks weights: {', '.join(sorted(told['missing_keys'])[:3])}")
        if model.config.num_labels != len(NAMES):
            raise ValueError(f"{folder} must know COCO's {len(NAMES)} classes, it knows {model.config.num_labels}")
        self.model = model.to(device).eval()
        processor = AutoImageProcessor.from_pretrained(folder)
        self.mean, self.deviation = (
            torch.tensor(own, device=device).view(3, 1, 1) for own in (processor.image_mean, processor.image_std)
        )

    @torch.inference_mode()
    def __call__(self, image: Image.Image) -> dict[str, list[Found]]:
        """For every class that is found, its objects."""
        sizes = sizes_of(image.height, image.width)
        output = self.model(pixel_values=self._pixels(image, sizes))
        return found_in(output.class_queries_logits[0], output.masks_queries_logits[0], sizes)

    def _pixels(self, image: Image.Image, sizes: Sizes) -> Tensor:
        """Float [1, 3, height, width], filled."""
        data = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).to(self.mean.device)
        plain = data.view(*sizes.original, 3).permute(2, 0, 1).float()
        normal = (_scaled(plain[None], sizes.scaled) / 255 - self.mean) / self.deviation
        return pad(normal, (0, sizes.filled[1] - sizes.scaled[1], 0, sizes.filled[0] - sizes.scaled[0]))


def found_in(class_logits: Tensor, mask_logits: Tensor, sizes: Sizes) -> dict[str, list[Found]]:
    """Objects of Mask2Former's output; those that can count for nothing are left out.

    The confidence is the class's probability times the mean probability of the pixels inside the mask.

    Args:
        class_logits: [Q, 81] of Q queries; the last one is "no object".
        mask_logits: [Q, h, w], for the filled input.
    """
    sure, flat = (
        class_logits.softmax(-1)[:, :-1].flatten().topk(min(MOST_PROPOSALS, class_logits.shape[0] * len(NAMES)))
    )
    found: dict[str, list[Found]] = {}
    for probability, place in zip(sure.tolist(), flat.tolist(), strict=True):
        if probability <= CONFIDENCE:
            break
        query, label = divmod(place, len(NAMES))
        logits = _to_original(mask_logits[query], sizes)
        mask = logits > 0
        if mask.any():
            confidence = probability * logits[mask].sigmoid().mean().item()
            found.setdefault(NAMES[label], []).append(Found(_box(mask), confidence, mask.cpu().numpy()))
    return found


def _to_original(logits: Tensor, sizes: Sizes) -> Tensor:
    """[h, w] to [height, width] of the picture as it came."""
    filled = _scaled(logits[None, None], sizes.filled)[..., : sizes.scaled[0], : sizes.scaled[1]]
    return _scaled(filled, sizes.original)[0, 0]


def _scaled(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    return interpolate(pixels, size, mode="bilinear", align_corners=False)


def _box(mask: Tensor) -> Any:
    """Of a mask with at least one pixel; right and bottom are those after the last one."""
    rows, columns = mask.any(1).nonzero()[:, 0].tolist(), mask.any(0).nonzero()[:, 0].tolist()
    return (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
