"""VQAScore (arXiv 2404.01291) with CLIP-FlanT5: the probability of "Yes" when asked whether the image shows the prompt.

The part ``published`` is the score of the authors' package, the geometric mean of the probabilities of "Yes" and of the
end token. An empty prompt is unscored.

Weights: zhiqiulin/clip-flant5-xxl (a GPU with 40 GB; zhiqiulin/clip-flant5-xl needs 12 GB). Variables: ``VQASCORE``
names others or a local folder, ``VQASCORE_TOKENIZER`` Flan-T5's tokenizer, ``VQASCORE_VISION`` the CLIP vision tower.
"""

from __future__ import annotations

import os

from serve import Request, Score, serve, unscored
from vqa_question import as_published, probability

MODEL = os.environ.get("VQASCORE", "zhiqiulin/clip-flant5-xxl")
TOKENIZER = os.environ.get("VQASCORE_TOKENIZER", "google/flan-t5-xxl")
VISION = os.environ.get("VQASCORE_VISION")


def load() -> Score:
    import torch
    from clip_flant5 import ClipFlanT5

    model = ClipFlanT5(MODEL, TOKENIZER, VISION, "cuda" if torch.cuda.is_available() else "cpu")

    def score(request: Request) -> tuple[list[float | None], dict[str, list[float | None]]]:
        # One at a time: in a batch the padding of the prompts moves the scores.
        if any(not prompt.strip() for prompt in request.prompts):
            unscored("a prompt is empty")
        pairs = zip(request.images, request.prompts, strict=True)
        answers = [model.answer(image, prompt) if prompt.strip() else None for image, prompt in pairs]
        return (
            [None if own is None else probability(own) for own in answers],
            {"published": [None if own is None else as_published(own) for own in answers]},
        )

    return score


if __name__ == "__main__":
    serve(
        f"vqascore:{MODEL}",
        load,
        f"Its weights are {MODEL}, the tokenizer of {TOKENIZER} and {VISION or 'openai/clip-vit-large-patch14-336'},"
        " downloaded from the hub at the first start; VQASCORE, VQASCORE_TOKENIZER and VQASCORE_VISION name others, or"
        " local folders.",
    )
