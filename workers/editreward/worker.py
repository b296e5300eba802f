"""EditReward (arXiv 2509.26346): human preference among edits; unbounded, higher is better.

The score is the mean of two parts: ``following``, how well the edit follows the instruction, and ``quality``, how good
it looks. The part ``log_spread`` is the log of the model's uncertainty, averaged over both. An edit needs exactly one
source image (the reward's option ``sources: true``); otherwise it is unscored.

Weights: TIGER-Lab/EditReward-Qwen2.5-VL-7B (a GPU with 24 GB). Variables: ``EDITREWARD`` names other weights or a local
folder, ``EDITREWARD_BASE`` the base model's configuration and tokenizer, and ``EDITREWARD_CODE`` a copy of the
repository TIGER-AI-Lab/EditReward, from which the wording is read.
"""

from __future__ import annotations

import os

from edit_wording import ASPECTS, read_wording
from serve import Request, Score, serve, unscored

MODEL = os.environ.get("EDITREWARD", "TIGER-Lab/EditReward-Qwen2.5-VL-7B")
BASE = os.environ.get("EDITREWARD_BASE", "Qwen/Qwen2.5-VL-7B-Instruct")
PARTS = (*ASPECTS, "log_spread")


def load() -> Score:
    wording = read_wording(os.environ.get("EDITREWARD_CODE"))
    import torch
    from edit_reward_model import EditReward

    model = EditReward(MODEL, BASE, wording, "cuda" if torch.cuda.is_available() else "cpu")

    def judged(image, prompt, sources) -> tuple[float | None, dict[str, float | None]]:
        if len(sources) != 1:
            unscored(f"one image that was edited is needed, {len(sources)} came (sources: true)")
            return None, dict.fromkeys(PARTS)
        found = model(sources[0], image, prompt)
        scores = {aspect: score for aspect, (score, _) in found.items()}
        spread = sum(log_spread for _, log_spread in found.values()) / len(found)
        return sum(scores.values()) / len(scores), {**scores, "log_spread": spread}

    def score(request: Request) -> tuple[list[float | None], dict[str, list[float | None]]]:
        # One at a time: in a batch the padding of the prompts would move the scores.
        edits = zip(request.images, request.prompts, request.sources, strict=True)
        found = [judged(*edit) for edit in edits]
        return [own for own, _ in found], {name: [parts[name] for _, parts in found] for name in PARTS}

    return score


if __name__ == "__main__":
    serve(
        f"editreward:{MODEL}",
        load,
        f"Its weights are {MODEL}, with the tokenizer of {BASE}, downloaded from the hub at the first start; EDITREWARD"
        " and EDITREWARD_BASE name others, or local folders. EDITREWARD_CODE names a copy of the repository"
        " TIGER-AI-Lab/EditReward.",
    )
