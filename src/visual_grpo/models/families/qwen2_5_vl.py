"""The language models of Qwen2.5-VL and Qwen3-VL: what they read of an image and a query, and the answers they write.

Shapes: N distinct records, B rows, P prompt tokens (left-padded, the image's included), T answer tokens, H hidden
width, V vocabulary. A row's answer ends with its first end token, which counts; what follows does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field, field_validator
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from visual_grpo.common.device import resolve_device
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import read_image
from visual_grpo.common.quiet_libraries import hidden_progress_bars
from visual_grpo.common.types import PromptRecord, TextSample
from visual_grpo.config import ModelConfig, SamplerConfig, Strict
from visual_grpo.models.family import Family
from visual_grpo.models.loading import check_tokenizer, downloaded, loading, place
from visual_grpo.models.lora import PeftAdapter
from visual_grpo.models.model import Model
from visual_grpo.models.module import ModelSettings, Module
from visual_grpo.models.quantized import check_base_weights, quantize
from visual_grpo.models.tokens.generation import is_end
from visual_grpo.models.tokens.interface import TokenTrajectory
from visual_grpo.models.tokens.probabilities import TokenSampler
from visual_grpo.models.tokens.prompt_cache import Prompts
from visual_grpo.models.without_weights import load_network

if TYPE_CHECKING:
    from transformers import BatchFeature

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


class Options(Strict):
    """Prompt and answer length."""

    instruction: str = Field("{query}", description="what the model reads with the image; {query} is the record's")
    max_tokens: int = Field(32, ge=1, description="tokens of an answer, its end included, before it is cut off")

    @field_validator("instruction")
    @classmethod
    def _names_the_query(cls, instruction: str) -> str:
        if "{query}" not in instruction:
            raise ValueError("it must contain {query}, where the record's query is put")
        return instruction


@dataclass(frozen=True, kw_only=True)
class EncodedQueries(Prompts):
    """N distinct records as the language model reads them."""

    frames: list[tuple[int, int]]
    """Height and width that coordinates in the answers count to: pixels as the processor gave them to the model, or
    Qwen3-VL's 1001 places of each side."""


class AnswerModel:
    """A ``TokenModel[EncodedQueries]``; an adapter injected into ``network`` takes part."""

    def __init__(self, network: Any, processor: Any, options: Options) -> None:
        self.network, self.processor, self.options = network, processor, options
        self.ends: Sequence[int] = _end_ids(network)
        self.bias: Tensor | None = self._bias()

    @property
    def head(self) -> Tensor:
        """[V, H]."""
        weight: Tensor = self.network.lm_head.weight
        return weight

    def processed(self, records: Sequence[PromptRecord]) -> BatchFeature:
        """All that the model's forward takes, on the CPU: left-padded ids, mask, token types, pixels and grids."""
        texts = [self.processor.apply_chat_template(self._messages(record), **_AS_TEXT) for record in records]
        images = [read_image(_image_of(record)) for record in records]
        return self.processor(text=texts, images=images, return_tensors="pt", padding=True, padding_side="left")

    @torch.no_grad()
    def encode(self, records: Sequence[PromptRecord]) -> EncodedQueries:
        """Images and queries as embeddings; the vision tower is frozen, so they serve sampling and every replay."""
        inputs = self.processed(records)
        model = self.network.model
        positions, token_positions = self._positions(inputs)
        frames = self._frames(inputs)
        inputs = inputs.to(self.network.device)
        ids, grid = inputs["input_ids"], inputs["image_grid_thw"]
        embeds = model.get_input_embeddings()(ids)
        features = model.get_image_features(inputs["pixel_values"], grid)
        image = (ids == self.network.config.image_token_id)[..., None].expand_as(embeds)
        embeds = embeds.masked_scatter(image, torch.cat(tuple(features.pooler_output)).to(embeds))
        added = [
            torch.zeros_like(embeds).masked_scatter(image, torch.cat(tuple(layer)).to(embeds))
            for layer in getattr(features, "deepstack_features", ())
        ]
        return EncodedQueries(
            embeds=embeds,
            mask=inputs["attention_mask"],
            positions=positions.to(ids.device),
            token_positions=token_positions.to(ids.device),
            added=torch.stack(added) if added else None,
            frames=frames,
        )

    def _frames(self, inputs: BatchFeature) -> list[tuple[int, int]]:
        if _is_qwen3(self.network):
            return [(_PLACES, _PLACES)] * len(inputs["image_grid_thw"])
        patch: int = self.network.config.vision_config.patch_size
        return [(rows * patch, columns * patch) for _, rows, columns in inputs["image_grid_thw"].tolist()]

    def _positions(self, inputs: BatchFeature) -> tuple[Tensor, Tensor]:
        """[3, N, P] of the prompts' tokens and [3, N, T] of those to come, on the host: to count them out on a GPU
        would make the host wait for each number."""
        mask = inputs["attention_mask"]
        positions, deltas = self.network.model.get_rope_index(
            inputs["input_ids"],
            mm_token_type_ids=inputs["mm_token_type_ids"],
            image_grid_thw=inputs["image_grid_thw"],
            attention_mask=mask,
        )
        after = (mask.sum(1) + deltas[:, 0])[:, None] + torch.arange(self.options.max_tokens)
        return positions, after.expand(3, *after.shape)

    def sampler(self, settings: SamplerConfig) -> TokenSampler:
        stock = self.network.generation_config
        return TokenSampler.of(settings, stock, do_sample=bool(stock.do_sample))

    def samples(
        self, records: Sequence[PromptRecord], trajectory: TokenTrajectory[EncodedQueries], seeds: Sequence[int]
    ) -> list[TextSample]:
        """[B] what the tokens say."""
        tokens = trajectory.tokens.cpu()  # All at once: each copy from a GPU makes the host wait.
        finished = is_end(self, tokens).any(1).tolist()
        samples = []
        for row, prompt in enumerate(trajectory.prompt_of_row.tolist()):
            said = tokens[row, : int(trajectory.mask[row].sum()) - finished[row]]
            text = self.processor.tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            samples.append(TextSample(text=text, finished=finished[row], frame=trajectory.prompts.frames[prompt]))
        return samples

    def _messages(self, record: PromptRecord) -> list[dict[str, object]]:
        text = self.options.instruction.replace("{query}", record.prompt)
        return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]

    def _bias(self) -> Tensor:
        """[V] float32: -inf for ids that no answer may have.

        A sampled image placeholder would ask for pixels that are not there, so none can be sampled and none counts in
        the softmax, while sampling and while scoring; nor does the padding at the end of a larger head.
        """
        tokenizer, head = self.processor.tokenizer, self.head
        known = tokenizer.get_vocab()
        banned = {known[token] for token in VISION_TOKENS if token in known} | set(tokenizer.all_special_ids)
        bias = torch.zeros(len(head), device=head.device)
        bias[sorted(banned - set(self.ends))] = -torch.inf
        bias[len(tokenizer) :] = -torch.inf
        return bias


_AS_TEXT = {"tokenize": False, "add_generation_prompt": True}
_PLACES = 1001
"""Qwen3-VL writes coordinates relative to the image, from 0 to 1000 (its report, arXiv 2511.21631): 1001 places."""


def _is_qwen3(network: Any) -> bool:
    return bool(network.config.model_type == "qwen3_vl")


def _image_of(record: PromptRecord) -> Path:
    if len(record.source_images) != 1:
        raise UserError(
            f"record {record.id!r} has {len(record.source_images)} source images; a query is about exactly one."
        )
    return record.source_images[0]


def _end_ids(model: Any) -> list[int]:
    """The ids that end an answer, the one that also fills up finished rows first."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        raise UserError("The model's generation_config names no eos_token_id: it would not know when to stop.")
    return [ends] if isinstance(ends, int) else list(ends)


MODULES = {
    "vl": Module(
        kind="tokens",
        adapter=PeftAdapter,
        targets=r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
        advice="a reward that sees what the answers say; a higher sampling.rollout.temperature; more"
        " grpo.prompts_per_step; a larger grpo.group_size",
    )
}

SAVED_AS = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
Loaded = tuple[Any, Any]
"""The model and its processor."""


def load(path: str, config: ModelConfig) -> Loaded:
    """Model and processor of a folder or hub id by plain ``from_pretrained``, frozen and in evaluation mode."""
    device = resolve_device(config.device)
    check_base_weights(config.base_weights, device)
    with loading(path):
        folder = downloaded(path, config.revision)
        with hidden_progress_bars():
            processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
            check_tokenizer(processor, folder)
            model = load_network(AutoModelForImageTextToText, folder, getattr(torch, config.dtype))
    if type(model).__name__ not in SAVED_AS:
        raise UserError(f"The model {path!r} is a {type(model).__name__}; qwen2_5_vl loads {' and '.join(SAVED_AS)}.")
    TokenSampler.warn_of_what_is_not_applied(model.generation_config, path)
    model.name_or_path = path  # A saved adapter names it as its base model.
    model.eval().requires_grad_(False)
    quantize({"model": model}, config.base_weights, device, kept=device)
    place({"model": model}, device)
    return model, processor


def build(loaded: Loaded, settings: ModelSettings) -> Model:
    return Model(AnswerModel(*loaded, settings.options), MODULES, settings)


FAMILY = Family(
    name="qwen2_5_vl",
    modules=MODULES,
    tasks=("segmentation",),
    saved_as=SAVED_AS,
    load=load,
    build=build,
    options=Options,
)
