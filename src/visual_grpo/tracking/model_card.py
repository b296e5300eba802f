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

This gives the picture of `kedro run --pipeline=generate` with `generate.prompt`. `generate` lists the seeds of other
pictures in `metadata.jsonl`. A relative path of the base model counts from the project's folder.
"""
_LOADING = """\
from pathlib import Path

import torch
{imports}

torch.set_num_threads({threads})  # Rounds as the training did.
folder = Path('FOLDER')  # of this card
model = load_model(
{arguments}
)
{record}
sampler = SamplerConfig({sampler})
[sample] = model.generate([record], [image_seed(0, record.id, 0)], sampler)
{saved}"""
_OF_SOURCES = """\
sources = [Path('SOURCE.png')]
for number, source in enumerate(sources):
    prepared = {prepared}
    prepared.save(f'source{{number}}.png')
images = tuple(Path(f'source{{number}}.png') for number in range(len(sources)))
record = PromptRecord(id='prompt', prompt='...', source_images=images)"""
_NOT_GIVEN = {"path", "offload", "threads"}
"""Parameters of the model that `load_model` does not take by their names: they do not change a sample, or are told
beside."""


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
    card = _CARD.format(
        base=json.dumps(base),
        modules=" and ".join(modules),
        about="\n".join(f"- {name}: {text}" for name, text in about.items() if text),
        result="\n".join(result or [_NO_RESULT]),
        loading=loading_code(config, base, modules),
    )
    plain = facts.get("loading", {}).items()
    calls = [f"- `{module}`, whose folder is FOLDER/{module}: `{call}`" for module, call in plain]
    return card + "\n".join(["\nWithout this package, diffusers or peft load it:\n", *calls, ""]) if calls else card


def loading_code(config: Parameters, base: str, modules: Sequence[str]) -> str:
    """Python that generates the picture which ``generate.prompt`` gives with the adapters of ``modules``."""
    data, task = config.data, config.data.task
    size = f"{data.height}, {data.width}"
    arguments: dict[str, Any] = {"size": (data.height, data.width)}
    if data.frames is not None:
        arguments |= {"frames": data.frames, "fps": data.fps}
    arguments |= config.model.model_dump(mode="json", exclude_defaults=True, exclude=_NOT_GIVEN)
    arguments |= {"train": list(modules)}
    record, resizes = "record = PromptRecord(id='prompt', prompt='...')", list[str]()
    if task == "segmentation":
        record, resizes = _OF_SOURCES.format(prepared=f"stretch(read_image(source), {size})"), ["read_image", "stretch"]
    elif task != "t2i":  # The first source is cropped as a result is, the others keep their shape.
        prepared = f"(scale_to_area if number else fit)(read_image(source), {size})"
        record, resizes = _OF_SOURCES.format(prepared=prepared), ["fit", "read_image", "scale_to_area"]
    is_text = task == "segmentation"
    imports = {
        "visual_grpo.common.images": resizes,
        "visual_grpo.common.types": ["PromptRecord"],
        "visual_grpo.config": ["SamplerConfig"],
        "visual_grpo.evaluation.pictures": [] if is_text else ["save", "suffix_of"],
        "visual_grpo.evaluation.samples": ["image_seed"],
        "visual_grpo.training.components": ["load_model"],
    }
    sampler = config.sampling.eval.model_dump(mode="json", exclude_defaults=True)
    return _LOADING.format(
        imports="\n".join(f"from {module} import {', '.join(names)}" for module, names in imports.items() if names),
        threads=config.model.threads,
        arguments="\n".join(
            [f"    {base!r},", *(f"    {name}={value!r}," for name, value in arguments.items()), "    adapters=folder,"]
        ),
        record=record,
        sampler=", ".join(f"{name}={value!r}" for name, value in sampler.items()),
        saved="print(sample.text)" if is_text else "save(record, sample, None, Path(f'sample{suffix_of(sample)}'))",
    )


def _training(grpo: GRPOConfig, lora: LoraParams, weights: Mapping[str, float]) -> str:
    shown = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
    return f"learning rate {grpo.learning_rate:g}, rank {lora.rank}, rewards and their weights: {shown}"
