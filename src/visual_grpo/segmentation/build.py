"""Builds a segmenter from its options in a parameter file."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from visual_grpo.errors import UserError, nearest_hint
from visual_grpo.segmentation.sam2 import Sam2Segmenter
from visual_grpo.segmentation.segmenter import Segmenter
from visual_grpo.segmentation.watershed import WatershedSegmenter

KINDS: Mapping[str, type[Segmenter]] = {"watershed": WatershedSegmenter, "sam2": Sam2Segmenter}
DEFAULT: Mapping[str, Any] = {"kind": "watershed"}


def build_segmenter(options: Mapping[str, Any] = DEFAULT) -> Segmenter:
    """Builds a segmenter, for example from ``{"kind": "watershed", "edge": 0.3}`` or
    ``{"kind": "sam2", "path": "facebook/sam2.1-hiera-large"}``.

    All keys except ``kind`` are passed to the constructor.

    Raises:
        UserError: unknown kind, unknown or missing option, or invalid value.
    """
    if not isinstance(options, Mapping):
        raise UserError(f"segmenter: expected options such as {dict(DEFAULT)}, got {options!r}")
    kind, arguments = options.get("kind"), {name: value for name, value in options.items() if name != "kind"}
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(f"segmenter: there is no kind {kind!r}.{_suggestion(str(kind), KINDS)}")
    parameters = inspect.signature(KINDS[kind]).parameters
    for name in arguments:
        if name not in parameters:
            raise UserError(f"segmenter {kind}: there is no option {name!r}.{_suggestion(name, parameters)}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise UserError(f"segmenter {kind}: the option {name!r} is missing")
    return KINDS[kind](**arguments)


def _suggestion(wrong: str, allowed: Iterable[str]) -> str:
    return nearest_hint(wrong, allowed) or f" There are: {', '.join(allowed)}"
