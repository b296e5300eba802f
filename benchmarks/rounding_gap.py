"""How far are the sampler's log-probs from the replay's where only rounding separates them?

The sampler decodes token by token from a cache, the replay scores whole sequences: the same function, another order of
sums. In half precision that makes every ratio a little wrong. Measured on GLM-Image's language model with random
weights, over depth, width and the standard deviation of its logits (the output layer is scaled to it). The last column
is the mean divided by sqrt(layers) x deviation, which `models.tokens` takes as a constant.

    python benchmarks/rounding_gap.py --layers 2 10 40
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from transformers import GlmImageForConditionalGeneration

from visual_grpo.common import quiet_libraries
from visual_grpo.common.types import PromptRecord
from visual_grpo.models.families.glm_image.processor import PreviewProcessor
from visual_grpo.models.families.glm_image.source_images import SourceEncoder
from visual_grpo.models.families.glm_image.token_model import GlmImageTokens
from visual_grpo.models.tokens.generation import sample_tokens
from visual_grpo.models.tokens.probabilities import TokenSampler
from visual_grpo.models.tokens.token_policy import token_log_probs
from visual_grpo.starter.glm_image.codebook import CODEBOOK_SIZE, FEATURES, build_processor
from visual_grpo.starter.glm_image.modules import build_ar

HEAD_WIDTH = 32
SIZE = (256, 256)
PROMPTS = ("a red circle left of a blue square", "a cat", "a small yellow square at the bottom, far from the others")


def main() -> None:
    quiet_libraries.silence_libraries()
    arguments = _arguments()
    print("| dtype | layers | width | deviation of logits | mean log-ratio | largest | constant |")
    print("|---|---|---|---|---|---|---|")
    for dtype in arguments.dtypes:
        for layers in arguments.layers:
            for width in arguments.widths:
                model = tokens_of(layers, width, getattr(torch, dtype))
                for wanted in arguments.deviations:
                    scale_logits(model, wanted)
                    mean, largest, deviation = gap(model, arguments.rows)
                    constant = mean / (layers**0.5 * deviation)
                    print(
                        f"| {dtype} | {layers} | {width} | {deviation:.2f} | {mean:.4f} | {largest:.3f} |"
                        f" {constant:.5f} |",
                        flush=True,
                    )


def tokens_of(layers: int, width: int, dtype: torch.dtype) -> GlmImageTokens:
    """GLM-Image's language model of that size with random weights; its vision tower is the small one."""
    processor = build_processor()
    codebook = torch.randn(CODEBOOK_SIZE, FEATURES, generator=torch.Generator().manual_seed(0))
    config = copy.deepcopy(build_ar(processor, codebook, 0).config)
    text = config.text_config
    text.num_hidden_layers, text.hidden_size, text.intermediate_size = layers, width, 3 * width
    text.num_attention_heads, text.num_key_value_heads = width // HEAD_WIDTH, max(1, width // HEAD_WIDTH // 4)
    torch.manual_seed(0)
    network = GlmImageForConditionalGeneration(config).to(dtype).eval().requires_grad_(False)
    no_pipeline: Any = None  # Prompts alone have no source image to encode.
    sources = SourceEncoder(no_pipeline, SIZE)
    return GlmImageTokens(network, PreviewProcessor.of(processor, 4), SIZE, sources, lambda *_: [])


def scale_logits(model: GlmImageTokens, wanted: float) -> None:
    """Scales the output layer until logits have that standard deviation."""
    for _ in range(2):  # What is drawn depends on it, too.
        _, _, deviation = gap(model, rows=3)
        model.network.lm_head.weight.data.mul_(wanted / deviation)


def gap(model: GlmImageTokens, rows: int) -> tuple[float, float, float]:
    """Mean and largest |log ratio| between sampler and replay, in nats, and the deviation of the logits."""
    records = [PromptRecord(id=str(n % len(PROMPTS)), prompt=PROMPTS[n % len(PROMPTS)]) for n in range(rows)]
    records.sort(key=lambda record: record.id)
    drawn = sample_tokens(model, records, range(rows), TokenSampler(), batch=rows)
    with torch.no_grad():
        replayed = token_log_probs(model, drawn.trajectory, torch.arange(rows), 1.0)
    difference = (replayed - drawn.log_probs).abs()
    deviation = drawn.log_probs.std() if drawn.deviation is None else drawn.deviation.mean()
    return float(difference.mean()), float(difference.max()), float(deviation)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 10, 40])
    parser.add_argument("--widths", type=int, nargs="+", default=[512])
    parser.add_argument("--deviations", type=float, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16"])
    parser.add_argument("--rows", type=int, default=6, help="samples of three prompts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
