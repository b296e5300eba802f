"""Released repositories' layouts from an empty cache, and again without a network: the same model, and no request."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer

from tests.evaluation.defaults import parameters
from tests.hub import COMMIT, counted, hub
from tests.models import released
from tests.rewards.segmentation.small_sam2 import save_sam2
from visual_grpo.common.types import PromptRecord, TextSample, VideoSample
from visual_grpo.config import PolicyConfig, SamplerConfig
from visual_grpo.models.family import find_family
from visual_grpo.models.loading import downloaded
from visual_grpo.models.module import ModelSettings
from visual_grpo.operations.preflight.check import pinned
from visual_grpo.rewards.segmentation import PointPrompt
from visual_grpo.rewards.segmentation.sam2 import Sam2Segmenter

SIZE = (64, 64)
FRAMES = {"wan": 9, "wan_i2v": 9, "ltx": 9}
PROMPT = "a red circle"
SAM = "facebook/sam2.1-hiera-large"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize("name", released.RELEASED)
def test_a_released_layout_loads_and_loads_again_without_a_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = released.save(name, tmp_path / "repository")
    with hub(name, folder) as asked:
        first = _digests(name, tmp_path)
    beside = {"README.md", ".gitattributes", *released.RELEASED[name].beside}
    assert not beside & set(asked), "only what is read is downloaded"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with counted() as requests:
        assert _digests(name, tmp_path) == first
    assert requests == []


def test_bytes_are_counted_while_a_model_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TQDM_POSITION", "-1")  # As at a terminal.
    name = "Qwen/Qwen2.5-VL-7B-Instruct"
    with hub(name, released.save(name, tmp_path / "repository")):
        capfd.readouterr()
        downloaded(name, None)
    shown = capfd.readouterr().err
    assert re.search(r"\d\.\d+MB / \d\.\d+MB", shown), shown


@pytest.mark.slow
def test_sam_loads_and_loads_again_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_sam2(tmp_path / "repository")
    (folder / "sam2.1_hiera_large.pt").write_bytes(b"not read")
    image = torch.randint(0, 256, (3, 48, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)

    def mask() -> Tensor:
        segmenter = Sam2Segmenter(SAM, device="cpu")
        segmenter.check_machine()
        points = PointPrompt(positives=((20.0, 20.0),), negatives=(), box=None)
        return segmenter.masks(segmenter.embed(image), [points])

    with hub(SAM, folder) as asked:
        first = mask()
    assert "sam2.1_hiera_large.pt" not in asked
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with counted() as requests:
        assert torch.equal(mask(), first)
    assert requests == []


@pytest.mark.parametrize(("kind", "files"), [released.T5, released.T5_FAST])
def test_t5s_tokens_are_those_of_sentencepiece(kind: str, files: tuple[str, ...], tmp_path: Path) -> None:
    released.rewrite(tmp_path / "tokenizer", kind, files)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer/spiece.model"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for prompt in (PROMPT, "A  quick\tFox, jumps!", "ﬁve ½ 一只猫"):
        assert tokenizer(prompt).input_ids == [*reference.encode(prompt), reference.eos_id()]


def _digests(name: str, tmp_path: Path) -> dict[str, str]:
    """Of every weight, and of what is generated, after the command's own look-up."""
    config, _ = pinned(parameters(model={"path": name, "device": "cpu"}, **_ANY))
    assert config.model.revision == COMMIT
    family = find_family("auto", name, COMMIT)
    assert family.name == released.RELEASED[name].family
    loaded = family.load(name, config.model)
    parts = loaded.components if hasattr(loaded, "components") else {"model": loaded[0]}
    digests = {
        f"{part}.{key}": hashlib.sha256(value.numpy().tobytes()).hexdigest()
        for part, network in parts.items()
        if isinstance(network, torch.nn.Module)
        for key, value in network.state_dict().items()
    }
    settings = ModelSettings(size=SIZE, frames=FRAMES.get(family.name), policy=PolicyConfig(), options=family.options())
    images: tuple[Path, ...] = ()
    if "t2i" not in family.tasks:
        Image.new("RGB", (64, 64), (200, 30, 30)).save(tmp_path / "source.png")
        images = (tmp_path / "source.png",)
    record = PromptRecord(id="a", prompt=PROMPT, source_images=images)
    flow = {"steps": 2, "guidance_scale": 1.5} if "flow" in family.kinds() else {}
    (sample,) = family.build(loaded, settings).generate([record], [0], SamplerConfig(**flow))
    return digests | {"sample": hashlib.sha256(_bytes(sample)).hexdigest()}


def _bytes(sample: Any) -> bytes:
    if isinstance(sample, TextSample):
        return sample.text.encode()
    pixels: Tensor = sample.frames if isinstance(sample, VideoSample) else sample
    return pixels.contiguous().numpy().tobytes()


_ANY: dict[str, Any] = {
    "modules": {"dit": None},
    "evaluation": {"controls": []},
    "sampling": {n: {"temperature": None} for n in ("rollout", "eval")},
}
