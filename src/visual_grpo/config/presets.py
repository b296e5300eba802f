"""Fills in the rewards of a preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from visual_grpo.config.places import section

AUTO, LISTED = "auto", "listed"
PresetName = Literal[
    "pickscore",
    "hps",
    "clip",
    "aesthetic",
    "geneval",
    "ocr",
    "target",
    "edit",
    "instruction",
    "text",
    "negative_points",
    "listed",
]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Sections ``rewards`` and ``modules`` of the parameters, as a YAML file would have them."""

    rewards: Mapping[str, Mapping[str, Any]]
    modules: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Module -> weights in its training, where ``modules`` has a section for it."""


GUARDS = {"edge_density": {"weight": 0.0}, "colour_entropy": {"weight": 0.0}}
"""They fall where a policy wins its reward with ever emptier images; soft outlines have no edges, but colours."""
_GUARDS_OF_VIDEOS = {name: {"weight": 0.0, "frames": "all"} for name in (*GUARDS, "exposure")} | {
    name: {"weight": 0.0} for name in ("motion", "flicker")
}
"""Guards of videos. The ones that pictures lack fall when a video stands still, flickers, or turns white or black."""

TARGET_JUDGE = "target_layout"
"""Added to rewards of records with target images where no judge is named (`operations.preflight`).

Why none of the usual similarities: a target is often one of many pictures that its prompt allows. On pairs that share
nothing but a caption, `psnr`, `ssim` and `delta_e` fall with contrast, so that they contradict a gain in quality, and
rise with grey, so that they confirm the commonest hack of `ssim` itself. A correlation of coarse cells does neither; it
needs no weights and costs little.
"""


def _worker(name: str, **entry: Any) -> dict[str, dict[str, Any]]:
    """Returns the entry of a reward worker, which the run starts."""
    options = {"worker": f"workers/{name}", **entry.pop("options", {})}
    return {name: {"function": "visual_grpo.rewards.remote.http_reward:HttpReward", "options": options, **entry}}


_OF_TASTE: Mapping[str, Mapping[str, Any]] = {
    **GUARDS,
    "fine_noise": {"weight": 0.0},  # Textures that only the reward's model likes.
    **_worker("imagereward", judge=True),  # BLIP, where the rewards are of CLIP (`rewards.judges.FAMILIES`).
}

PRESETS: Mapping[PresetName, Preset] = {
    "pickscore": Preset(rewards={"pick_score": {"weight": 1.0}, **_OF_TASTE}),
    "hps": Preset(rewards={"hps": {"weight": 1.0}, **_OF_TASTE}),
    "clip": Preset(rewards={"clip_score": {"weight": 1.0}, **_OF_TASTE}),
    # It does not see the prompt: `clip_score`, over the same weights, falls where all prompts get one picture.
    "aesthetic": Preset(rewards={"aesthetic": {"weight": 1.0}, "clip_score": {"weight": 0.0}, **_OF_TASTE}),
    # The share of met requirements: of 0 or 1 alone, hard prompts learn nothing.
    "geneval": Preset(
        rewards={
            **_worker(
                "geneval",
                weight=1.0,
                options={"environment": {"GENEVAL_SCORE": "share"}, "metadata": ["tag", "include"]},
            ),
            **_OF_TASTE,
        }
    ),
    "ocr": Preset(rewards={"ocr": {"weight": 1.0}, **GUARDS, **_worker("tesseract", judge=True)}),
    # As ocr, but without a worker to install: the records choose it.
    "text": Preset(rewards={"ocr": {"weight": 1.0}, **GUARDS}),
    "target": Preset(rewards={"ssim": {"weight": 1.0}, **GUARDS}),
    # A copy of the source is often similar to the target: `source_ssim` shows when that is what is learned.
    "edit": Preset(rewards={"ssim": {"weight": 1.0}, "source_ssim": {"weight": 0.0}, **GUARDS}),
    # What an edit changes is the judge's to say, what it keeps the structure's: each alone is won by losing the other.
    "instruction": Preset(
        rewards={
            "vlm_judge": {"weight": 1.0, "options": {"rubric": "instruction"}},
            "dino_structure": {"weight": 0.5},
            "source_ssim": {"weight": 0.0},
            **GUARDS,
        }
    ),
    "negative_points": Preset(rewards={"negative_points": {"weight": 1.0}}),
    # Nothing but the section `rewards`, not even a guard.
    "listed": Preset(rewards={}),
}


def with_rewards(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The parameter tree with its preset's rewards spelled out, and without those that are null.

    ``auto`` becomes null where ``rewards`` names the user's rewards; else it stays, since only the records can tell
    (`operations.preflight`). Guards are added to the user's own rewards of images, as to a preset's rewards.
    """
    name = tree.get("reward", AUTO)
    if name == AUTO and optimised_rewards(tree):
        name = None
    tree = with_preset(tree, _preset(name, tree), own_first=name is None)
    complete = ((key, {name: entry for name, entry in tree[key].items() if entry is not None}) for key in _SECTIONS)
    return {**tree, "reward": name, **dict(complete)}


_SECTIONS = {"rewards": "options", "modules": "rewards"}
"""Sections whose entries a null removes, and the section in each of them."""


def with_preset(tree: Mapping[str, Any], preset: Preset, *, own_first: bool = False) -> dict[str, Any]:
    """The parameter tree with the preset's rewards added to its own, which come ``own_first`` or last."""
    rewards, modules = _entries(tree, "rewards"), _entries(tree, "modules")
    removed = {reward for reward, entry in rewards.items() if entry is None}
    merged = {reward: _merged(preset.rewards.get(reward), entry) for reward, entry in rewards.items()}
    return {
        **tree,
        "rewards": {**merged, **preset.rewards, **merged} if own_first else {**preset.rewards, **merged},
        "modules": {
            module: None if entry is None else _with_weights(entry, preset.modules.get(module, {}), removed)
            for module, entry in modules.items()
        },
    }


def optimised_rewards(tree: Mapping[str, Any]) -> set[str]:
    """The entries of ``rewards`` with a weight that is not 0, be it in one module."""
    by_module = [entry.get("rewards", {}) for entry in _entries(tree, "modules").values() if entry is not None]
    return {
        name
        for name, entry in _entries(tree, "rewards").items()
        if entry is not None
        and entry.get("judge") is not True
        and (entry.get("weight", 1.0) != 0 or any(weights.get(name, 0) != 0 for weights in by_module))
    }


def _entries(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns ``rewards`` or ``modules``, whose entries are null or sections; raises UserError otherwise."""
    entries = {} if tree.get(name) is None else section(tree, name)
    for entry, value in entries.items():
        if value is not None:
            section(section(entries, entry, f"{name}."), _SECTIONS[name], f"{name}.{entry}.")
    return entries


def _preset(name: object, tree: Mapping[str, Any]) -> Preset:
    data = section(tree, "data")
    videos = data.get("frames") is not None
    if isinstance(name, str):
        preset = PRESETS.get(name, Preset(rewards={}))  # type: ignore[call-overload]
        if videos and preset.rewards:
            per_frame = {reward: {**entry, "frames": "all"} for reward, entry in preset.rewards.items()}
            preset = replace(preset, rewards=per_frame | _GUARDS_OF_VIDEOS)
        return preset
    guards = _GUARDS_OF_VIDEOS if videos else GUARDS
    return Preset(rewards=guards if data.get("task") != "segmentation" and optimised_rewards(tree) else {})


def _merged(preset: Mapping[str, Any] | None, entry: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Returns a preset's reward with the values of the user's ``entry``; a different function replaces it."""
    if preset is None or entry is None or entry.get("function") is not None:
        return entry
    return {**preset, **entry, "options": {**preset.get("options", {}), **entry.get("options", {})}}


def _with_weights(module: Mapping[str, Any], weights: Mapping[str, float], removed: set[str]) -> Mapping[str, Any]:
    """Adds a preset's weights to a module's section where it has none, without those of removed rewards."""
    rewards = {**weights, **module.get("rewards", {})}
    kept = {name: weight for name, weight in rewards.items() if name not in removed}
    return {**module, "rewards": kept} if kept or "rewards" in module else module
