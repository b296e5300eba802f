"""Each fault on the hub of docs/experiments/faults.md: what is said, when, and what was downloaded until then.

With -s each message is printed with its seconds and bytes.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kedro.io import DataCatalog, MemoryDataset

from tests.data.making import data_config
from tests.evaluation.defaults import parameters
from tests.hub import RESET, hub, hub_at
from tests.models.families.sd3 import tiny
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Parameters, RewardConfig
from visual_grpo.data.datasets import FolderDataset
from visual_grpo.data.sources import find_records
from visual_grpo.hooks.parameters import ParameterHooks
from visual_grpo.models.family import find_family
from visual_grpo.operations.preflight.check import check_before_run, pinned
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.rewards.build import build_reward
from visual_grpo.tracking.adapter_lookup import start_of_training

PAGE = Path(__file__).parents[3] / "docs/experiments/faults.md"
ROW = re.compile(r"^\| (.+) \| `(.+)` \| [\d.]+ s, (\d+) B \|$", re.M)
ROWS = {
    fault: (said, int(size))
    for fault, said, size in ROW.findall(PAGE.read_text(encoding="utf-8").partition("# On the hub")[2])
}
"""Fault -> what the message contains, and the bytes that were downloaded until then."""
NAME = "someone/thing"
PARTS = {
    "transformer": ["diffusers", "SD3Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
}
INDEX = json.dumps({"_class_name": "StableDiffusion3Pipeline", **PARTS})
WEIGHTS = "0" * 100_000
TEXTS = ("tokenizer/vocab.json", "tokenizer/merges.txt", "scheduler/scheduler_config.json")
MODEL = {
    f"{part}/{name}": text
    for part in list(PARTS)[:3]
    for name, text in (("config.json", "{}"), ("a.safetensors", WEIGHTS))
}
MODEL |= {"model_index.json": INDEX, **dict.fromkeys(TEXTS, "{}")}
SHARDS = json.dumps({"weight_map": {"a": "a-00001-of-00002.safetensors", "b": "a-00002-of-00002.safetensors"}})
DATA = {"train.jsonl": '{"prompt": "a cat"}\n'}
CARD = "---\nconfigs:\n- config_name: en\n  data_files: en/*.jsonl\n- config_name: fr\n  data_files: fr/*.jsonl\n---\n"
LORA = {"a.safetensors": WEIGHTS, "b.safetensors": WEIGHTS}
CLIP = {
    "config.json": '{"model_type": "clip"}',
    "preprocessor_config.json": "{}",
    "tokenizer.json": "{}",
    "model.safetensors": WEIGHTS,
}
SMALL = 2_000
"""Bytes of descriptions."""


def ask_for_model(**model: Any) -> None:
    check_before_run(config(**model), {"records", "adapters"}, {"training", "rewards"}, list)


def config(**model: Any) -> Parameters:
    sampling = {name: {"temperature": None} for name in ("rollout", "eval")}
    kinds = {"modules": {"dit": None}, "evaluation": {"controls": []}, "sampling": sampling}
    return parameters(
        model={"path": NAME, "device": "cpu"} | model,
        data={"path": "prompts.txt"},
        reward="listed",
        rewards={"edge_density": {}},
        **kinds,
    )


def load_model() -> None:
    given, _ = pinned(config())
    find_family("sd3").load(NAME, given.model)


def ask_for_data(**data: Any) -> None:
    list(find_records(data_config(f"hf://datasets/{NAME}", **data)).read())


def ask_for_lora(name: str = NAME) -> None:
    start_of_training(name, Path("latest"))


def ask_for_reward() -> None:
    build_reward("clip_score", RewardConfig(options={"model": NAME})).check_machine()


@contextmanager
def silent() -> Iterator[None]:
    """Takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server, hub_at(f"http://127.0.0.1:{server.getsockname()[1]}"):
        yield


def down() -> AbstractContextManager[None]:
    return hub_at("http://127.0.0.1:9")


@dataclass(frozen=True, kw_only=True)
class Case:
    ask: Callable[[], object] = ask_for_model
    files: Mapping[str, str] = field(default_factory=lambda: MODEL)
    refused: tuple[int, str] | None = None
    token: str | None = None
    where: Callable[[], AbstractContextManager[None]] = nullcontext
    offline: bool = False
    free: int = 10**12
    cache: str = "cache"


def lacking(*parts: str) -> dict[str, str]:
    return {name: text for name, text in MODEL.items() if not name.startswith(parts)}


def all_weights(ending: str) -> dict[str, str]:
    return {name.replace(".safetensors", ending): text for name, text in MODEL.items()}


GATED, NOT_THERE = (401, "GatedRepo"), (401, "RepoNotFound")
FAULTS: dict[str, Case] = {
    "A gated model, no token": Case(refused=GATED),
    "A gated model, a token without access": Case(refused=(403, "GatedRepo"), token="hf_a"),
    "A misspelt or private model, no token": Case(refused=NOT_THERE),
    "A misspelt or private model, a token": Case(refused=(404, "RepoNotFound"), token="hf_a"),
    "A misspelt name": Case(ask=lambda: ask_for_model(path="someone/thong")),
    "A misspelt owner": Case(ask=lambda: ask_for_model(path="somone/thing")),
    "A token that has expired": Case(refused=(401, "Invalid credentials in Authorization header"), token="hf_a"),
    "A revision that is not there": Case(ask=lambda: ask_for_model(revision="v9")),
    "A model of a different family": Case(ask=lambda: ask_for_model(family="flux")),
    "A model of no family": Case(
        files=MODEL | {"model_index.json": INDEX.replace("StableDiffusion3", "StableDiffusionXL")}
    ),
    "The hub is down": Case(where=down),
    "The hub never answers": Case(where=silent),
    "`HF_HUB_OFFLINE=1`, and no copy": Case(offline=True),
    "Too many requests (429)": Case(refused=(429, "")),
    "An error of the hub (500)": Case(refused=(500, "")),
    "The disk is too small": Case(free=200_000),
    "The cache is read-only": Case(cache="prompts.txt/cache"),
    "Weights as `.bin` only": Case(files=all_weights(".bin")),
    "Weights in float16 only": Case(files=all_weights(".fp16.safetensors")),
    "Single files such as `.gguf` only": Case(files={"a.gguf": WEIGHTS, "a-fp8.safetensors": WEIGHTS}),
    "A shard is missing": Case(
        files=lacking("vae/a.") | {"vae/a-00001-of-00002.safetensors": WEIGHTS, "vae/a.safetensors.index.json": SHARDS}
    ),
    "A part has no weights": Case(files=lacking("vae/a.")),
    "A part has no configuration": Case(files=lacking("vae/c")),
    "A tokenizer has no vocabulary": Case(files=lacking("tokenizer/vocab")),
    "A tokenizer is missing": Case(files=lacking("tokenizer/")),
    "A description is cut off": Case(files=MODEL | {"model_index.json": INDEX[:-1]}),
    "A connection is reset in the middle of weights": Case(ask=load_model, refused=RESET),
    "A gated dataset, no token": Case(ask=ask_for_data, files=DATA, refused=GATED),
    "A misspelt or private dataset": Case(ask=ask_for_data, files=DATA, refused=NOT_THERE),
    "A revision of a dataset that is not there": Case(ask=lambda: ask_for_data(revision="v9"), files=DATA),
    "A dataset that is a script": Case(ask=ask_for_data, files=DATA | {"thing.py": ""}),
    "A dataset, and the cache is read-only": Case(ask=ask_for_data, files=DATA, cache="prompts.txt/cache"),
    "A dataset, and the disk is too small": Case(ask=ask_for_data, files=DATA, free=10),
    "A dataset of several configurations": Case(
        ask=ask_for_data,
        files={"README.md": CARD, "en/a.jsonl": DATA["train.jsonl"], "fr/a.jsonl": DATA["train.jsonl"]},
    ),
    "The hub is down, and no copy of a dataset": Case(ask=ask_for_data, files=DATA, where=down),
    "Too many requests for a dataset (429)": Case(ask=ask_for_data, files=DATA, refused=(429, "")),
    "A connection is reset in the middle of a dataset": Case(ask=ask_for_data, files=DATA, refused=RESET),
    "A gated LoRA, no token": Case(ask=lambda: ask_for_lora(f"{NAME}/a.safetensors"), files=LORA, refused=GATED),
    "A LoRA that is not there": Case(ask=lambda: ask_for_lora(f"{NAME}/c.safetensors"), files=LORA),
    "A LoRA, and the cache is read-only": Case(
        ask=lambda: ask_for_lora(f"{NAME}/a.safetensors"), files=LORA, cache="prompts.txt/cache"
    ),
    "A LoRA, and the disk is too small": Case(
        ask=lambda: ask_for_lora(f"{NAME}/a.safetensors"), files=LORA, free=50_000
    ),
    "Several LoRA in a repository": Case(ask=ask_for_lora, files=LORA),
    "`HF_HUB_OFFLINE=1`, and no file named": Case(ask=ask_for_lora, files=LORA, offline=True),
    "A gated model of a reward, no token": Case(ask=ask_for_reward, files=CLIP, refused=GATED),
    "A misspelt model of a reward": Case(ask=ask_for_reward, files=CLIP, refused=NOT_THERE),
    "`HF_HUB_OFFLINE=1`, and no copy of a reward": Case(ask=ask_for_reward, files=CLIP, offline=True),
    "A model of a reward, and the disk is too small": Case(ask=ask_for_reward, files=CLIP, free=50_000),
    "A model of a reward, and the cache is read-only": Case(ask=ask_for_reward, files=CLIP, cache="prompts.txt/cache"),
    "A model of a reward as `.bin` only": Case(
        ask=ask_for_reward, files={name.replace(".safetensors", ".bin"): text for name, text in CLIP.items()}
    ),
}


def test_the_page_has_every_fault() -> None:
    assert list(FAULTS) == list(ROWS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_the_hub_is_told_soon_and_before_weights(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FAULTS[fault]
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("a cat\na dog\n")
    for file, text in case.files.items():
        Path("hub", file).parent.mkdir(parents=True, exist_ok=True)
        Path("hub", file).write_text(text)
    if case.ask is load_model:
        shutil.rmtree("hub")
        tiny.pipeline().save_pretrained("hub")
    for name, value in {
        "HF_HUB_CACHE": str(tmp_path / case.cache),
        "HF_HUB_ETAG_TIMEOUT": 1,
        "HF_HUB_OFFLINE": case.offline,
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / case.cache / "datasets"))
    waits: list[float] = []  # Seconds before each retry of the client, in all minutes.
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=waits.append))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: case.token)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(case.free, 0, case.free))
    kind: Any = "datasets" if case.files.get("train.jsonl") or "README.md" in case.files else "models"
    with hub(NAME, Path("hub"), refused=case.refused, kind=kind) as asked, case.where():
        start = time.monotonic()
        with pytest.raises(UserError) as told:
            case.ask()
        seconds = time.monotonic() - start
    size = sum(Path("hub", file).stat().st_size for file in asked)
    print(f"\n| {fault} | {' '.join(str(told.value).split())} | {seconds:.1f} s | {size} bytes |")  # noqa: T201 - with -s
    said, downloaded = ROWS[fault]
    assert said in str(told.value)
    assert case.ask is load_model or (not waits and size == downloaded < SMALL)


def test_what_a_command_downloads_must_fit_on_the_disk_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for repository, files in {"model": MODEL, "clip": CLIP}.items():
        for file, text in files.items():
            Path(repository, file).parent.mkdir(parents=True, exist_ok=True)
            Path(repository, file).write_text(text)
    tree = config().model_dump() | {"rewards": {"clip_score": {"options": {"model": "someone/clip"}}}}
    hooks = ParameterHooks()
    hooks._parameters, hooks._runtime = Parameters.model_validate(tree), {}
    hooks._taken, hooks._kept = {}, {}
    catalog = DataCatalog({"records": MemoryDataset([PromptRecord(id="a", prompt="a cat")])})
    catalog["adapters"] = FolderDataset(filepath=str(tmp_path / "adapters"))
    hooks.after_catalog_created(catalog)

    def checked(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(free, 0, free))
        with hub(NAME, Path("model"), beside={"someone/clip": Path("clip")}):
            hooks.before_pipeline_run(register_pipelines()["train"], catalog)

    both = "0.1 MB of someone/clip are to be downloaded beside 0.3 MB of someone/thing (model.path) into "
    with pytest.raises(UserError, match=re.escape(f"rewards.clip_score.options.model: {both}")):
        checked(free=350_000)
    checked(free=10**9)
    assert "Downloads 0.4 MB in all into " in capsys.readouterr().out
