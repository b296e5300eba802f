"""Tokenizer and processor of the small GLM-Image.

As in the released model, image tokens come first in the vocabulary (``<|dit_token_i|>`` has id i), the two ids after
the codebook mark the start and end of an image, and text tokens follow. The text part is a byte-level BPE trained on
the prompts and instructions of the drawn shapes; it can encode any text.
"""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GlmImageProcessor, PreTrainedTokenizerFast
from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

from visual_grpo.config import Task
from visual_grpo.starter.glm_image.codebook import CODEBOOK_SIZE
from visual_grpo.starter.shapes.edits import instructions
from visual_grpo.starter.shapes.world import COMBINATIONS

IMAGE_START = CODEBOOK_SIZE
IMAGE_END = CODEBOOK_SIZE + 1
VISION_VOCABULARY = CODEBOOK_SIZE + 2
PAD = VISION_VOCABULARY
_SPECIAL = ("<|endoftext|>", "<|image|>", "<sop>", "<eop>")
_TEXT_VOCABULARY = 400
VISION_PATCH = 16
"""Patch side of the vision tower; the image processor first halves images, so a patch covers 32 x 32 pixels."""

_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}START<|image|>END"
    "{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endfor -%}"
)


def image_token(index: int) -> str:
    return f"<|dit_token_{index}|>"


def build_tokenizer(task: Task = "t2i") -> PreTrainedTokenizerFast:
    """Deterministic: every call for a task gives the same vocabulary. The text part is trained on the task's texts."""
    text_vocabulary, merges = _train_text_part(_texts(task))
    vocabulary = {image_token(i): i for i in range(VISION_VOCABULARY)}
    for token in (*_SPECIAL, *text_vocabulary):
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=image_token(IMAGE_START),
        eos_token=image_token(IMAGE_END),
        pad_token="<|endoftext|>",  # noqa: S106  # a text token, not a secret
        extra_special_tokens={"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def build_processor(task: Task = "t2i") -> GlmImageProcessor:
    image_processor = GlmImageImageProcessorPil(
        patch_size=VISION_PATCH,
        temporal_patch_size=1,
        merge_size=1,
        size={"shortest_edge": 32 * 32, "longest_edge": 2048 * 2048},
    )
    template = _CHAT_TEMPLATE.replace("START", image_token(IMAGE_START)).replace("END", image_token(IMAGE_END))
    return GlmImageProcessor(image_processor=image_processor, tokenizer=build_tokenizer(task), chat_template=template)


def _texts(task: Task) -> list[str]:
    prompts = [combination.prompt for combination in COMBINATIONS]
    return prompts if task == "t2i" else prompts + instructions()


def _train_text_part(texts: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_TEXT_VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*texts, "0 1 2 3 4 5 6 7 8 9"], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    by_id = sorted(model["vocab"], key=model["vocab"].get)
    return by_id, [tuple(pair) for pair in model["merges"]]
