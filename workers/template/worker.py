"""A template: copy the folder, load your model in `load`, add its packages to requirements.in.

Start it with `make worker NAME=template`.
"""

from __future__ import annotations

from PIL import ImageStat
from serve import Request, Score, serve


def load() -> Score:
    """Called once at the start: load your weights here."""

    def score(request: Request) -> tuple[list[float | None], dict[str, list[float | None]]]:
        """Brightness, 0 to 1: put your model here."""
        scores: list[float | None] = []
        contrast: list[float | None] = []
        for image in request.images:
            statistics = ImageStat.Stat(image.convert("L"))
            scores.append(statistics.mean[0] / 255)
            contrast.append(statistics.stddev[0] / 255)
        return scores, {"contrast": contrast}

    return score


if __name__ == "__main__":
    serve("brightness-1", load)
