"""How a training step's CPU time grows as one thing doubles, and whether its memory grows as steps go on.

One small Stable Diffusion 3 and one small Qwen2.5-VL of random weights, in float32 on one thread; rewards cost nothing.
Each change is paired with the step without it, in turns; what is printed are medians of the quotient of process CPU
seconds. Then 500 small steps of each, and the process's resident memory after every hundredth.

    python benchmarks/growth.py --rounds 5 --json bench/growth.json
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from visual_grpo.common import quiet_libraries
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import FlowConfig, GRPOConfig, PolicyConfig, SamplerConfig
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.operations.plan.dry_run import unequal_scores
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training import components

sys.path.append(str(Path(__file__).parents[1]))  # For the examples.

MEMORY_STEPS, MEMORY_EVERY = 500, 100


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Of one step."""

    prompts: int = 4
    group: int = 8
    side: int = 64
    """Pixels."""
    layers: int = 2
    width: int = 1
    """Times the small model's width, by as many heads."""
    length: int = 8
    """Denoising steps, or tokens."""


FLOW = {
    "prompts": replace(Setting(), prompts=8),
    "group": replace(Setting(), group=16),
    "height and width": replace(Setting(), side=128),
    "layers": replace(Setting(), layers=4),
    "hidden width": replace(Setting(), width=2),
    "denoising steps": replace(Setting(), length=16),
}
TOKENS = {
    "prompts": replace(Setting(), prompts=8),
    "group": replace(Setting(), group=16),
    "height and width": replace(Setting(), side=128),
    "layers": replace(Setting(), layers=4),
    "hidden width": replace(Setting(), width=2),
    "tokens": replace(Setting(), length=16),
}


def flow_steps(folder: Path, setting: Setting) -> Iterator[Any]:
    """Of the small Stable Diffusion 3, whose steps but the last are stochastic; two of them are trained."""
    from examples.flow_models.models import build_sd3
    from visual_grpo.starter.glm_image.modules import build_vae

    pipeline = build_sd3(build_vae(setting.side, setting.side, 0), setting.side, 0)
    pipeline.vae.register_to_config(shift_factor=0.0)
    config = {**pipeline.transformer.config, "num_layers": setting.layers}
    for part in ("num_attention_heads", "caption_projection_dim"):
        config[part] *= setting.width
    pipeline.transformer = type(pipeline.transformer).from_config(config)
    nn.init.normal_(pipeline.transformer.proj_out.weight, std=0.1)
    pipeline.save_pretrained(folder)
    policy = components.load_policy(
        str(folder),
        size=(setting.side, setting.side),
        policy=PolicyConfig(flow=FlowConfig(window_steps=2), share_start_noise=False),
        rollout=SamplerConfig(steps=setting.length, guidance_scale=4.5),
        device="cpu",
    )
    records = [PromptRecord(id=str(n), prompt=f"a {'small ' * (n % 3)}red circle") for n in range(setting.prompts)]
    return _fit(policy, records, setting)


def token_steps(folder: Path, setting: Setting) -> Iterator[Any]:
    """Of the small Qwen2.5-VL, whose answers all have their greatest length."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    from examples.scenes import small_qwen2_5_vl as small

    processor = small.build_processor(setting.side, setting.side)
    config = small.build_model(processor, 0).config
    config.text_config.num_hidden_layers = setting.layers
    config.text_config.layer_types = ["full_attention"] * setting.layers
    for part in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config.text_config, part, setting.width * getattr(config.text_config, part))
    config.vision_config.out_hidden_size = config.text_config.hidden_size
    network = Qwen2_5_VLForConditionalGeneration(config)
    end = network.generation_config.eos_token_id = len(processor.tokenizer) - 1
    network.generation_config.do_sample = False
    network.save_pretrained(folder)
    processor.save_pretrained(folder)
    picture = folder / "picture.png"
    noise = torch.randint(0, 256, (setting.side, setting.side, 3), dtype=torch.uint8)
    Image.fromarray(noise.numpy()).save(picture)
    policy: Any = components.load_policy(
        str(folder),
        size=(setting.side, setting.side),
        rollout=SamplerConfig(temperature=1.0, top_p=1.0, top_k=0),
        options={"max_tokens": setting.length, "instruction": "{query}"},
        device="cpu",
    )
    policy.model.bias[end] = -torch.inf
    records = [PromptRecord(id=str(n), prompt="red", source_images=(picture,)) for n in range(setting.prompts)]
    return _fit(policy, records, setting)


def _fit(policy: Any, records: list[PromptRecord], setting: Setting) -> Iterator[Any]:
    config = GRPOConfig(
        group_size=setting.group,
        prompts_per_step=setting.prompts,
        learning_rate=1e-5,
        kl_weight=0.0,
        steps=10**6,
    )
    trainer: Any = GRPOTrainer(policy, RewardSet({"any": (unequal_scores, 1.0)}), config)
    steps: Iterator[Any] = trainer.fit(records)
    return steps


Steps = Callable[[Path, Setting], Iterator[Any]]


def growth(make: Steps, changed: Setting, rounds: int) -> float:
    """CPU time of a step with the change over one without it, the median of ``rounds`` pairs after one."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        plain, more = make(Path(one), Setting()), make(Path(other), changed)
        quotients = [_seconds(more) / _seconds(plain) for _ in range(rounds + 1)]
    return statistics.median(quotients[1:])


def _seconds(steps: Iterator[Any]) -> float:
    started = time.process_time()
    next(steps)
    return time.process_time() - started


def memory(make: Steps) -> list[float]:
    """Resident MB after every `MEMORY_EVERY` of `MEMORY_STEPS` steps."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        steps = make(Path(folder), Setting(prompts=2, group=2, length=3))
        for number in range(1, MEMORY_STEPS + 1):
            next(steps)
            if number % MEMORY_EVERY == 0:
                found.append(_resident())
    return found


def _resident() -> float:
    """Megabytes of this process that are in memory; Linux only."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 1e6


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    quiet_libraries.silence_libraries()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    sides: list[tuple[str, Steps, dict[str, Setting]]] = [
        ("flow policy", flow_steps, FLOW),
        ("token policy", token_steps, TOKENS),
    ]
    with quiet_libraries.hidden_progress_bars():
        for name, make, changes in sides:
            found[name] = {what: growth(make, changed, arguments.rounds) for what, changed in changes.items()}
            print(f"{name}, twice the", ", ".join(f"{what}: {x:.2f}" for what, x in found[name].items()), flush=True)
            found[f"{name}, MB"] = memory(make)
            print(
                f"{name}, MB after each {MEMORY_EVERY} steps:", *(f"{x:.0f}" for x in found[f"{name}, MB"]), flush=True
            )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
