"""A GRPO step of this project and one of TRL's GRPOTrainer, on one small Qwen2.5-VL: CPU seconds, in turns.

Both get the same weights, LoRA, prompts with one picture each, group size, longest answer, reward and learning rate, in
float32 on one thread; no row ends early, so that both generate as many tokens. Before anything is timed, the log-probs
of the same tokens and their gradient for the LoRA are held against each other. Then a step of each, in turns, in one
process; what is printed are medians of process CPU seconds, and of the quotient within each pair. Completions a CPU
second are `prompts * group / seconds`.

TRL is not among the project's packages: `make bench` installs it beside them in .venv-bench.

    .venv-bench/bin/python benchmarks/against_trl.py --rounds 25 --json bench/against_trl.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
sys.path.append(str(Path(__file__).parents[1]))  # For the examples.

import torch
from PIL import Image
from torch import Tensor

from examples.scenes.small_qwen2_5_vl import build_model, build_processor
from visual_grpo.common import quiet_libraries
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import GRPOConfig, LoraParams, PolicyConfig, SamplerConfig
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training import components

SIDE = 64
"""Pixels; 16 tokens a picture."""
WORDS = ("the", "red", "round", "thing", "on", "the", "left")
LEARNING_RATE, RANK, ALPHA = 1e-4, 8, 16
SHAPES = ("8x8x32", "4x8x64", "8x8x16", "4x16x32")
"""Prompts x group x tokens."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    prompts: int
    group: int
    tokens: int

    @classmethod
    def of(cls, text: str) -> Shape:
        prompts, group, tokens = map(int, text.split("x"))
        return cls(prompts=prompts, group=group, tokens=tokens)


class Setup:
    """One saved model, and prompts with pictures, for both."""

    def __init__(self, folder: Path, shape: Shape, kl: float) -> None:
        self.shape, self.kl, self.folder = shape, kl, folder / "model"
        self.processor = build_processor(SIDE, SIDE)
        model = build_model(self.processor, seed=0)
        # An id that no text has, and that is never drawn: every answer has its greatest length.
        self.end = model.generation_config.eos_token_id = len(self.processor.tokenizer) - 1
        model.save_pretrained(self.folder)
        self.processor.save_pretrained(self.folder)
        self.pictures = [self._picture(folder, number) for number in range(shape.prompts)]
        self.texts = [" ".join(WORDS[: 3 + number % 5]) for number in range(shape.prompts)]

    def _picture(self, folder: Path, number: int) -> Path:
        file = folder / f"{number}.png"
        pixels = torch.randint(0, 256, (SIDE, SIDE, 3), generator=torch.Generator().manual_seed(number))
        Image.fromarray(pixels.to(torch.uint8).numpy()).save(file)
        return file

    def records(self) -> list[PromptRecord]:
        return [
            PromptRecord(id=str(number), prompt=text, source_images=(picture,))
            for number, (text, picture) in enumerate(zip(self.texts, self.pictures, strict=True))
        ]


class Ours:
    def __init__(self, setup: Setup) -> None:
        shape = setup.shape
        policy: Any = components.load_policy(
            str(setup.folder),
            size=(SIDE, SIDE),
            policy=PolicyConfig(rollout_batch=10**6, lora=LoraParams(rank=RANK, alpha=ALPHA)),
            rollout=SamplerConfig(temperature=1.0, top_p=1.0, top_k=0),
            kl_reference=setup.kl > 0,
            options={"max_tokens": shape.tokens, "instruction": "{query}"},
            device="cpu",
        )
        policy.model.bias[setup.end] = -torch.inf
        self.suppressed = policy.model.bias.isinf().nonzero()[:, 0].tolist()
        self.policy = policy
        config = GRPOConfig(
            group_size=shape.group,
            prompts_per_step=shape.prompts,
            learning_rate=LEARNING_RATE,
            kl_weight=setup.kl,
            steps=10**6,
        )
        self.trainer: GRPOTrainer[Any] = GRPOTrainer(policy, RewardSet({"length": (_score, 1.0)}), config)
        self.records = setup.records()
        self._steps = self.trainer.fit(self.records)

    def step(self) -> None:
        next(self._steps)


class Trls:
    def __init__(self, setup: Setup, folder: Path, ours: Ours) -> None:
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import Qwen2_5_VLForConditionalGeneration
        from trl import GRPOConfig as Arguments
        from trl import GRPOTrainer as Trainer

        from visual_grpo.models.families.qwen2_5_vl import FAMILY

        shape = setup.shape
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            setup.folder, dtype=torch.float32, use_safetensors=True
        )
        arguments = Arguments(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=shape.prompts * shape.group,
            num_generations=shape.group,
            max_completion_length=shape.tokens,
            max_steps=10**6,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            beta=setup.kl,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            loss_type="grpo",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            generation_kwargs={"suppress_tokens": ours.suppressed},
            seed=0,
        )
        rows = [
            {
                "prompt": [{"role": "user", "content": text}],
                "images": [Image.open(picture)],
            }
            for text, picture in zip(setup.texts, setup.pictures, strict=True)
        ]
        [module] = FAMILY.modules.values()
        lora = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=module.targets)
        self.trainer: Any = Trainer(
            model=model,
            reward_funcs=_trl_score,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=setup.processor,
            peft_config=lora,
        )
        self.network = self.trainer.model
        own = dict(self.network.named_parameters())
        with torch.no_grad():
            for name, value in ours.policy.adapter.state().items():
                own[name.replace(".weight", ".default.weight")].copy_(value)


def _score(prompts: Sequence[PromptRecord], samples: Sequence[Any]) -> Tensor:
    return torch.tensor([float(sum(map(ord, sample.text)) % 7) for sample in samples])


def _trl_score(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(map(ord, completion[0]["content"])) % 7) for completion in completions]


def distances(ours: Ours, trls: Trls, setup: Setup) -> tuple[float, float]:
    """Largest absolute difference of log-probs, and of gradients in units of the largest one, for the same tokens."""
    policy, shape = ours.policy, setup.shape
    rollout = policy.rollout(ours.records, shape.group, torch.Generator().manual_seed(0))
    tokens, weights = rollout.trajectory.tokens, torch.randn(len(rollout.samples), shape.tokens)
    bias, policy.model.bias = policy.model.bias, None  # TRL scores as if it suppressed nothing.
    [chunk] = policy.replay(rollout.trajectory, torch.arange(len(tokens)))
    (chunk.log_probs * weights).sum().backward()
    mine = {name: p.grad.clone() for name, p in policy.adapter.model.named_parameters() if p.requires_grad}
    inputs = policy.model.processed(list(rollout.prompts))
    ids = torch.cat([inputs["input_ids"], tokens], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(tokens)], 1)
    types = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(tokens)], 1)
    trls.network.train()
    found = trls.trainer._get_per_token_logps_and_entropies(
        trls.network,
        ids,
        mask,
        shape.tokens,
        pixel_values=inputs["pixel_values"],
        image_grid_thw=inputs["image_grid_thw"],
        num_images=[1] * len(ids),
        mm_token_type_ids=types,
    )[0]
    (found * weights).sum().backward()
    theirs = {name: p.grad.clone() for name, p in trls.network.named_parameters() if p.requires_grad}
    largest = max(float(value.abs().max()) for value in mine.values())
    gradient = max(float((mine[name] - theirs[name]).abs().max()) for name in mine) / largest
    policy.model.bias = bias
    for parameter in (*policy.adapter.parameters(), *trls.network.parameters()):
        parameter.grad = None
    return float((chunk.log_probs - found).abs().max()), gradient


def measure(shape: Shape, kl: float, rounds: int) -> dict[str, Any]:
    """Medians over ``rounds`` pairs, after two that are not counted."""
    from transformers import TrainerCallback

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setup = Setup(folder, shape, kl)
        ours = Ours(setup)
        trls = Trls(setup, folder, ours)
        log_probs, gradient = distances(ours, trls, setup)
        ours = Ours(setup)
        found: dict[str, list[float]] = {"ours": [], "trl": []}

        class Turns(TrainerCallback):
            """A step of ours after each of TRL's; TRL's clock does not run meanwhile."""

            started = time.process_time()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                found["trl"].append(time.process_time() - self.started)
                before = time.process_time()
                ours.step()
                found["ours"].append(time.process_time() - before)
                control.should_training_stop = len(found["ours"]) == rounds + 2
                self.started = time.process_time()

        trls.trainer.add_callback(Turns())
        trls.trainer.train()
    mine, theirs = found["ours"][2:], found["trl"][2:]
    completions = shape.prompts * shape.group
    return {
        **asdict(shape),
        "kl_weight": kl,
        "rounds": rounds,
        "ours_seconds": statistics.median(mine),
        "trl_seconds": statistics.median(theirs),
        "trl_over_ours": statistics.median(b / a for a, b in zip(mine, theirs, strict=True)),
        "ours_completions_a_second": completions / statistics.median(mine),
        "trl_completions_a_second": completions / statistics.median(theirs),
        "log_probs_differ_by": log_probs,
        "gradients_differ_by": gradient,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="prompts x group x tokens, such as 8x8x32")
    parser.add_argument("--kl", type=float, nargs="*", default=[0.0, 0.01], help="weights of the KL penalty")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    quiet_libraries.silence_libraries()
    torch.set_num_threads(1)
    rows = []
    with quiet_libraries.hidden_progress_bars():
        for text in arguments.shapes:
            for kl in arguments.kl:
                row = measure(Shape.of(text), kl, arguments.rounds)
                rows.append(row)
                print(
                    f"{text}, KL {kl}: ours {row['ours_seconds']:.3f} s, TRL {row['trl_seconds']:.3f} s,"
                    f" {row['trl_over_ours']:.2f} times as long; log-probs differ by {row['log_probs_differ_by']:.1e},"
                    f" gradients by {row['gradients_differ_by']:.1e}",
                    flush=True,
                )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
