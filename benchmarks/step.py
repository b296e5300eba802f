"""CPU seconds of a training step's phases, beside a floor that does only what cannot be left out.

Floor: one batched cached ``generate`` of the same tokens with the adapter merged, the pipeline's own
call to decode them in one batch, and for every update one forward and backward of whole prompt +
token sequences. Step and floor run in turn in one process; medians of process CPU time are printed.

    python benchmarks/step.py                       # the starter's model, conf/base
    python benchmarks/step.py --model PATH --rounds 9
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.table import Table

from visual_grpo.components import load_policy
from visual_grpo.config import GRPOConfig, SamplerConfig
from visual_grpo.grpo.losses import clipped_surrogate, importance_ratio, k3_kl
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.policies import lora
from visual_grpo.policies.glm_image_ar import GlmImageArPolicy
from visual_grpo.types import PromptRecord, Rollout, Scores

CONF = Path(__file__).parents[1] / "conf" / "base" / "parameters.yml"
PROMPTS = [
    f"a {size} {color} {shape}"
    for size in ("small", "large")
    for color in ("red", "blue")
    for shape in ("circle", "square")
]


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    tree = yaml.safe_load(CONF.read_text())
    config = GRPOConfig(**(tree["grpo"] | {"steps": 10**6}))
    sampler = SamplerConfig(**tree["sampling"]["rollout"])
    size = tree["data"]["height"], tree["data"]["width"]
    policy = load_policy(arguments.model, size=size, rollout=sampler, kl_reference=config.kl_weight > 0, device="cpu")
    records = [PromptRecord(id=text, prompt=text) for text in PROMPTS[: config.prompts_per_step]]
    ours, floor = _measure(policy, config, records, arguments.rounds)
    _print(ours, floor, config)


def _measure(
    policy: GlmImageArPolicy, config: GRPOConfig, records: list[PromptRecord], rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median CPU seconds by phase of the project's step and of the floor."""
    trainer = GRPOTrainer(policy, _brightness, config)
    steps = trainer.fit(records)
    step_seconds: list[dict[str, float]] = []
    floor_seconds: list[dict[str, float]] = []
    for number in range(rounds + 1):
        step = _step_phases(policy, trainer, steps)
        floor = _floor_phases(policy, config, records)
        if number:  # The first round warms up.
            step_seconds.append(step)
            floor_seconds.append(floor)
    return _medians(step_seconds), _medians(floor_seconds)


def _step_phases(policy: GlmImageArPolicy, trainer: GRPOTrainer, steps: object) -> dict[str, float]:
    """One real training step, its phases split where the policy and the trainer split them."""
    seconds: dict[str, float] = {}
    originals = policy.sample_tokens, policy.reference_log_probs, policy.decode, trainer._update
    policy.sample_tokens = _timed(originals[0], "tokens", seconds)  # type: ignore[method-assign]
    policy.reference_log_probs = _timed(originals[1], "reference", seconds)  # type: ignore[method-assign]
    policy.decode = _timed(originals[2], "decode", seconds)  # type: ignore[method-assign]
    trainer._update = _timed(originals[3], "update", seconds)  # type: ignore[method-assign]
    started = time.process_time()
    next(steps)  # type: ignore[call-overload]
    total = time.process_time() - started
    policy.sample_tokens, policy.reference_log_probs, policy.decode, trainer._update = originals  # type: ignore[method-assign]
    seconds["everything else"] = total - sum(seconds.values())
    return seconds


def _floor_phases(policy: GlmImageArPolicy, config: GRPOConfig, records: list[PromptRecord]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    rows = [record for record in records for _ in range(config.group_size)]
    _timed(_generate, "tokens", seconds)(policy, rows)
    rollout = policy.rollout(records, config.group_size, torch.Generator().manual_seed(0))
    _timed(_decode_in_one_batch, "decode", seconds)(policy, rollout)
    with torch.no_grad(), policy.model.disable_adapter():
        reference = _timed(_whole_log_probs, "reference", seconds)(policy, rollout)
    for _ in range(config.updates_per_rollout):
        _timed(_forward_backward, "update", seconds)(policy, rollout, reference)
    return seconds


@torch.no_grad()
def _generate(policy: GlmImageArPolicy, rows: list[PromptRecord]) -> None:
    inputs = policy.tokens.processed([record.prompt for record in rows])
    count = policy.tokens.grid.count
    policy.model.eval()
    with lora.merged(policy.model):
        policy.tokens.model.generate(
            **inputs,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
        )


def _decode_in_one_batch(policy: GlmImageArPolicy, rollout: Rollout) -> None:
    rows, columns = policy.tokens.grid.image
    tokens = rollout.trajectory.tokens[:, policy.tokens.grid.preview_count :].view(-1, rows, columns)
    policy.pipeline(
        prompt=[record.prompt for record in rollout.prompts],
        prior_token_ids=tokens.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1),
        height=policy.size[0],
        width=policy.size[1],
        num_inference_steps=policy.rollout_sampler.steps,
        guidance_scale=policy.rollout_sampler.guidance_scale,
        output_type="np",
    )


def _whole_log_probs(policy: GlmImageArPolicy, rollout: Rollout) -> torch.Tensor:
    trajectory = rollout.trajectory
    hidden = policy.tokens._hidden_whole(trajectory.encoded, trajectory.prompt_of_row, trajectory.tokens)
    return (hidden @ policy.tokens.head.t()).log_softmax(-1).gather(2, trajectory.tokens[..., None])[..., 0]


def _forward_backward(policy: GlmImageArPolicy, rollout: Rollout, reference: torch.Tensor) -> None:
    log_probs = _whole_log_probs(policy, rollout)
    advantages = torch.linspace(-1, 1, len(log_probs))
    ratio = importance_ratio(log_probs, rollout.log_probs)
    loss = clipped_surrogate(ratio, advantages, 0.2, 0.2).mean() + 0.01 * k3_kl(log_probs, reference).mean()
    loss.backward()
    policy.model.zero_grad(set_to_none=True)


def _brightness(prompts: Sequence[PromptRecord], samples: Sequence[torch.Tensor]) -> Scores:
    total = torch.stack([sample.float().mean() for sample in samples]) / 255
    return Scores(total=total, rewards={"brightness": total}, parts={}, weights={"brightness": 1.0})


def _timed(function: Callable, name: str, seconds: dict[str, float]) -> Callable:
    def run(*arguments: object) -> object:
        started = time.process_time()
        try:
            return function(*arguments)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - started

    return run


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


def _print(ours: dict[str, float], floor: dict[str, float], config: GRPOConfig) -> None:
    shape = f"{config.prompts_per_step} prompts x {config.group_size}, {config.updates_per_rollout} updates"
    table = Table(title=f"CPU seconds per step: {shape}")
    for column in ("phase", "step", "floor", "step / floor"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for name, seconds in ours.items():
        against = floor.get(name)
        ratio = f"{seconds / against:.2f}" if against else ""
        table.add_row(name, f"{seconds:.3f}", f"{against:.3f}" if against else "", ratio)
    total, bound = sum(ours.values()), sum(floor.values())
    table.add_row("all", f"{total:.3f}", f"{bound:.3f}", f"{total / bound:.2f}", style="bold")
    Console(width=100).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="data/06_models/base", help="folder or hub id of a GlmImagePipeline")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
