"""Draws an answer: its points and box, and the masks without and with its negative points."""

from __future__ import annotations

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from visual_grpo.common.images import to_pil, to_tensor
from visual_grpo.rewards.segmentation.answer import Answer

_SIDE = 192
"""Approximate pixels of a panel's longer side; images are enlarged by a whole factor, never shrunk."""
_TRUTH, _POSITIVE, _NEGATIVE, _BOX = (255, 255, 255), (60, 220, 90), (255, 70, 70), (250, 200, 60)
_TINT = (70, 150, 255)
_OPACITY = 0.6
_GAP = 4


def draw_answer(image: Tensor, truth: Tensor, answer: Answer | None, fault: str | None, masks: Tensor) -> Tensor:
    """uint8 [3, h, w]: three panels, one below the other.

    The panels show the image with the outline of the truth (white), the mask without the negatives, and the mask with
    them, each with the box (yellow), positive (green) and negative points (red crosses). If the answer cannot be
    parsed, its fault is written into the first panel instead.

    Args:
        image: uint8 [3, H, W].
        truth: bool [H, W].
        masks: bool [2, H, W], without and with the negatives.
    """
    scale = max(1, round(_SIDE / max(truth.shape)))
    outline = (torch.nn.functional.max_pool2d(truth[None].float(), 3, 1, 1)[0] > 0) & ~truth
    panels = [_painted(image, outline, scale, _TRUTH), *(_painted(image, mask, scale, _TINT) for mask in masks)]
    if answer is None:
        text = f"no answer: {(fault or '').replace('_', ' ')}"
        ImageDraw.Draw(panels[0]).text((4, 4), text, fill=_NEGATIVE)
    else:
        for panel in panels:
            _mark(panel, answer, scale)
    canvas = Image.new("RGB", (panels[0].width, sum(p.height for p in panels) + _GAP * (len(panels) - 1)), "white")
    for number, panel in enumerate(panels):
        canvas.paste(panel, (0, number * (panel.height + _GAP)))
    return to_tensor(canvas)


def _painted(image: Tensor, mask: Tensor, scale: int, colour: tuple[int, int, int]) -> Image.Image:
    """The image, enlarged, with the mask in a colour."""
    picture = to_pil(image)
    picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    alpha = (mask.float() * _OPACITY * 255).round().to(torch.uint8)
    stencil = Image.fromarray(alpha.numpy()).resize(picture.size, Image.Resampling.NEAREST)
    picture.paste(Image.new("RGB", picture.size, colour), (0, 0), stencil)
    return picture


def _mark(picture: Image.Image, answer: Answer, scale: int) -> None:
    brush, radius = ImageDraw.Draw(picture), max(3, _SIDE // 40)

    def middle(*values: float) -> tuple[float, ...]:
        return tuple((value + 0.5) * scale for value in values)

    brush.rectangle(middle(*answer.box), outline=_BOX)
    for x, y in (middle(*point) for point in answer.points):
        brush.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_POSITIVE, outline="black")
    for x, y in (middle(*point) for point in answer.negatives):
        for sign in (1, -1):
            brush.line((x - radius, y - sign * radius, x + radius, y + sign * radius), fill=_NEGATIVE, width=3)
