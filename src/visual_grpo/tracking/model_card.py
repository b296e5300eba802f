"""The card beside adapters: what they were trained on and with, their result, and how to load them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from visual_grpo.common.errors import counted
from visual_grpo.config import Parameters

CARD = "README.md"
_STEP = {"best": "best_step", "last": "steps"}
_LICENCE_FILES = ("LICENSE", "LICENSE.md", "LICENSE.txt")

_NO_RESULT = (
    "This card was written by the training. `.venv/bin/kedro run --pipeline=evaluate` judges the adapter: its result is"
    " in the report that it names, and in the card among the artifacts of the MLflow run."
)


def model_card(facts: Mapping[str, Any], modules: Sequence[str], result: Sequence[str] = ()) -> str:
    """Markdown with the front matter that the Hugging Face Hub reads.

    Args:
        facts: those of ``training.json``.
        modules: the trained ones.
        result: the evaluation in words; none before it was evaluated.
    """
    config, base = facts["parameters"], facts["model"]
    typed = Parameters.model_validate(config)
    front = {"base_model": base, "library_name": "peft", "tags": ["lora", "grpo", "visual-grpo"]}
    lines = [
        "---",
        *(f"{name}: {json.dumps(value)}" for name, value in front.items()),
        "---",
        "",
        f"# LoRA of {' and '.join(modules)}, trained with GRPO",
        "",
        *(
            f"- {name}: {text}"
            for name, text in {
                "Base model": f"`{base}` (its licence applies: {_licence(base)})",
                "Data": f"`{config['data']['path']}` ({config['data']['task']}), digest `{facts['data'][:12]}`",
                "Training": f"{counted(facts['steps'], 'step')}, {counted(facts['samples'], 'sample')},"
                f" loss {config['grpo']['loss']}, seed {facts['seed']}",
                **{f"Of {module}": _of_module(typed, module) for module in modules},
                "Adapter": f"of the {facts['adapter']} step ({facts[_STEP[facts['adapter']]]})",
                "Code": f"commit `{facts.get('git.commit', 'unknown')}` ({facts.get('git.state', 'unknown')})",
                "MLflow run": f"`{facts['mlflow_run_id']}`" if facts["mlflow_run_id"] else "none",
                "Command": f"`{facts.get('command', 'unknown')}`",
                **_resumed(facts),
            }.items()
        ),
        "",
        "## Result",
        "",
        *(result or [_NO_RESULT]),
        "",
        "## Loading",
        "",
        "```python",
        *_loading(config, base, modules),
        "```",
        "",
        *_loading_plain(facts.get("loading", {})),
    ]
    return "\n".join(lines)


def _resumed(facts: Mapping[str, Any]) -> dict[str, str]:
    """The later parts of a training that was resumed; the code only where it was another then."""
    commands, commits = (facts.get(f"resumed.{name}", "").splitlines() for name in ("command", "git.commit"))
    shown = {"Resumed by": commands, "Resumed with the code of": commits}
    return {label: ", ".join(f"`{line}`" for line in lines) for label, lines in shown.items() if lines}


def _loading(config: Mapping[str, Any], base: str, modules: Sequence[str]) -> list[str]:
    """Lines that draw one sample with the adapters."""
    size = (config["data"]["height"], config["data"]["width"])
    is_relative = Path(base).is_dir() and not Path(base).is_absolute()
    sampler = {name: value for name, value in config["sampling"]["eval"].items() if value not in (None, False)}
    return [
        "from pathlib import Path",
        "from visual_grpo.training.components import load_model",
        "from visual_grpo.config import SamplerConfig",
        "from visual_grpo.common.types import PromptRecord",
        "",
        *([f"# {base} is relative to the project's folder: run this there."] if is_relative else []),
        "folder = Path('FOLDER')  # of this card",
        f"model = load_model({base!r}, size={size}, train={list(modules)}, adapters=folder)",
        f"sampler = SamplerConfig(**{sampler})",
        "[sample] = model.generate([PromptRecord(id='1', prompt='...')], [0], sampler)  # seed 0",
    ]


def _loading_plain(calls: Mapping[str, str]) -> list[str]:
    """Lines that put the adapters on a model of diffusers or transformers."""
    code = [line for module, call in calls.items() for line in (f"folder = 'FOLDER/{module}'", call)]
    return ["Without this package, by diffusers or peft:", "", "```python", *code, "```", ""] if code else []


def _of_module(config: Parameters, module: str) -> str:
    """Learning rate, LoRA and the weights of the rewards in the training of one module."""
    weights = ", ".join(f"{name} {weight:g}" for name, weight in config.weights([module]).items())
    grpo, lora = config.grpo_of(module), config.lora_of(module)
    return f"learning rate {grpo.learning_rate:g}, rank {lora.rank}, rewards and their weights: {weights}"


def _licence(base: str) -> str:
    """Returns where to read the base model's licence."""
    found = [name for name in _LICENCE_FILES if (Path(base) / name).is_file()]
    if found:
        return f"`{Path(base) / found[0]}`"
    return "pretrained here on drawn pictures, none" if Path(base).is_dir() else f"https://huggingface.co/{base}"
