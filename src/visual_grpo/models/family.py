"""Model families: one description each, and how they are found.

A family names its modules, tasks, options, adapter formats and saved classes, and knows how to load and build its
model. Generic code asks the family and never imports a model's package.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.importing import load_attribute
from visual_grpo.config import ModelConfig, Strict, Task
from visual_grpo.models import families
from visual_grpo.models.loading import saved_class
from visual_grpo.models.module import Kind, ModelSettings, Module

if TYPE_CHECKING:
    from visual_grpo.models.model import Model


class NoOptions(Strict):
    """The options of a family that has none."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of model."""

    name: str
    modules: Mapping[str, Module]
    """The trainable modules by name, in the order in which they generate."""
    tasks: tuple[Task, ...]
    saved_as: tuple[str, ...]
    """Classes that a saved model names in its model_index.json or config.json."""
    load: Callable[[str, ModelConfig], Any]
    """(folder or hub id, config) -> the pipeline or model, frozen and in evaluation mode. Raises UserError."""
    build: Callable[[Any, ModelSettings], Model]
    """Makes a `Model` of what ``load`` gave."""
    frame_counts: range | None = None
    """Numbers of frames that its videos may have; None = it generates images, or text."""
    options: type[Strict] = field(default=NoOptions)
    """``model.options`` of this family."""
    sources: range | None = field(default=None)
    """The numbers of source images that a record may have; None = any that suits the task."""
    plain_guidance: Callable[[float], dict[str, Any]] | None = field(default=lambda scale: {"guidance_scale": scale})
    """Arguments of the plain pipeline's call for the guidance scale of a sampler, where 1 is off; None = there is no
    pipeline that generates the same."""

    def check_frames(self, frames: int | None, name: str = "data.frames") -> None:
        """Raises UserError unless the family generates videos of so many frames; None = images."""
        known = self.frame_counts
        if known is None and frames is not None:
            raise UserError(f"{name} is {frames}, but {self.name} does not generate videos: set {name} to null.")
        if known is not None and frames not in known:
            first, second, third, *_ = known
            raise UserError(
                f"{name} is {'null' if frames is None else frames}; {self.name} generates videos of {first},"
                f" {second}, {third}, ... or {known[-1]} frames."
            )

    def kinds(self) -> set[Kind]:
        return {module.kind for module in self.modules.values()}


AUTO = "auto"
BUILT_IN = tuple(module.name for module in pkgutil.iter_modules(families.__path__))
_KNOWN = f"Built in: {', '.join(BUILT_IN)}; a custom family is named package.module:FAMILY (docs/own_model.md)."


def find_family(name: str, path: str | None = None, revision: str | None = None) -> Family:
    """The family called ``name``; for ``auto`` the one that the model saved at ``path`` belongs to.

    Args:
        revision: of a hub id.

    Raises UserError for an unknown name and for a saved model of no known family; both name the families.
    """
    if name != AUTO:
        if is_own(name) or name in BUILT_IN:
            return _loaded(name)
        raise UserError(
            f"model.family is {name!r}, which is not a known family.{nearest_hint(name, BUILT_IN)} {_KNOWN}"
        )
    if path is None:
        raise UserError("model.family is auto, but no saved model is given to recognise it from; name the family.")
    class_name = saved_class(path, revision)
    for family in map(_loaded, BUILT_IN):
        if class_name in family.saved_as:
            return family
    raise UserError(f"The model at {path} is a {class_name}, which does not belong to a known family. {_KNOWN}")


def is_own(name: str) -> bool:
    """True for a family that ``model.family`` names as package.module:FAMILY."""
    return ":" in name


def _loaded(name: str) -> Family:
    """Imports a family's module only now: starting up loads no model library."""
    where = name if is_own(name) else f"{families.__name__}.{name}:FAMILY"
    family = load_attribute(where, "model.family")
    if not isinstance(family, Family):
        raise UserError(f"model.family is {where!r}, which is a {type(family).__name__}, not a visual_grpo Family.")
    return family
