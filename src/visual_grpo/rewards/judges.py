"""Judges: which reward can give a second opinion on which, what of it is missing, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_grpo.common.digests import named_paths, option_files, option_texts
from visual_grpo.common.errors import UserError
from visual_grpo.config import RewardConfig
from visual_grpo.rewards.build import build_reward
from visual_grpo.rewards.catalogue import BUILT_IN
from visual_grpo.rewards.remote.local_worker import python_of

FAMILIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "is it like the target image?": {
        "layout of colours": ("target_layout",),
        "error of the pixels": ("psnr", "pixel", "delta_e"),
        "structure in small windows": ("ssim", "ms_ssim"),
        "AlexNet": ("lpips",),
    },
    "does it fit the prompt, and do people like it?": {
        "CLIP": ("clip_score", "pick_score", "hps", "aesthetic", "vqascore"),
        "BLIP": ("imagereward",),
        "Qwen-VL": ("hpsv3", "unifiedreward", "geneval2"),
        "a vision-language model of your choice": ("vlm_judge (alignment)",),
    },
    "is the text right?": {
        "rapidocr": ("ocr",),
        "Tesseract": ("tesseract",),
        "EasyOCR": ("easyocr",),
        "a vision-language model of your choice": ("vlm_judge (text)",),
    },
    "are the objects there?": {
        "a detector of your choice": ("object_layout",),
        "EfficientNet": ("efficientnet",),
        "Mask2Former": ("geneval",),
        "BLIP": ("imagereward",),
    },
    "is the source kept?": {
        "DINOv2": ("dino_structure", "dino_identity"),
        "structure in small windows": ("source_ssim",),
        "error of the pixels": ("kept_region",),
        "a vision-language model of your choice": ("vlm_judge (identity)",),
    },
    "was the instruction followed?": {
        "Qwen-VL": ("editreward",),
        "a vision-language model of your choice": ("vlm_judge (instruction)",),
    },
}
"""Question -> what looks at the picture -> built-in rewards and workers, in brackets a rubric.

Rewards of one family share their mistakes, be it the same network with other heads: a judge answers the same question
by a different family. ImageReward stands twice: it was trained on how well pictures show what was asked for, too.
"""
_TEXTS = {".csv", ".json", ".jsonl", ".md", ".txt", ".yaml", ".yml"}
"""Endings of files, such as a list of words, that a judge may share with the reward."""


@dataclass(frozen=True)
class MissingJudge:
    """An optimised reward without a judge of a different family."""

    reward: str
    family: str
    """The kind of model that looks at the picture, such as CLIP."""
    others: Mapping[str, str]
    """Rewards and workers that could judge it, those that are installed first, with their families."""

    @property
    def install(self) -> str | None:
        """Returns the worker to install before the first of ``others`` is used; None if it is there or no worker."""
        first = next(iter(self.others))
        return None if _is_there(first) or first.startswith("vlm_judge") else first

    @property
    def line(self) -> str:
        """Returns what to add to ``rewards`` for the first of ``others``."""
        first = next(iter(self.others))
        name, _, rubric = first.removesuffix(")").partition(" (")
        if rubric:
            return f'{name}: {{judge: true, options: {{url: "http://HOST/v1", model: MODEL, rubric: {rubric}}}}}'
        if first in BUILT_IN:
            return f"{name}: {{judge: true}}"
        return f'{name}: {{function: "{BUILT_IN["http"]}", judge: true, options: {{worker: workers/{name}}}}}'


def missing_judges(rewards: Mapping[str, Mapping[str, Any]], optimised: Iterable[str]) -> list[MissingJudge]:
    """Returns the ``optimised`` rewards of `FAMILIES` that have none; ``rewards`` is that section of the parameters."""
    missing = []
    for name in optimised:
        kind = _kind(name, rewards.get(name, {}))
        families = next((f for f in FAMILIES.values() if any(kind in kinds for kinds in f.values())), {})
        own = next((family for family, kinds in families.items() if kind in kinds), "")
        # The first of a family stands for it.
        others = {kinds[0]: family for family, kinds in families.items() if family != own}
        judges = {_kind(judge, r) for judge, r in rewards.items() if r.get("judge")}
        if others and not any(judges & {*families[family]} for family in others.values()):
            first = sorted(others, key=lambda other: not _is_there(other))
            missing.append(MissingJudge(name, own, {other: others[other] for other in first}))
    return missing


def _kind(name: str, reward: Mapping[str, Any]) -> str:
    """Returns a reward's name in `FAMILIES`: of the built-in function or the worker, with a built-in rubric."""
    options, function = reward.get("options", {}), reward.get("function")
    built_in = next((known for known, path in BUILT_IN.items() if path == function), "") if function else name
    if built_in == "http":
        return Path(str(options.get("worker", ""))).name
    return f"{built_in} ({options.get('rubric', 'alignment')})" if built_in == "vlm_judge" else built_in


def _is_there(kind: str) -> bool:
    """Tells what is built in, or an installed worker, from a worker to install and a model to be served."""
    return kind in BUILT_IN or python_of(kind).is_file()


def require_independent_judges(rewards: Mapping[str, RewardConfig], optimised: Collection[str], output: str) -> None:
    """Raises UserError where a judge is an optimised reward under a different name, or has its weights.

    The reward itself is the same function with the same models: no option that is a text, as a name, an address or a
    file's content, differs.
    """
    judges = [name for name, reward in rewards.items() if reward.judge]
    built = [*judges, *optimised] if judges else []
    functions = {name: _function_and_models(name, rewards[name], output) for name in built}
    weights = {name: _weights_of(name, rewards[name], output) for name in built}
    for judge, other in itertools.product(judges, optimised):
        shared = weights[judge] & weights[other]
        if shared or functions[judge] == functions[other]:
            same = "has the weights of" if shared else "is the same function with the same models as"
            raise UserError(
                f"rewards.{judge} judges what rewards.{other} optimises, and {same} it, so it cannot contradict"
                " it. Name a judge of a different family, trained on different data, or leave out judge: true"
            )


def _function_and_models(name: str, reward: RewardConfig, output: str) -> tuple[str | None, dict[str, Any]]:
    texts = dict(option_texts(reward.options))
    return reward.function or BUILT_IN.get(name), texts | option_files(reward.options, output)


def _weights_of(name: str, reward: RewardConfig, output: str) -> set[str]:
    """Returns digests of files that hold no text, and places of models."""
    digests = option_files(reward.options, output)
    found = {digests[o] for o, path in named_paths(reward.options, output) if path.suffix.lower() not in _TEXTS}
    origins = getattr(build_reward(name, reward).function, "origins", ())
    return found | {f"{origin.path}@{origin.revision}" for origin in origins if origin.option != "processor"}
