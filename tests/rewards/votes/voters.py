"""Pictures, pairs and voters with a known taste."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from visual_grpo.common.images import to_pil
from visual_grpo.rewards.votes.choices import FIRST, SECOND, Choice, Pair, append_line

AT = "2026-01-02T03:04:05+00:00"


def picture(seed: int, side: int = 24) -> Tensor:
    """Noise of a random colour and contrast."""
    generator = torch.Generator().manual_seed(seed)
    colour = torch.rand(3, 1, 1, generator=generator)
    noise = torch.rand(3, side, side, generator=generator) - 0.5
    return ((colour * 0.8 + 0.1 + noise * 0.3 * float(torch.rand(1, generator=generator))).clamp(0, 1) * 255).byte()


def redness(sample: Tensor) -> float:
    return float(sample[0].double().mean() - sample[1:].double().mean()) / 255


def pair(number: int, prompt: str = "", source: str = "draw", family: str = "") -> Pair:
    prompt = prompt or f"prompt {number % 20}"
    return Pair(
        pair=f"pair{number}",
        source=source,
        prompt=prompt,
        record=f"record {prompt}",
        family=family or prompt,
        unit=f"record {prompt}",
        first=f"pictures/{2 * number}.png",
        second=f"pictures/{2 * number + 1}.png",
    )


def choice(of: Pair, said: str, voter: str = "ann") -> Choice:
    return Choice(of=of, voter=voter, choice=said, shown_left=FIRST, at=AT)


def voted(
    folder: Path, count: int, taste: Callable[[Tensor], float] = redness, noise: float = 0.0, source: str = "draw"
) -> Path:
    """A file of ``count`` choices by ``taste``, of which a share of ``noise`` is turned round."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(7)
    for number in range(count):
        own = pair(number, source=source)
        values = []
        for name, seed in ((own.first, 2 * number), (own.second, 2 * number + 1)):
            to_pil(picture(seed)).save(folder / name)
            values.append(taste(picture(seed)))
        first = (values[0] > values[1]) != (float(torch.rand(1, generator=generator)) < noise)
        append_line(folder / "choices.jsonl", choice(own, FIRST if first else SECOND).line())
    return folder / "choices.jsonl"
