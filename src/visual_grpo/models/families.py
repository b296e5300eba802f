"""Which model families there are: the built-in ones by name, any other as ``package.module:Family``."""

from __future__ import annotations

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.importing import load_attribute
from visual_grpo.models.family import Family
from visual_grpo.models.loading import saved_class

AUTO = "auto"
BUILT_IN = {
    "glm_image": "visual_grpo.models.glm_image.model:FAMILY",
    "sd3": "visual_grpo.models.sd3:FAMILY",
    "qwen_image": "visual_grpo.models.qwen_image:FAMILY",
    "qwen2_5_vl": "visual_grpo.models.qwen2_5_vl:FAMILY",
}
"""Imported only when asked for: generic code knows no model, and starting up loads no model library."""


def find_family(name: str, path: str | None = None) -> Family:
    """The family called ``name``; for ``auto`` the one that the model saved at ``path`` belongs to.

    Raises UserError for an unknown name and for a saved model of no known family; both name the families.
    """
    if name == AUTO:
        if path is None:
            raise UserError("model.family is auto, but there is no saved model to recognise it from; name the family.")
        return recognised(path)
    if name in BUILT_IN:
        return _loaded(BUILT_IN[name])
    if ":" in name:
        return _loaded(name)
    raise UserError(f"model.family is {name!r}, which is no known family.{nearest_hint(name, BUILT_IN)} {_known()}")


def recognised(path: str) -> Family:
    """The family that lists the class which the model saved at ``path`` names."""
    found = saved_class(path)
    families = [_loaded(where) for where in BUILT_IN.values()]
    for family in families:
        if found in family.saved_as:
            return family
    says = "names no class and so" if found is None else f"is a {found}, which"
    raise UserError(f"The model at {path} {says} belongs to no known family. {_known()}")


def _loaded(where: str) -> Family:
    family = load_attribute(where, "model.family")
    if not isinstance(family, Family):
        raise UserError(f"model.family is {where!r}, which is a {type(family).__name__}, not a visual_grpo Family.")
    return family


def _known() -> str:
    return f"Built in: {', '.join(BUILT_IN)}; a custom family is named package.module:FAMILY (docs/own_model.md)."
