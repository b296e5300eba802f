"""The pictures of pairs, kept beside the choices for as long as these are used."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

from PIL.Image import Image

from visual_grpo.files import write_atomically

FOLDER = "pictures"


def keep(picture: Image, beside: Path) -> str:
    """Writes a PNG beside the file of choices and returns its path relative to that; a picture is kept once."""
    file = io.BytesIO()
    picture.convert("RGB").save(file, "PNG")
    content = file.getvalue()
    # Named by its pixels' file, so that the name says nothing of who drew it.
    name = f"{FOLDER}/{hashlib.sha256(content).hexdigest()[:24]}.png"
    final = beside.parent / name
    if not final.is_file():
        write_atomically(final, content)
    return name
