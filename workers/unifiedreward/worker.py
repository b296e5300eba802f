"""UnifiedReward (arXiv 2503.05236): alignment, coherence and style from 1 to 5, with their mean as the score.

Weights: CodeGoat24/UnifiedReward-qwen-7b (a GPU with 24 GB). The variable ``UNIFIEDREWARD`` names others or a local
folder. The weights were trained with the wording of their model card: save that wording, with {prompt} for the caption,
and name the file in ``UNIFIEDREWARD_WORDING``. The default below asks for the same lines in other words.
"""

from __future__ import annotations

import os
from pathlib import Path

from scores import ASPECTS, mean, parse
from serve import Request, Score, serve

MODEL = os.environ.get("UNIFIEDREWARD", "CodeGoat24/UnifiedReward-qwen-7b")
WORDING = """Judge an image that was generated from a caption: how well it matches the caption, whether it is free of
distortions, and how good its style is. Answer with three lines, each with a number from 1 to 5:
Alignment Score (1-5): X
Coherence Score (1-5): X
Style Score (1-5): X

Caption: {prompt}"""


def load() -> Score:
    import torch
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    device = "cuda" if torch.cuda.is_available() else "cpu"
    file = os.environ.get("UNIFIEDREWARD_WORDING")
    wording = WORDING if file is None else Path(file).read_text(encoding="utf-8")
    processor = AutoProcessor.from_pretrained(MODEL)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(MODEL, dtype=torch.bfloat16).to(device).eval()

    @torch.inference_mode()
    def answer(image: object, prompt: str) -> str:
        text = wording.replace("{prompt}", prompt)
        messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]
        inputs = processor.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(device)
        written = model.generate(**inputs, max_new_tokens=1024, do_sample=False)
        said: str = processor.batch_decode(written[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0]
        return said

    def score(request: Request) -> tuple[list[float | None], dict[str, list[float | None]]]:
        pairs = zip(request.images, request.prompts, strict=True)
        found = [parse(answer(image, prompt)) for image, prompt in pairs]
        return [mean(own) for own in found], {aspect.lower(): [own[aspect] for own in found] for aspect in ASPECTS}

    return score


if __name__ == "__main__":
    serve(
        MODEL,
        load,
        f"Its weights are {MODEL}, downloaded from the hub at the first start; UNIFIEDREWARD names others, or a local"
        " folder.",
    )
