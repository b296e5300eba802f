"""What to change where a plan does not fit its card: parameters with values."""

from __future__ import annotations

from collections.abc import Sequence

from visual_grpo.config import Parameters
from visual_grpo.config.plan import PlanConfig
from visual_grpo.plan.cards import CARDS, Card
from visual_grpo.plan.largest import LargestBatch

_SAVED_BY_8_BITS = 6
"""Bytes a trained parameter: two moments of one byte each instead of four."""


def changes(
    config: Parameters,
    card: Card,
    weights: int,
    peak: int,
    batches: Sequence[LargestBatch],
    *,
    networks: int = 1,
    step: int | None = None,
    trained: int = 0,
) -> list[str]:
    """Each as a line; none where ``peak`` bytes fit.

    Args:
        weights: bytes that the model takes by itself.
        networks: of how many it is made.
        step: the part of ``peak`` that a step needs; None = all. More is the evaluation's.
        trained: parameters.
    """
    if peak <= card.usable:
        return []
    size = config.evaluation.batch_size
    if step is not None and step <= card.usable and size > 1:
        return [f"evaluation.batch_size={size // 2} (set: {size}; a step fits, the evaluation does not. Plan again)"]
    others = [
        *_other_changes(config, card, weights, peak, batches),
        *_small_changes(config, peak - card.usable, trained),
    ]
    if networks > 1 and config.model.offload == "none" and not config.distributed.sharded:
        return ["model.offload=phases (one network on the card at a time; plan again with it)", *others]
    return others


def _small_changes(config: Parameters, missing: int, trained: int) -> list[str]:
    lines = []
    if config.grpo.optimizer == "adamw" and missing <= _SAVED_BY_8_BITS * trained:
        saved = _SAVED_BY_8_BITS * trained / 1e9
        lines.append(f"grpo.optimizer=adamw_8bit (saves {saved:.2f} GB; see `make quantised`)")
    words = config.plan.prompt_words
    if words > PlanConfig().prompt_words:
        lines.append(f"shorter prompts (plan.prompt_words is {words}; plan again with fewer)")
    return lines


def _other_changes(
    config: Parameters, card: Card, weights: int, peak: int, batches: Sequence[LargestBatch]
) -> list[str]:
    if weights > card.usable:
        alone = _another_card(peak, f"The model alone takes {weights / 1e9:.1f} GB")
        return [*_fewer_bits(config), alone, *_smaller_model(config), *_in_parts(config)]
    lines = [
        f"{batch.parameter}={batch.largest} (set: {batch.value})"
        for batch in batches
        if 0 < batch.largest < batch.value
    ]
    if not config.plan.largest_batches:
        lines.append("plan.largest_batches=true (says which batches would fit)")
    hopeless = [batch.parameter for batch in batches if not batch.largest]
    # Without a search for batches nothing is known of them.
    if (hopeless or not batches) and not config.policy.gradient_checkpointing:
        lines.append("policy.gradient_checkpointing=true")
    if hopeless or not batches or not lines:
        half = [32 * max(side // 64, 1) for side in (config.data.height, config.data.width)]
        lines.append(f"data.height={half[0]},data.width={half[1]}")
        lines += [*_fewer_bits(config), *_smaller_model(config)]
        lines.append(_another_card(peak, f"Not even 1 fits of {', '.join(hopeless)}" if hopeless else "Or"))
    return lines


def _in_parts(config: Parameters) -> list[str]:
    count = max(2, config.distributed.processes)
    in_the_way = (
        config.distributed.sharded,
        config.model.offload != "none",
        config.model.base_weights != "full",
        config.policy.kv_cache == "static",
        config.grpo.prompts_per_step < count,
    )
    if any(in_the_way):
        return []
    return [
        f"distributed.sharded=true,distributed.processes={count} (each of {count} cards keeps a part; without turns and"
        " fewer bits; plan again)"
    ]


def _fewer_bits(config: Parameters) -> list[str]:
    fewer = {"full": "8bit", "8bit": "4bit"}.get(config.model.base_weights)
    return (
        []
        if fewer is None or config.distributed.sharded
        else [f"model.base_weights={fewer} (another base model; plan again with it)"]
    )


def _smaller_model(config: Parameters) -> list[str]:
    if config.model.family == "sd3" and config.model.options.get("max_sequence_length") != 0:
        return ["model.options.max_sequence_length=0 (without T5)"]
    if config.model.path == "Qwen/Qwen2.5-VL-7B-Instruct":
        return ["model.path=Qwen/Qwen2.5-VL-3B-Instruct"]
    return []


def _another_card(peak: int, why: str) -> str:
    large = sorted((card for card in CARDS.values() if card.usable >= peak), key=lambda card: card.memory)
    return f"{why}: plan.gpu={large[0].name}" if large else f"{why}: no card here holds {peak / 1e9:.0f} GB"
