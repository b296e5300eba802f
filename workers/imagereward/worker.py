"""ImageReward (arXiv 2304.05977): human preference, about -2 to 2, zero mean over its training data.

Weights: THUDM/ImageReward on the hub (1.8 GB). The variable ``IMAGEREWARD_FOLDER`` names a local folder with
ImageReward.pt and med_config.json instead.
"""

from __future__ import annotations

import os
from pathlib import Path

from serve import Request, Score, serve


def load() -> Score:
    import ImageReward
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = os.environ.get("IMAGEREWARD_FOLDER")
    if folder is None:
        model = ImageReward.load("ImageReward-v1.0", device=device)
    else:
        config = Path(folder, "med_config.json")
        model = ImageReward.load(str(Path(folder, "ImageReward.pt")), device=device, med_config=str(config))

    @torch.inference_mode()
    def score(request: Request) -> list[float]:
        return [model.score(prompt, image) for prompt, image in zip(request.prompts, request.images, strict=True)]

    return score


if __name__ == "__main__":
    serve(
        "ImageReward-v1.0",
        load,
        "Its weights are THUDM/ImageReward on the hub, with the tokenizer of bert-base-uncased, downloaded at the first"
        " start; IMAGEREWARD_FOLDER names a local folder of the former.",
    )
