"""The parameters of a training as the only ones of a configuration, with every path that is written in the worktree."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from visual_grpo.config.presets import pinned

_ENVIRONMENT = re.compile(r"(?:--env[= ]|-e[= ]?)([\w.-]+)")
_PARAMETERS = "parameters*"
_UNNAMED = "local"


def parameters_to_repeat(own: Mapping[str, Any], start: Path | None = None) -> dict[str, Any]:
    """The parameter tree of a training, to be run in a worktree.

    What it writes is relative to the worktree: a run with its output elsewhere is repeated in ``data``. It starts at
    step 1 and shows itself to no other tracker.

    Args:
        own: of the training.
        start: the adapters that the training started from, whatever their name means by now.
    """
    tree = pinned(own)
    output = _inside(tree["output"], "data")
    starter = dict(tree["starter"])
    dataset = _inside(starter["dataset"], f"{output}/01_raw/{starter.get('world', 'shapes')}")
    model = _inside(starter["model"], f"{output}/06_models/base")
    data = dict(tree["data"])
    if data["path"] == starter["dataset"]:
        data["path"] = dataset
    quiet = {name: None for name in ("tensorboard", "wandb") if name in tree["tracking"]}
    checkpoints = {"checkpoints": f"{output}/06_models/checkpoints"}
    begun = {} if start is None else {"train": {**tree["train"], "start": str(start)}}
    return {
        **tree,
        **begun,
        "output": output,
        "resume": "never",
        "adapter": "latest",
        "data": data,
        "starter": {**starter, "dataset": dataset, "model": model},
        "tracking": {**tree["tracking"], **quiet, **checkpoints},
    }


def write_configuration(code: Path, folder: Path, tree: Mapping[str, Any], command: str) -> list[str]:
    """Writes a configuration beside the worktree, and returns the options of ``kedro run`` that name it.

    It is the commit's own but for the parameters, of which ``tree`` is all: nothing is merged with it.

    Args:
        command: of the training, which may name an environment; that one may have another catalog.
    """
    import yaml

    made = folder / "conf"
    shutil.copytree(code / "conf", made)
    for file in made.glob(f"*/{_PARAMETERS}"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    (made / _UNNAMED).mkdir(exist_ok=True)
    text = yaml.safe_dump(_escaped(tree), allow_unicode=True, sort_keys=False)
    (made / "base/parameters.yml").write_text(text, encoding="utf-8")
    named = _ENVIRONMENT.search(command)
    environment = [f"--env={named[1]}"] if named and (made / named[1]).is_dir() else []
    return [f"--conf-source={made}", *environment]


def _inside(path: str, otherwise: str) -> str:
    """The path, or ``otherwise`` where it leads out of the working folder."""
    pure = PurePosixPath(path)
    return otherwise if pure.is_absolute() or ".." in pure.parts or path.startswith("~") else path


def _escaped(value: Any) -> Any:
    """Every text as it is: OmegaConf would look up what ``${...}`` names."""
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
