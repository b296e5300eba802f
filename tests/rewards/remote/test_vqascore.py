"""VQAScore's arithmetic by hand, and a small CLIP-FlanT5 in the published layout, here and over HTTP."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.rewards.learned import tiny
from tests.rewards.remote.processes import WORKERS, module_of, started
from visual_grpo.common.images import to_pil
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.remote.http_reward import HttpReward
from visual_grpo.rewards.reward import FunctionReward

question, clip_flant5 = module_of("vqascore", "vqa_question"), module_of("vqascore", "clip_flant5")
TOWER = "vision_tower.vision_tower.vision_model.post_layernorm.weight"


def test_the_probability_of_yes_by_hand() -> None:
    # P(Yes) = 0.36, P(end | Yes) = 0.81: the package reports sqrt(0.36 * 0.81) = 0.54.
    answer = [math.log(0.36), math.log(0.81)]
    assert question.probability(answer) == pytest.approx(0.36)
    assert question.as_published(answer) == pytest.approx(0.54)
    # An answer of two tokens: 0.5 * 0.4; (0.5 * 0.4 * 0.2)^(1/3) = 0.04^(1/3).
    answer = [math.log(0.5), math.log(0.4), math.log(0.2)]
    assert question.probability(answer) == pytest.approx(0.2)
    assert question.as_published(answer) == pytest.approx(0.341995, abs=1e-6)


def small_clip_flant5(folder: Path, shards: int = 2) -> Path:
    """T5's real class with drawn weights, saved as CLIP-FlanT5's training saves; a CLIP and a tokenizer beside it."""
    from transformers import T5Config, T5ForConditionalGeneration, T5Tokenizer

    tower = tiny.saved_clip(folder / "clip")
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁Yes", -1.0)]
    pieces += [(character, -4.0) for character in map(chr, range(33, 127))]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0)
    tokenizer.save_pretrained(folder / "tokenizer")
    sizes = {"vocab_size": 128, "d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 3}
    config = T5Config(**sizes, feed_forward_proj="gated-gelu")  # More tokens than the tokenizer has, as in Flan-T5.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(config)
        tiny.loud(model, 0.2)
        projector = {f"mm_projector.{n}.weight": torch.randn(24, size) * 0.3 for n, size in ((0, 16), (2, 24))}
        lm_head = torch.randn(128, 24) * 0.4
        projector |= {f"mm_projector.{n}.bias": torch.randn(24) * 0.1 for n in (0, 2)}
    tensors = {**model.state_dict(), **projector, TOWER: torch.zeros(16)}
    tensors["embed_tokens.weight"] = tensors["shared.weight"]
    tensors["lm_head.weight"] = lm_head  # Flan-T5's is one of its own.
    settings = config.to_dict() | {"architectures": ["CLIPT5ForConditionalGeneration"], "model_type": "clip_t5"}
    settings |= {"tie_word_embeddings": False, "mm_vision_tower": str(tower), "mm_hidden_size": 16}
    settings |= {"mm_projector_type": "mlp2x_gelu", "mm_vision_select_layer": -2, "mm_vision_select_feature": "patch"}
    del settings["scale_decoder_outputs"]  # Of transformers 5 only, which makes it of tie_word_embeddings.
    (folder / "config.json").write_text(json.dumps(settings))
    save(folder, tensors, shards)
    return folder


def save(folder: Path, tensors: dict[str, Tensor], shards: int = 2) -> None:
    files = [f"pytorch_model-{n + 1:05d}-of-{shards:05d}.bin" for n in range(shards)]
    where = {name: files[n % shards] for n, name in enumerate(sorted(tensors))}
    for file in files:
        torch.save({name: tensors[name] for name, own in where.items() if own == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_clip_flant5(tmp_path_factory.mktemp("clip-flant5"))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.bin") for name, value in torch.load(file).items()}


def by_hand(folder: Path, image: Image.Image, text: str) -> list[float]:
    """The same from the parts, in float32, without what transformers adds to T5's encoder and decoder."""
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel, T5Config, T5ForConditionalGeneration

    tensors = {name: value.bfloat16().float() for name, value in tensors_of(folder).items()}
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("model_type")
    t5 = T5ForConditionalGeneration(T5Config(**settings)).eval()
    t5.load_state_dict({name: tensors[name.replace("lm_head", "shared")] for name in t5.state_dict()})
    clip = CLIPModel.from_pretrained(folder / "clip", dtype=torch.bfloat16).vision_model.float().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    pixels = CLIPImageProcessor.from_pretrained(folder / "clip")(images=image, return_tensors="pt").pixel_values
    with torch.inference_mode():
        seen = clip(pixels, output_hidden_states=True).hidden_states[-2][:, 1:]
        for number in (0, 2):
            weight, bias = tensors[f"mm_projector.{number}.weight"], tensors[f"mm_projector.{number}.bias"]
            seen = torch.nn.functional.linear(seen if number == 0 else torch.nn.functional.gelu(seen), weight, bias)
        before, after = (torch.tensor([tokenizer(part).input_ids]) for part in question.around_the_picture(text))
        assert before[0, -1] == after[0, -1] == tokenizer.eos_token_id
        read = t5.encoder(inputs_embeds=torch.cat([t5.shared(before), seen, t5.shared(after)], 1)).last_hidden_state
        yes, end = tokenizer("Yes").input_ids
        said = torch.tensor([[tokenizer.pad_token_id, yes]])
        spoken = t5.decoder(said, encoder_hidden_states=read).last_hidden_state[0]
        first, second = (spoken @ tensors["lm_head.weight"].T)[:, :99].log_softmax(-1)
        return [first[yes].item(), second[end].item()]


def test_a_small_model_is_what_its_parts_are(folder: Path) -> None:
    model = clip_flant5.ClipFlanT5(str(folder), str(folder / "tokenizer"), None, "cpu")
    assert len(model.tokenizer) == 99
    assert {parameter.dtype for parameter in model.language.parameters()} == {torch.bfloat16}
    model.language.float()
    model.vision.float()
    images = [to_pil(tiny.picture(seed, 40, 40)) for seed in (0, 1)]
    pairs = list(itertools.product(images, ("a cat", "a dog on the mat")))
    answers = [model.answer(*pair) for pair in pairs]
    assert answers == [pytest.approx(by_hand(folder, *pair), abs=1e-5) for pair in pairs]
    firsts = sorted(answer[0] for answer in answers)
    assert min(after - before for before, after in itertools.pairwise(firsts)) > 1e-3


def test_a_picture_is_filled_to_a_square() -> None:
    red, grey = (255, 0, 0), (9, 9, 9)
    wide, tall = (clip_flant5.square(Image.new("RGB", size, red), grey) for size in ((6, 2), (1, 4)))
    assert (wide.size, tall.size) == ((6, 6), (4, 4))
    assert [wide.getpixel((0, row)) for row in range(6)] == [grey, grey, red, red, grey, grey]
    assert [tall.getpixel((column, 0)) for column in range(4)] == [grey, red, grey, grey]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("mm_projector.2.bias"), r"missing \['mm_projector.2.bias'\]"),
        (lambda tensors: tensors.pop("lm_head.weight"), r"missing \['lm_head.weight'\]"),
        (lambda tensors: tensors.update({"model.layers.0.w": torch.zeros(1)}), r"not of it \['model.layers.0.w'\]"),
    ],
)
def test_weights_of_another_model(tmp_path: Path, change: Any, reason: str) -> None:
    small_clip_flant5(tmp_path, shards=1)
    tensors = tensors_of(tmp_path)
    change(tensors)
    save(tmp_path, tensors, shards=1)
    with pytest.raises(ValueError, match=reason):
        clip_flant5.ClipFlanT5(str(tmp_path), str(tmp_path / "tokenizer"), None, "cpu")


@pytest.mark.slow
def test_a_small_model_over_http(folder: Path) -> None:
    texts = ("a cat", "a dog on the mat", " ", "a cat")
    prompts = [PromptRecord(id=str(row), prompt=text) for row, text in enumerate(texts)]
    images = [tiny.picture(row, 40, 48) for row in range(4)]
    weights = {"VQASCORE": str(folder), "VQASCORE_TOKENIZER": str(folder / "tokenizer")}
    with started(WORKERS / "vqascore" / "worker.py", **weights) as url:
        reward = FunctionReward("vqa", HttpReward(url, model=f"vqascore:{folder}"), max_failed_share=0)
        output = reward(prompts, images)
        alone = reward(prompts[3:], images[3:])
    assert output.values.isnan().tolist() == [False, False, True, False]
    known = output.values[[0, 1, 3]]
    assert 0 < known.min() < known.max() < 1
    assert len(set(known.tolist())) == 3
    assert alone.values[0] == output.values[3]
    assert output.parts["published"].isnan().tolist() == [False, False, True, False]
