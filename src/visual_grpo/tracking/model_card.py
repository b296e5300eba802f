"""The card next to adapters: what they were trained on and with, their result, and how to load them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from huggingface_hub import ModelCardData

from visual_grpo.adapter_folder import DATA_COMMIT, STEP
from visual_grpo.common.errors import counted
from visual_grpo.config import GRPOConfig, LoraParams, Parameters

CARD = "README.md"
_HUB_DATA = "hf://datasets/"
_NO_RESULT = "None yet."
_CARD = """\
---
{metadata}
---

# LoRA of {modules}, trained with GRPO

{about}

## Result

{result}

## Loading

```python
{loading}
```

{same}
"""
_OF_PROMPT = """\
This gives the picture of `kedro run --pipeline=generate` with `generate.prompt`. `generate` lists the seeds of other
pictures in `metadata.jsonl`."""
_OF_RECORD = """\
This gives what `kedro run --pipeline=generate` with `generate.prompts` makes of a record, if the seed that
`metadata.jsonl` lists takes the place of `image_seed(0, record.id, 0)`."""
_LOADING = """\
from pathlib import Path

import torch
{imports}

torch.set_num_threads({threads})  # Rounds as the training did.
folder = {folder}
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


@dataclass(frozen=True, kw_only=True)
class Published:
    """A repository on the hub, in which the adapters are."""

    repository: str
    base: str
    """Hub id of the base model."""
    licence: Mapping[str, str]
    """license, license_name and license_link of the base model, as far as it states them."""


def model_card(
    facts: Mapping[str, Any],
    modules: Sequence[str],
    result: Sequence[str] = (),
    *,
    judged_by: str | None = None,
    published: Published | None = None,
) -> str:
    """Markdown with the metadata that the hub reads.

    Args:
        result: the evaluation in words.
        judged_by: the command that judges the adapters, for a card without ``result``.
        published: where the adapters are published; such a card tells nothing of this machine. None = the card is in
            the adapters' folder.
    """
    config = Parameters.model_validate(facts["parameters"])
    base = facts["model"] if published is None else published.base
    about = {
        "Base model": f"`{base}`{_at(config.model.revision)}, whose licence applies",
        "Merged into it": f"the LoRA `{_shown(str(config.model.lora), published)}`, sha256 `{facts['model_lora']}`"
        if "model_lora" in facts
        else "",
        "Data": f"`{_shown(config.data.path, published)}` ({config.data.task}){_at(facts.get(DATA_COMMIT))}, digest"
        f" `{facts['data'][:12]}`",
        "Training": f"{counted(facts['steps'], 'step')}, {counted(facts['samples'], 'sample')},"
        f" loss {config.grpo.loss}, seed {facts['seed']}",
        "Start": f"`{_shown(config.train.start, published)}`, digest `{facts['start'][:12]}`"
        if "start" in facts
        else "",
        **{
            f"Of {module}": _training(config.grpo_of(module), config.lora_of(module), config.weights([module]))
            for module in modules
        },
        "Judges": ", ".join(f"{name} of {r.judge_of or 'the total'}" for name, r in config.rewards.items() if r.judge),
        "Adapter": f"of the {facts['adapter']} step ({facts[STEP[facts['adapter']]]})",
        "Code": f"commit `{facts.get('git.commit', 'unknown')}` ({facts.get('git.state', 'unknown')})",
        **(_provenance(facts) if published is None else {}),
    }
    plain = facts.get("loading", {}).items()
    card = _CARD.format(
        metadata=_metadata(config, modules, facts, published),
        modules=" and ".join(modules),
        about="\n".join(f"- {name}: {text}" for name, text in about.items() if text),
        result="\n".join(result or [_NO_RESULT + (f" To judge the adapter: `{judged_by}`" if judged_by else "")]),
        loading=loading_code(config, base, modules, published),
        same=_OF_RECORD if config.data.task in ("i2i", "segmentation") else _OF_PROMPT,
    )
    calls = [f"- `{module}`: `{call.replace('folder', _place(module, modules, published))}`" for module, call in plain]
    onto = " onto the base model with the merged LoRA" if "model_lora" in facts else ""
    told = [f"\nWithout this package, diffusers or peft load it{onto}:\n", *calls, ""]
    return card + "\n".join(told) if calls else card


def is_one_folder(modules: Sequence[str]) -> bool:
    """Returns whether a repository has the files of the only module at its top, where libraries look for them."""
    return len(modules) == 1


def _place(module: str, modules: Sequence[str], published: Published | None) -> str:
    """Arguments that name a module's files in a call of diffusers or peft."""
    if published is None:
        return repr(f"FOLDER/{module}")
    within = "" if is_one_folder(modules) else f", subfolder={module!r}"
    return f"{published.repository!r}{within}"


def _provenance(facts: Mapping[str, Any]) -> dict[str, str]:
    """Returns the facts that only this machine and its MLflow know."""
    told = {
        "MLflow run": f"`{facts['mlflow_run_id']}`" if facts["mlflow_run_id"] else "none",
        "Command": f"`{facts.get('command', 'unknown')}`",
    }
    for label, name in (("Resumed by", "resumed.command"), ("Resumed with the code of", "resumed.git.commit")):
        told[label] = ", ".join(f"`{line}`" for line in facts.get(name, "").splitlines())
    return told


def _at(commit: str | None) -> str:
    return f" at commit `{commit[:12]}`" if commit else ""


def _shown(place: str, published: Published | None) -> str:
    """A place as the card names it: of a folder or file here, others get the name alone."""
    return place if published is None or "://" in place else PurePath(place).name


def _metadata(config: Parameters, modules: Sequence[str], facts: Mapping[str, Any], published: Published | None) -> str:
    """The hub's metadata (https://huggingface.co/docs/hub/model-cards). No word of a prompt triggers these LoRAs, so
    that there is no instance_prompt."""
    task, is_video = config.data.task, config.data.frames is not None
    result = "video" if is_video else "image"
    kind = {"i2i": f"image-to-{result}", "segmentation": "image-text-to-text"}.get(task, f"text-to-{result}")
    by_peft = all(call.startswith("peft.") for call in facts.get("loading", {"": ""}).values())
    on_hub = facts["model"] if facts.get("model_content") is None else None
    of_hub = config.data.path.removeprefix(_HUB_DATA) if config.data.path.startswith(_HUB_DATA) else None
    licence: Mapping[str, Any] = {} if published is None else published.licence
    data = ModelCardData(
        base_model=on_hub if published is None else published.base,
        base_model_relation="adapter",
        datasets=None if of_hub is None else ["/".join(of_hub.split("/")[:2])],
        library_name="peft" if by_peft else "diffusers",
        pipeline_tag=kind,
        tags=["lora", "grpo", "visual-grpo", *(["image-to-image"] if task == "mixed" else [])],
        **licence,
    )
    return data.to_yaml()


def loading_code(config: Parameters, base: str, modules: Sequence[str], published: Published | None = None) -> str:
    """Python that generates the picture which ``generate.prompt`` gives with the adapters of ``modules``."""
    data, task = config.data, config.data.task
    size = f"{data.height}, {data.width}"
    arguments: dict[str, Any] = {"size": (data.height, data.width)}
    if data.frames is not None:
        arguments |= {"frames": data.frames, "fps": data.fps}
    arguments |= config.model.model_dump(mode="json", exclude_defaults=True, exclude=_NOT_GIVEN)
    if config.model.lora is not None:
        arguments["lora"] = _shown(config.model.lora, published)
    arguments |= {"train": list(modules)}
    record, resizes = "record = PromptRecord(id='prompt', prompt='...')", list[str]()
    if task == "segmentation":
        record, resizes = _OF_SOURCES.format(prepared=f"stretch(read_image(source), {size})"), ["read_image", "stretch"]
    elif task != "t2i":  # The first source is cropped as a result is, the others keep their shape.
        prepared = f"(scale_to_area if number else fit)(read_image(source), {size})"
        record, resizes = _OF_SOURCES.format(prepared=prepared), ["fit", "read_image", "scale_to_area"]
    is_text = task == "segmentation"
    imports = {
        "huggingface_hub": [] if published is None else ["snapshot_download"],
        "visual_grpo.common.images": resizes,
        "visual_grpo.common.types": ["PromptRecord"],
        "visual_grpo.config": ["SamplerConfig"],
        "visual_grpo.evaluation.pictures": [] if is_text else ["save", "suffix_of"],
        "visual_grpo.evaluation.samples": ["image_seed"],
        "visual_grpo.training.components": ["load_model"],
    }
    sampler = config.sampling.eval.model_dump(mode="json", exclude_defaults=True)
    here = "Path('FOLDER')  # of this card; a relative path of the base model counts from the project's folder"
    return _LOADING.format(
        folder=here if published is None else f"Path(snapshot_download({published.repository!r}))",
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
