"""HPSv3 (arXiv 2508.03789): human preference for the image given the prompt; unbounded, higher is better.

Weights: MizzenAI/HPSv3 on the hub (7B, a GPU with 24 GB). The variable ``HPSV3_CHECKPOINT`` names a local file instead.
"""

from __future__ import annotations

import math
import os

from serve import Request, Score, serve


def load() -> Score:
    import torch
    from hpsv3 import HPSv3RewardInferencer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = HPSv3RewardInferencer(checkpoint_path=os.environ.get("HPSV3_CHECKPOINT"), device=device)

    @torch.inference_mode()
    def score(request: Request) -> tuple[list[float], dict[str, list[float]]]:
        # One at a time: in a batch the padding of the prompts moves the scores.
        pairs = zip(request.images, request.prompts, strict=True)
        both = [model.reward([image], [prompt])[0].float().tolist() for image, prompt in pairs]
        # The model gives the mean of its preference, which is the score, and the logarithm of its standard deviation
        # (exp in the loss of hpsv3/model/qwen2vl_trainer.py).
        return [own[0] for own in both], {"sigma": [math.exp(own[1]) for own in both]}

    return score


if __name__ == "__main__":
    serve(
        "hpsv3-1.0.0",
        load,
        "Its weights are MizzenAI/HPSv3 and Qwen/Qwen2-VL-7B-Instruct on the hub, downloaded at the first start;"
        " HPSV3_CHECKPOINT names a local file of the former.",
    )
