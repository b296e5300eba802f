"""GenEval (arXiv 2310.11513): 1 if a detector finds everything that the prompt names, else 0.

A record needs the metadata of a line of GenEval's evaluation_metadata.jsonl: ``tag``, ``include`` and ``exclude``.
Other records are unscored, and the worker prints the reason. The part ``share`` is the share of the requirements that
are met; ``GENEVAL_SCORE=share`` makes it the score.

The detector, facebook/mask2former-swin-small-coco-instance, has the architecture and data of GenEval's, but other
weights, because GenEval's are in mmdet's format. Variables: ``GENEVAL_DETECTOR`` names other weights or a local folder,
``GENEVAL_CLIP`` the CLIP that recognises colours.
"""

from __future__ import annotations

import os
from functools import partial

from geneval_names import NAMES
from geneval_rules import UnusableError, Verdict, judge, task_of
from serve import Request, Score, serve, unscored

DETECTOR = os.environ.get("GENEVAL_DETECTOR", "facebook/mask2former-swin-small-coco-instance")
CLIP = os.environ.get("GENEVAL_CLIP", "openai/clip-vit-large-patch14")
SCORES = ("correct", "share")
SCORE = os.environ.get("GENEVAL_SCORE", "correct")


def load() -> Score:
    if SCORE not in SCORES:
        raise ValueError(f"GENEVAL_SCORE must be {' or '.join(SCORES)}, got {SCORE!r}")
    import torch
    from geneval_colours import Colours
    from geneval_detector import Detector

    device = "cuda" if torch.cuda.is_available() else "cpu"
    detector, colours = Detector(DETECTOR, device), Colours(CLIP, device)

    def verdict(image, metadata) -> Verdict | None:
        try:
            task = task_of(metadata, NAMES)
        except UnusableError as error:
            unscored(str(error))
            return None
        return judge(task, detector(image), partial(colours, image))

    def score(request: Request) -> tuple[list[float | None], dict[str, list[float | None]]]:
        pairs = zip(request.images, request.metadata, strict=True)
        verdicts = [verdict(image, metadata) for image, metadata in pairs]
        parts = {name: [None if own is None else float(getattr(own, name)) for own in verdicts] for name in SCORES}
        return parts[SCORE], parts

    return score


if __name__ == "__main__":
    serve(
        f"geneval-{SCORE}:{DETECTOR}+{CLIP}",
        load,
        f"Its weights are {DETECTOR} and {CLIP}, downloaded from the hub at the first start; GENEVAL_DETECTOR and"
        " GENEVAL_CLIP name others, or local folders.",
    )
