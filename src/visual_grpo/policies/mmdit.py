"""What families whose transformer has a stream for the image and one for the text (MMDiT, arXiv 2403.03206) share."""

from __future__ import annotations

from visual_grpo.policies.family import Module
from visual_grpo.policies.lora import PipelineAdapter

_ATTENTION = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
_ADVICE = (
    "a reward that sees what the early steps decide (layout, objects, text); policy.flow.noise between .4 and 1;"
    " policy.flow.window_start=0; policy.share_start_noise=true; more grpo.prompts_per_step"
)


def modules(*feed_forwards: str) -> dict[str, Module]:
    """One module, with a LoRA on the matrices of both streams.

    ``feed_forwards``: what a block calls its feed-forward networks, such as ``ff`` and ``ff_context``.
    """
    targets = [*_ATTENTION, *(f"{name}.net.{layer}" for name in feed_forwards for layer in ("0.proj", "2"))]
    return {"dit": Module(kind="flow", adapter=PipelineAdapter, targets=targets, advice=_ADVICE)}
