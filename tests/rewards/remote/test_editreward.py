"""EditReward's wording and weights, and a small model of its classes, here and over HTTP."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from tests.rewards.learned import tiny
from tests.rewards.remote.processes import WORKERS, module_of, started, told_at_its_end
from visual_grpo.common.images import to_pil
from visual_grpo.rewards.remote.http_reward import HttpReward
from visual_grpo.rewards.reward import FunctionReward

wording = module_of("editreward", "edit_wording")
edit_reward_model = module_of("editreward", "edit_reward_model")
Small = tuple[Path, Any, dict[str, Tensor]]
"""Its folder, its base model, and the tensors of its weights."""

# Texts that stand where those of the authors' repository do.
PROMPTS = '''
INSTRUCTION_EDIT_FOLLOWING = "an older one"
INSTRUCTION_EDIT_FOLLOWING = """Was it done? {text_prompt}
"""
INSTRUCTION_EDIT_QUALITY = "Is it good? {text_prompt}"
OTHER = INSTRUCTION_EDIT_QUALITY + 1 / 0
'''
EMBEDDING = "model.language_model.embed_tokens.weight"
COLLATOR = 'raise SystemExit\nprompt_with_special_token = " Score: <|Reward|> END"\n'


def copy_of_the_repository(folder: Path, prompts: str = PROMPTS, collator: str = COLLATOR) -> Path:
    package = folder / "EditReward" / "dataset"
    package.mkdir(parents=True)
    (package / "prompts.py").write_text(prompts)
    (package / "data_collator_qwen_edit.py").write_text(collator)
    return folder


def test_the_wording_is_read_and_nothing_is_run(tmp_path: Path) -> None:
    copy = copy_of_the_repository(tmp_path)
    read = wording.read_wording(str(copy))
    assert read == wording.read_wording(str(copy / "EditReward"))
    assert read == {
        "following": "Was it done? {text_prompt}\n Score: <|Reward|> END",
        "quality": "Is it good? {text_prompt} Score: <|Reward|> END",
    }
    assert wording.asked(read["quality"], "a {x} hat") == "Is it good? a {x} hat Score: <|Reward|> END"


@pytest.mark.parametrize(
    ("prompts", "collator", "reason"),
    [
        (PROMPTS.replace("_QUALITY", "_LOOK"), COLLATOR, "another version of the repository"),
        (PROMPTS, COLLATOR.replace("<|Reward|>", ""), "another version of the repository"),
        (PROMPTS.replace("{text_prompt}", "{text}"), COLLATOR, "another version of the repository"),
        ("a b", COLLATOR, "prompts.py cannot be read"),
    ],
)
def test_another_version_of_the_repository(tmp_path: Path, prompts: str, collator: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        wording.read_wording(str(copy_of_the_repository(tmp_path, prompts, collator)))


def small_edit_reward(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Qwen2.5-VL's real class with drawn weights as the base, and what EditReward's training saves of it."""
    from examples.scenes.small_qwen2_5_vl import build_model, build_processor

    processor = build_processor(256, 256)
    with torch.random.fork_rng():
        model = build_model(processor, seed=1)
        model.save_pretrained(folder / "base")
        processor.save_pretrained(folder / "base")
        model.resize_token_embeddings(len(processor.tokenizer) + 1)
        sizes = {0: (1024, model.config.text_config.hidden_size), 3: (16, 1024), 5: (2, 16)}
        heads = {
            f"rm_heads.head_{head}.{layer}.{kind}": torch.randn(size if kind == "weight" else size[:1]) * 0.3
            for head, (layer, size), kind in itertools.product((0, 1), sizes.items(), ("weight", "bias"))
        }
    tensors = {name: value.bfloat16().contiguous().clone() for name, value in model.state_dict().items()} | heads
    save_file(tensors, folder / "model.safetensors")
    return model, tensors


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("editreward")
    copy_of_the_repository(folder)
    return folder, *small_edit_reward(folder)


def test_a_small_model_is_what_its_parts_are(small: Small) -> None:
    folder = small[0]
    read = wording.read_wording(str(folder))
    reward = edit_reward_model.EditReward(str(folder), str(folder / "base"), read, "cpu")
    assert {parameter.dtype for parameter in reward.model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for head in reward.heads for parameter in head.parameters()} == {torch.float32}
    reward.model.float()
    positions: list[Tensor] = []
    reward.model.language_model.register_forward_pre_hook(
        lambda _, __, given: positions.append(given["position_ids"]), with_kwargs=True
    )
    source, edited = (to_pil(tiny.picture(seed, 64, 64)) for seed in (0, 1))
    found = reward(source, edited, "a hat")
    expected = by_hand(small, [source, edited], read)
    assert list(found) == list(expected) == ["following", "quality"]
    assert all(torch.equal(given, torch.arange(given.shape[-1]).expand(3, 1, -1)) for given in positions)
    assert [found[aspect] for aspect in expected] == [pytest.approx(own, abs=1e-4) for own in expected.values()]
    assert reward(edited, source, "a hat")["quality"] != pytest.approx(found["quality"], abs=1e-3)


def by_hand(small: Small, images: list[Image.Image], read: dict[str, str]) -> dict[str, tuple[float, float]]:
    """The same from the parts: images of 256 tokens, their features in the text, positions counted through."""
    from transformers import AutoProcessor

    folder, model, tensors = small
    model.bfloat16().float()  # The rotary frequencies are rounded as the weights are.
    model.load_state_dict({name: value.float() for name, value in tensors.items() if not name.startswith("rm_heads")})
    processor = AutoProcessor.from_pretrained(folder / "base")
    token = len(processor.tokenizer)
    processor.tokenizer.add_tokens(["<|Reward|>"], special_tokens=True)
    found = {}
    for head, (aspect, text) in enumerate(read.items()):
        picture = "<|vision_start|><|image_pad|><|vision_end|>"
        said = f"<|im_start|>user\n{picture * 2}{text.replace('{text_prompt}', 'a hat')}<|im_end|>\n"
        inputs = processor(
            text=[f"{said}<|im_start|>assistant\n"],
            images=[image.resize((256, 256), Image.Resampling.BICUBIC) for image in images],
            return_tensors="pt",
        )
        ids = inputs["input_ids"]
        assert (ids == model.config.image_token_id).sum() == 2 * 256
        with torch.inference_mode():
            features = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).pooler_output
            embedded = model.get_input_embeddings()(ids)
            embedded[ids == model.config.image_token_id] = features
            counted = torch.arange(ids.shape[1])[None]
            states = model.model.language_model(inputs_embeds=embedded, position_ids=counted).last_hidden_state
            state = states[0, ids[0].tolist().index(token)]
            for layer in (0, 3, 5):
                weight, bias = (tensors[f"rm_heads.head_{head}.{layer}.{kind}"] for kind in ("weight", "bias"))
                state = weight @ (state if layer == 0 else state.relu()) + bias
        found[aspect] = (state[0].item(), state[1].item())
    return found


def test_the_names_of_older_transformers() -> None:
    heads = {
        f"rm_heads.head_{head}.{layer}.{kind}": torch.tensor(float(head))
        for head, layer, kind in itertools.product((0, 1), (0, 3, 5), ("weight", "bias"))
    }
    names = ["visual.a", "model.visual.b", "model.layers.0.c", "model.language_model.norm.d", "lm_head.weight"]
    body, (first, second) = edit_reward_model.split(heads | dict.fromkeys(names, torch.zeros(1)))
    assert sorted(body) == ["language_model.layers.0.c", "language_model.norm.d", "visual.a", "visual.b"]
    assert (first["5.bias"].item(), second["0.weight"].item()) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("rm_heads.head_1.5.bias"), "must have two heads of three layers"),
        (lambda tensors: tensors.update({"rm_head.weight": torch.zeros(1)}), r"not of it \['rm_head.weight'\]"),
        (lambda tensors: tensors.pop("model.visual.merger.ln_q.weight"), r"missing \['visual.merger.ln_q.weight'\]"),
        (lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING][:9]}), r"has 9 tokens, .* need \d+"),
    ],
)
def test_weights_of_another_model(small: Small, tmp_path: Path, change: Any, reason: str) -> None:
    changed = dict(small[2])
    change(changed)
    torch.save({"model": changed}, tmp_path / "model.pth")
    with pytest.raises(ValueError, match=reason):
        edit_reward_model.EditReward(str(tmp_path), str(small[0] / "base"), {}, "cpu")


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"model": Path()}, tmp_path / "model.pth")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        edit_reward_model.read(edit_reward_model.weights_file(str(tmp_path)))
    (tmp_path / "model.pth").unlink()
    with pytest.raises(ValueError, match=r"has none of model\.pth, model\.safetensors"):
        edit_reward_model.weights_file(str(tmp_path))


def environment(folder: Path) -> dict[str, str]:
    return {"EDITREWARD": str(folder), "EDITREWARD_BASE": str(folder / "base"), "EDITREWARD_CODE": str(folder)}


@pytest.mark.slow
def test_a_small_model_over_http(small: tuple[Path, Any, Any], tmp_path: Path) -> None:
    folder = small[0]
    sources = [tiny.picture(seed, 64, 64) for seed in (0, 1, 1)]
    asked = [tiny.record(f"r{row}", "a hat", tmp_path, source=source) for row, source in enumerate(sources)]
    images = [tiny.picture(2, 64, 64)] * 3
    with started(WORKERS / "editreward" / "worker.py", **environment(folder)) as url:
        reward = FunctionReward("edit", HttpReward(url, model=f"editreward:{folder}", sources=True), max_failed_share=0)
        output = reward(asked, images)
        alone = reward(asked[1:2], images[1:2])
        without = FunctionReward("edit", HttpReward(url), max_failed_share=0)(asked, images)
    assert output.values[0] != output.values[1] == output.values[2] == alone.values[0]
    mean = (output.parts["following"] + output.parts["quality"]) / 2
    assert output.values.tolist() == pytest.approx(mean.tolist())
    assert output.parts["log_spread"].isfinite().all()
    assert without.values.isnan().all()
    assert not without.failed


@pytest.mark.slow
def test_what_is_missing_is_told(small: tuple[Path, Any, Any], tmp_path: Path) -> None:
    worker = WORKERS / "editreward" / "worker.py"
    assert "ValueError: EDITREWARD_CODE must name a copy of github.com/TIGER" in told_at_its_end(worker)
    told = told_at_its_end(worker, **environment(small[0]) | {"EDITREWARD": str(tmp_path)})
    assert f"Error: editreward:{tmp_path} could not be loaded: ValueError: {tmp_path} has none of model.pth" in told
    assert told.rstrip().endswith("EDITREWARD_CODE names a copy of the repository TIGER-AI-Lab/EditReward.")
