"""The card next to adapters: what they were trained on and with, their result, and how to load them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from visual_grpo.common.errors import counted
from visual_grpo.config import GRPOConfig, LoraParams, Parameters

CARD = "README.md"
_STEP = {"best": "best_step", "last": "steps"}
_NO_RESULT = "None when this card was written. `.venv/bin/kedro run --pipeline=evaluate` judges the adapter."
_CARD = """\
---
base_model: {base}
library_name: "peft"
tags: ["lora", "grpo", "visual-grpo"]
---

# LoRA of {modules}, trained with GRPO

{about}

## Result

{result}

## Loading

```python
{loading}
```
"""
_LOADING = """\
from pathlib import Path
from visual_grpo.training.components import load_model
from visual_grpo.config import SamplerConfig
from visual_grpo.common.types import PromptRecord

folder = Path('FOLDER')  # of this card; a relative path of the base model counts from the project's folder
model = load_model({base!r}, size={size}, {video}train={modules}, adapters=folder)
sampler = SamplerConfig(**{sampler})
[sample] = model.generate([PromptRecord(id='1', prompt='...'{sources})], [0], sampler)  # seed 0"""
_SOURCES = ", source_images=(Path('SOURCE.png'),)"
_LOADING_PLAIN = """
Without this package, by diffusers or peft:

```python
{code}
```
"""


def model_card(facts: Mapping[str, Any], modules: Sequence[str], result: Sequence[str] = ()) -> str:
    """Markdown with the front matter that the Hugging Face Hub reads; ``result`` is the evaluation in words."""
    config, base = Parameters.model_validate(facts["parameters"]), facts["model"]
    about = {
        "Base model": f"`{base}`, whose licence applies",
        "Data": f"`{config.data.path}` ({config.data.task}), digest `{facts['data'][:12]}`",
        "Training": f"{counted(facts['steps'], 'step')}, {counted(facts['samples'], 'sample')},"
        f" loss {config.grpo.loss}, seed {facts['seed']}",
        **{
            f"Of {module}": _training(config.grpo_of(module), config.lora_of(module), config.weights([module]))
            for module in modules
        },
        "Judges": ", ".join(f"{name} of {r.judge_of or 'the total'}" for name, r in config.rewards.items() if r.judge),
        "Adapter": f"of the {facts['adapter']} step ({facts[_STEP[facts['adapter']]]})",
        "Code": f"commit `{facts.get('git.commit', 'unknown')}` ({facts.get('git.state', 'unknown')})",
        "MLflow run": f"`{facts['mlflow_run_id']}`" if facts["mlflow_run_id"] else "none",
        "Command": f"`{facts.get('command', 'unknown')}`",
    }
    for label, name in (("Resumed by", "resumed.command"), ("Resumed with the code of", "resumed.git.commit")):
        about[label] = ", ".join(f"`{line}`" for line in facts.get(name, "").splitlines())
    sampler = config.sampling.eval.model_dump(mode="json", exclude_defaults=True)
    size, frames = (config.data.height, config.data.width), config.data.frames
    video = "" if frames is None else f"frames={frames}, fps={config.data.fps:g}, "
    sources = "" if config.data.task == "t2i" else _SOURCES
    loading = {"base": base, "size": size, "video": video, "modules": list(modules), "sampler": sampler}
    card = _CARD.format(
        base=json.dumps(base),
        modules=" and ".join(modules),
        about="\n".join(f"- {name}: {text}" for name, text in about.items() if text),
        result="\n".join(result or [_NO_RESULT]),
        loading=_LOADING.format(sources=sources, **loading),
    )
    calls = facts.get("loading", {}).items()
    code = "\n".join(f"folder = 'FOLDER/{module}'\n{call}" for module, call in calls)
    return card + (_LOADING_PLAIN.format(code=code) if code else "")


def _training(grpo: GRPOConfig, lora: LoraParams, weights: Mapping[str, float]) -> str:
    shown = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
    return f"learning rate {grpo.learning_rate:g}, rank {lora.rank}, rewards and their weights: {shown}"
