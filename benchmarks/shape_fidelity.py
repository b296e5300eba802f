"""Measures how well shapes are drawn before and after training, by three measures that no reward uses.

Where both samples of a pair show the asked shape, and no other, its outline is compared with the ideal one. For each
seed of `seeds.py` a row per measure; with the verdict, the control and all right of the evaluation beside them.
A model that learns to obey "small" draws smaller shapes, and an outline that is as uneven in pixels deviates more from
a smaller ideal. So each measure is repeated for the pairs whose shapes both have the asked size, as the guard does.

    python benchmarks/shape_fidelity.py FOLDER/seed-0 FOLDER/seed-1 --choice all

- fill: share of the smallest enclosing circle, rectangle or triangle that the shape fills (`OutlineGuard`).
- moments: similarity of the logarithms of Hu's seven invariant moments (Hu 1962) to those of the ideal shape, 1 for
  equal ones: 1 / (1 + OpenCV's CONTOURS_MATCH_I2).
- radius: 1 minus the largest deviation of the outline's distance from its centroid, over all directions, from that of
  an ideal shape of the same area, as a share of the ideal's mean.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from visual_grpo.common.images import read_image, to_tensor
from visual_grpo.evaluation.comparison import cluster_ids
from visual_grpo.evaluation.paired import PairedDifference, paired_difference
from visual_grpo.evaluation.report import all_pairs
from visual_grpo.starter.shapes.outline import contours, fills, shape_and_size
from visual_grpo.starter.shapes.render import RADII, SHAPES

Contour = NDArray[np.int32]
_DIRECTIONS = 90
_ASKED_SIZE = "has the asked size"


def main() -> None:
    arguments = _arguments()
    print(f"| seed | measure | pairs | base | trained | difference [95%] | {' | '.join(_HEADLINE)} |")
    print("|---" * (6 + len(_HEADLINE)) + "|")
    found_by_measure: dict[str, list[float]] = {}
    for clone in arguments.clones:
        result = clone / "results" / arguments.choice
        headline = json.loads((result / "evaluation.json").read_text())["headline"]
        beside = [say(headline) for say in _HEADLINE.values()]
        for name, found in measured(clone / "data/07_model_output/baseline", result / "trained").items():
            cells = [clone.name.removeprefix("seed-"), name, str(found.images), *_cells(found), *beside]
            print(f"| {' | '.join(cells)} |")
            beside = [""] * len(beside)
            found_by_measure.setdefault(name, []).append(found.difference)
    for name, differences in found_by_measure.items() if len(arguments.clones) > 1 else ():
        mean = paired_difference([0.0] * len(differences), differences, list(map(str, range(len(differences)))))
        print(f"Mean of the seeds' differences, {name}: {_cells(mean)[-1]}")


_HEADLINE: dict[str, Callable[[dict], str]] = {
    "verdict": lambda headline: headline["verdict"],
    "over the control [95%]": lambda headline: _change(headline["control"]) if headline["control"] else "",
    "all right: base": lambda headline: f"{headline['task']['baseline']:.2f}" if headline["task"] else "",
    "trained": lambda headline: f"{headline['task']['trained']:.2f}" if headline["task"] else "",
}


def measured(baseline: Path, trained: Path) -> dict[str, PairedDifference]:
    """Returns each measure's paired difference over the held-out pairs at the eval sampler; a cluster is a prompt."""
    pairs = all_pairs(baseline, trained)
    pairs = pairs[(pairs["split"] == "held_out") & (pairs["sampler"] == "eval")]
    before, after = (
        pd.DataFrame([_measures(side / file, prompt) for file, prompt in zip(files, pairs["prompt"], strict=True)])
        for side, files in ((baseline, pairs["file_baseline"]), (trained, pairs["file_trained"]))
    )
    clusters = cluster_ids(pairs.reset_index(drop=True))
    differences = {name: paired_difference(before[name], after[name], clusters) for name in MEASURES}
    alike = before[before[_ASKED_SIZE] & after[_ASKED_SIZE]].reindex(before.index)
    return differences | {
        f"{name}, asked size": paired_difference(alike[name], after[name], clusters) for name in MEASURES
    }


def _measures(file: Path, prompt: str) -> dict[str, Any]:
    """NaN unless the picture shows the asked shape alone."""
    asked, asked_size = (next(word for word in words if word in prompt.split()) for words in (SHAPES, RADII))
    image = to_tensor(read_image(file))
    found = contours(image)
    shown = [shape_and_size(contour, image) for contour in found]
    if [shape for shape, _ in shown] != [asked]:
        return {**dict.fromkeys(MEASURES, math.nan), _ASKED_SIZE: False}
    values = {name: measure(found[0], asked) for name, measure in MEASURES.items()}
    return {**values, _ASKED_SIZE: shown[0][1] == asked_size}


def _fill(contour: Contour, shape: str) -> float:
    return fills(contour)[SHAPES.index(shape)]


def _moments(contour: Contour, shape: str) -> float:
    return 1 / (1 + cv2.matchShapes(contour, _ideal(shape), cv2.CONTOURS_MATCH_I2, 0))


def _radius(contour: Contour, shape: str) -> float:
    ideal = _profile(_ideal(shape))
    return 1 - float(np.abs(_profile(contour) - ideal).max() / ideal.mean())


MEASURES = {"fill": _fill, "moments": _moments, "radius": _radius}


def _profile(contour: Contour) -> NDArray[np.float64]:
    """[_DIRECTIONS]: the largest distance of the outline from its centroid in each direction; its area is 1."""
    moments = cv2.moments(contour)
    x, y = (contour[:, 0] - np.array([moments["m10"], moments["m01"]]) / moments["m00"]).T
    angles = np.floor((np.arctan2(y, x) / (2 * math.pi) % 1) * _DIRECTIONS).astype(int) % _DIRECTIONS
    radii = np.zeros(_DIRECTIONS)
    np.maximum.at(radii, angles, np.hypot(x, y) / math.sqrt(moments["m00"]))
    return radii


@cache
def _ideal(shape: str) -> Contour:
    mask = np.zeros((500, 500), np.uint8)
    if shape == "circle":
        cv2.circle(mask, (250, 250), 200, 255, cv2.FILLED)
    elif shape == "square":
        cv2.rectangle(mask, (50, 50), (450, 450), 255, cv2.FILLED)
    else:
        cv2.fillPoly(mask, [np.array([[250, 50], [50, 450], [450, 450]], np.int32)], 255)
    return np.asarray(cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)[0][0], np.int32)


def _cells(found: PairedDifference) -> list[str]:
    change = {"difference": found.difference, "ci_low": found.ci_low, "ci_high": found.ci_high}
    return [f"{found.baseline:.3f}", f"{found.trained:.3f}", _change(change)]


def _change(entry: dict) -> str:
    return f"{entry['difference']:+.3f} [{entry['ci_low']:+.3f}, {entry['ci_high']:+.3f}]"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path, nargs="+", help="folders that seeds.py made")
    parser.add_argument("--choice", default="all", help="the choice of modules, as for seeds.py")
    return parser.parse_args()


if __name__ == "__main__":
    main()
