"""A GRPO step of this project's flow policy and one of flow_grpo's: CPU seconds, in turns, on one small
Stable Diffusion 3.

flow_grpo is asked as its scripts/train_sd3.py asks it: its own `pipeline_with_logprob` draws the images, every prompt
encoded once for each of its images; then, for each trained denoising step, the transformer runs on the conditional and
the unconditional half of all rows, its own `sde_step_with_logprob` scores the step that was taken, and the clipped loss
is back-propagated; one AdamW update at the end. Both get the same weights, LoRA, prompts, group size, denoising steps,
guidance and trained steps, in float32 on one thread, all rows in one batch; rewards cost nothing. Before anything is
timed, the log-probs of the same transitions and their gradient for the LoRA are held against each other.

It needs a checkout of flow_grpo (github.com/yifan123/flow_grpo), whose two files need nothing but diffusers:

    python benchmarks/against_flow_grpo.py CHECKOUT --rounds 9 --json bench/against_flow_grpo.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visual_grpo.common import quiet_libraries
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import FlowConfig, GRPOConfig, LoraParams, PolicyConfig, SamplerConfig
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.models.flow.transitions import log_prob
from visual_grpo.operations.plan.dry_run import unequal_scores
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training import components

SIDE, STEPS, GUIDANCE = 64, 10, 4.5
PROMPTS, GROUP = 4, 8
sys.path.append(str(Path(__file__).parents[1]))  # For the examples.

RANK, ALPHA = 32, 64
CLIP, LEARNING_RATE = 1e-4, 3e-4
TRAINED = {"all steps but the last": 1.0, "2 steps of 9": 2 / 9}
"""What of the stochastic steps is trained -> share."""
TARGETS = r".*transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
TEXTS = ("a red circle", "a small blue square", "a large green triangle", "a yellow circle at the top")


def save_model(folder: Path) -> None:
    """Random weights everywhere: what the starter's model starts with as 0 would leave nothing to train."""
    from examples.flow_models.models import build_sd3
    from visual_grpo.starter.glm_image.modules import build_vae

    pipeline = build_sd3(build_vae(SIDE, SIDE, 0), SIDE, 0)
    pipeline.vae.register_to_config(shift_factor=0.0)  # flow_grpo adds it.
    generator = torch.Generator().manual_seed(0)
    for module in pipeline.transformer.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.1, generator=generator)
    pipeline.save_pretrained(folder)


class Ours:
    def __init__(self, folder: Path, share: float) -> None:
        self.policy: Any = components.load_policy(
            str(folder),
            size=(SIDE, SIDE),
            policy=PolicyConfig(
                share_start_noise=False,  # As flow_grpo draws: each image from its own noise.
                lora=LoraParams(rank=RANK, alpha=ALPHA, target_modules=TARGETS),
                flow=FlowConfig(window_steps=None, train_share=share),
            ),
            rollout=SamplerConfig(steps=STEPS, guidance_scale=GUIDANCE),
            device="cpu",
        )
        for parameter in self.policy.adapter.parameters():
            nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(parameter.numel()))
        config = GRPOConfig(
            group_size=GROUP, prompts_per_step=PROMPTS, learning_rate=LEARNING_RATE, kl_weight=0.0, steps=10**6
        )
        self.records = [PromptRecord(id=str(number), prompt=text) for number, text in enumerate(TEXTS)]
        trainer: Any = GRPOTrainer(self.policy, RewardSet({"any": (unequal_scores, 1.0)}), config)
        self._steps = trainer.fit(self.records)

    def step(self) -> None:
        next(self._steps)


class Theirs:
    def __init__(self, folder: Path, share: float, adapter: dict[str, Tensor]) -> None:
        from diffusers import StableDiffusion3Pipeline
        from peft import LoraConfig, get_peft_model

        patch = "flow_grpo.diffusers_patch.sd3_"
        self._draw: Any = importlib.import_module(f"{patch}pipeline_with_logprob").pipeline_with_logprob
        self.transition: Callable[..., Any] = importlib.import_module(f"{patch}sde_with_logprob").sde_step_with_logprob
        self.pipeline: Any = StableDiffusion3Pipeline.from_pretrained(
            folder, text_encoder_3=None, tokenizer_3=None, use_safetensors=True
        )
        self.pipeline.set_progress_bar_config(disable=True)
        for part in (self.pipeline.vae, self.pipeline.text_encoder, self.pipeline.text_encoder_2):
            part.requires_grad_(False)
        lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS)
        self.network = get_peft_model(self.pipeline.transformer.requires_grad_(False), lora)
        self.pipeline.transformer = self.network
        own = {_plain(name): p for name, p in self.network.named_parameters() if p.requires_grad}
        assert own.keys() == {_plain(name) for name in adapter}
        with torch.no_grad():
            for name, value in adapter.items():
                own[_plain(name)].copy_(value)
        self._parameters = list(own.values())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=LEARNING_RATE)
        self._trained = range(round((STEPS - 1) * share))

    def encoded(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """(embeddings, pooled), the unconditional half first."""
        with torch.no_grad():
            found = self.pipeline.encode_prompt(texts, None, None, do_classifier_free_guidance=True)
        embeds, negative, pooled, negative_pooled = found
        return torch.cat([negative, embeds]), torch.cat([negative_pooled, pooled])

    def draw(self, texts: list[str]) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Latents [B, steps + 1, C, h, w], log-probs [B, steps], and the conditions."""
        conditions = self.encoded(texts)
        (negative, embeds), (negative_pooled, pooled) = (part.chunk(2) for part in conditions)
        self.network.eval()
        _, latents, log_probs = self._draw(
            self.pipeline,
            prompt_embeds=embeds,
            pooled_prompt_embeds=pooled,
            negative_prompt_embeds=negative,
            negative_pooled_prompt_embeds=negative_pooled,
            num_inference_steps=STEPS,
            guidance_scale=GUIDANCE,
            output_type="pt",
            height=SIDE,
            width=SIDE,
        )
        return torch.stack(latents, 1), torch.stack(log_probs, 1), conditions

    def log_probs(self, before: Tensor, after: Tensor, step: int, conditions: tuple[Tensor, Tensor]) -> Tensor:
        """[B] of the step that was taken, with gradient: both halves in one forward."""
        times = self.pipeline.scheduler.timesteps[step].expand(len(before))
        velocity = self.network(
            hidden_states=torch.cat([before, before]),
            timestep=torch.cat([times, times]),
            encoder_hidden_states=conditions[0],
            pooled_projections=conditions[1],
            return_dict=False,
        )[0]
        unconditional, conditional = velocity.chunk(2)
        unconditional = unconditional.detach()
        guided = unconditional + GUIDANCE * (conditional - unconditional)
        _, found, _, _ = self.transition(
            self.pipeline.scheduler, guided.float(), times, before.float(), prev_sample=after.float()
        )
        return found

    def step(self) -> None:
        texts = [text for text in TEXTS for _ in range(GROUP)]
        latents, old, conditions = self.draw(texts)
        rewards = (torch.arange(len(texts), dtype=torch.float32) % 7).view(PROMPTS, GROUP)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std() + 1e-4)).flatten()
        self.network.train()
        for number in self._trained:
            ratio = (
                self.log_probs(latents[:, number], latents[:, number + 1], number, conditions) - old[:, number]
            ).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = torch.maximum(-advantages * ratio, -advantages * clipped).mean()
            (loss / len(self._trained)).backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _plain(name: str) -> str:
    """A LoRA parameter's name without what the libraries put around it."""
    return name.removeprefix("base_model.model.").replace(".default", "")


def distances(ours: Ours, theirs: Theirs) -> tuple[float, float]:
    """Largest difference of log-probs, and of gradients in units of the largest one, of the same transitions."""
    policy = ours.policy
    texts = [record.prompt for record in ours.records]
    latents, _, conditions = theirs.draw(texts)
    own = policy.model.conditions(ours.records, range(len(texts)), GUIDANCE)
    schedule, entries = policy.model.schedule(STEPS), torch.arange(len(texts))
    weights, worst, gradients = torch.tensor([1.0, -2.0, 0.5, 3.0]), 0.0, []
    for step in (0, 4, STEPS - 2):
        before, after = latents[:, step], latents[:, step + 1]
        mean, std = policy.denoiser.step(before, own, entries, schedule, step)
        # Ours is a sum over the elements divided by their root, flow_grpo's a mean.
        mine = log_prob(after, mean, std) / math.sqrt(before[0].numel())
        found = theirs.log_probs(before, after, step, conditions)
        worst = max(worst, float((mine - found).abs().max()))
        (mine * weights).sum().backward()
        (found * weights).sum().backward()
    mine_of = {_plain(name): p for name, p in policy.model.transformer.named_parameters() if p.requires_grad}
    theirs_of = {_plain(name): p for name, p in theirs.network.named_parameters() if p.requires_grad}
    largest = max(float(p.grad.abs().max()) for p in mine_of.values())
    gradients = [float((p.grad - theirs_of[name].grad).abs().max()) for name, p in mine_of.items()]
    for parameter in (*mine_of.values(), *theirs_of.values()):
        parameter.grad = None
    return worst, max(gradients) / largest


def measure(share: float, rounds: int) -> dict[str, float]:
    """Medians over ``rounds`` pairs, after two that are not counted."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        ours = Ours(folder, share)
        theirs = Theirs(folder, share, ours.policy.adapter.state())
        log_probs, gradient = distances(ours, theirs)
        found: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(rounds + 2):
            for side, loop in (("ours", ours), ("theirs", theirs)):
                started = time.process_time()
                loop.step()
                found[side].append(time.process_time() - started)
    mine, other = found["ours"][2:], found["theirs"][2:]
    return {
        "trained_share": share,
        "rounds": rounds,
        "ours_seconds": statistics.median(mine),
        "flow_grpo_seconds": statistics.median(other),
        "ours_over_flow_grpo": statistics.median(a / b for a, b in zip(mine, other, strict=True)),
        "log_probs_differ_by": log_probs,
        "gradients_differ_by": gradient,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("checkout", type=Path, help="folder of flow_grpo's repository")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    if not (arguments.checkout / "flow_grpo" / "diffusers_patch").is_dir():
        parser.error(f"{arguments.checkout} has no flow_grpo/diffusers_patch; expected a checkout of flow_grpo")
    sys.path.insert(0, str(arguments.checkout))
    quiet_libraries.silence_libraries()
    torch.set_num_threads(1)
    words = ["git", "-C", str(arguments.checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or None
    rows = []
    with quiet_libraries.hidden_progress_bars():
        for what, share in TRAINED.items():
            row = measure(share, arguments.rounds)
            rows.append({"trained": what, "commit": commit, **row})
            print(
                f"{what}: ours {row['ours_seconds']:.2f} s, flow_grpo {row['flow_grpo_seconds']:.2f} s, ours"
                f" {row['ours_over_flow_grpo']:.2f} of it; log-probs differ by {row['log_probs_differ_by']:.1e},"
                f" gradients by {row['gradients_differ_by']:.1e}",
                flush=True,
            )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
