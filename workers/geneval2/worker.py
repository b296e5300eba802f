"""GenEval 2's Soft-TIFA with a vision-language model; the score is the geometric mean, a part the arithmetic one.

A record needs metadata ``vqa_list``, as in geneval2_data.jsonl; otherwise it is unscored. Weights:
Qwen/Qwen3-VL-8B-Instruct, as in GenEval 2 (a GPU with 24 GB). The variable ``VLM`` names others or a local folder.
"""

from __future__ import annotations

import os

from serve import Request, Score, serve, unscored
from soft_tifa import SUFFIX, arithmetic_mean, geometric_mean, questions_of, spellings

MODEL = os.environ.get("VLM", "Qwen/Qwen3-VL-8B-Instruct")


def load() -> Score:
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    device = "cuda" if torch.cuda.is_available() else "cpu"
    processor = AutoProcessor.from_pretrained(MODEL)
    model = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.bfloat16).to(device).eval()

    def first_tokens(answer: str) -> list[int]:
        """Of the spellings that are a single token: the first token of a longer word would be others' too."""
        ids = [processor.tokenizer.encode(text, add_special_tokens=False) for text in spellings(answer)]
        single = sorted({own[0] for own in ids if len(own) == 1})
        if not single:
            raise ValueError(f"the answer {answer!r} is no single token of {MODEL}")
        return single

    @torch.inference_mode()
    def probability(image: object, question: str, answer: str) -> float:
        content = [{"type": "image", "image": image}, {"type": "text", "text": question + SUFFIX}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        ).to(device)
        next_word = model(**inputs).logits[0, -1].float().softmax(-1)
        return min(1.0, next_word[first_tokens(answer)].sum().item())

    def score(request: Request) -> tuple[list[float | None], dict[str, list[float | None]]]:
        geometric: list[float | None] = []
        arithmetic: list[float | None] = []
        for image, metadata in zip(request.images, request.metadata, strict=True):
            found = [probability(image, question, answer) for question, answer in questions_of(metadata)]
            if not found:
                unscored(f"the metadata have no vqa_list, only {', '.join(metadata) or 'nothing'}")
            geometric.append(geometric_mean(found) if found else None)
            arithmetic.append(arithmetic_mean(found) if found else None)
        return geometric, {"arithmetic": arithmetic}

    return score


if __name__ == "__main__":
    serve(
        f"soft-tifa:{MODEL}",
        load,
        f"Its weights are {MODEL}, downloaded from the hub at the first start; VLM names others, or a local folder.",
    )
