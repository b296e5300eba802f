"""Prints a table of docs/experiments/speed.md: the seconds of built-in rewards for 16 images (or videos of 5 frames).

Seconds are CPU time with one thread, which other programs on the machine hardly change. Models have their true size and
drawn weights: the time does not depend on the weights. The first call, which loads the model, is not counted. A reward
that takes more than a second an image is timed on 2 images, and the time multiplied.

    python benchmarks/reward_speed.py                   # with the large models: about 10 minutes and 10 GB
    python benchmarks/reward_speed.py ssim lpips        # these only
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from reward_models import options_of

from visual_grpo.common import quiet_libraries
from visual_grpo.common.images import to_tensor
from visual_grpo.common.types import PromptRecord, TextSample, VideoSample
from visual_grpo.config import RewardConfig
from visual_grpo.rewards.build import build_reward
from visual_grpo.rewards.catalogue import BUILT_IN
from visual_grpo.rewards.reward import FunctionReward
from visual_grpo.starter.shapes.render import COMBINATIONS, draw

SIDES = (256, 1024)
IMAGES, FEW, FRAMES = 16, 2, 5
SLOW = 1.0
"""Seconds an image from which on few are timed."""

ELSEWHERE = ("votes", "http", "vlm_judge")
"""Computed from people's choices or by another program, on which the time depends."""


def main() -> None:
    quiet_libraries.silence_libraries()
    torch.set_num_threads(1)
    names = _arguments().names
    print(f"| reward |{''.join(f' {side} px |' for side in SIDES)}")
    print("|---" * (1 + len(SIDES)) + "|")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            cells = [f"{each:.2g}" for each in timed(name, Path(folder))]
        print(f"| {' | '.join([f'`{name}`', *cells])} |", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "names", nargs="*", default=[name for name in BUILT_IN if name not in ELSEWHERE], metavar="NAME"
    )
    return parser.parse_args()


def timed(name: str, folder: Path) -> list[float]:
    """Seconds for 16 images of each side."""
    options = {"detector": "reward_speed:one_box"} if name == "object_layout" else options_of(name, folder)
    reward = build_reward(name, RewardConfig(function=None, options=options))
    found = []
    for side in SIDES:
        samples: list[Any] = [image(number, side) for number in range(IMAGES)]
        records = [record(folder, samples[0], side)] * IMAGES
        if name == "negative_points":
            samples = [answer(side)] * IMAGES
        if reward.needs.video:
            samples = [video(each) for each in samples]
        _seconds(reward, records[:1], samples[:1])
        few = _seconds(reward, records[:FEW], samples[:FEW]) * IMAGES / FEW
        found.append(few if few > SLOW * IMAGES else _seconds(reward, records, samples))
    return found


def _seconds(reward: FunctionReward, records: Sequence[PromptRecord], samples: Sequence[Any]) -> float:
    started = time.process_time()
    reward(records, samples)
    return time.process_time() - started


def image(number: int, side: int) -> torch.Tensor:
    """A drawn shape with a word and noise on it: what is smooth and empty takes less time than a picture."""
    drawn = draw(COMBINATIONS[number], side, side, random.Random(number)).convert("RGB")
    ImageDraw.Draw(drawn).text((side // 8, side // 8), "OPEN", font=ImageFont.load_default(side // 6))
    noise = torch.randint(-9, 10, (3, side, side), generator=torch.Generator().manual_seed(number))
    return (to_tensor(drawn) + noise).clamp(0, 255).to(torch.uint8)


def video(image: torch.Tensor) -> VideoSample:
    """The image, which moves to the right."""
    step = image.shape[-1] // 64
    return VideoSample(frames=torch.stack([image.roll(step * time, 2) for time in range(FRAMES)]), fps=16.0)


def record(folder: Path, target: torch.Tensor, side: int) -> PromptRecord:
    """With all that any reward reads."""
    path, mask = folder / f"{side}.png", folder / f"{side}_mask.png"
    Image.fromarray(target.permute(1, 2, 0).numpy()).save(path)
    truth = Image.new("L", (side, side))
    ImageDraw.Draw(truth).rectangle((side // 4, side // 4, side // 2, side // 2), fill=255)
    truth.save(mask)
    box = [side // 4, side // 4, side // 2, side // 2]
    objects = [{"label": "circle", "color": "red", "position": "left"}]
    metadata = {"objects": objects, "region": [[0, 0, 0.5, 0.5]], "box": box, "points": [[side // 3, side // 3]]}
    return PromptRecord(
        id=str(side),
        prompt='a small red circle on the left with the word "OPEN"',
        target_image=path,
        source_images=(path,),
        metadata=metadata,
    )


def one_box(image: torch.Tensor) -> list[Any]:
    """A detector that takes no time: that of a true one is to be added."""
    return [("circle", (0.25, 0.25, 0.5, 0.5), 1.0)]


def answer(side: int) -> TextSample:
    box, point, negative = [side // 4] * 2 + [side // 2] * 2, [side // 3] * 2, [side // 8] * 2
    text = f'<answer>{{"bbox":{box},"points":[{point}],"negative_points":[{negative}]}}</answer>'
    return TextSample(text=text, finished=True, frame=(side, side))


if __name__ == "__main__":
    main()
