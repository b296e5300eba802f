"""Qwen2.5-VL and Qwen3-VL as policies: real classes, drawn weights; pictures differ in shape, queries in length."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig

from tests.conftest import stir
from tests.models.families.qwen2_5_vl.tiny import save_qwen2_5_vl, save_qwen3_vl
from tests.models.token_policies import CapturedOnCpu
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import GRPOConfig, LoraParams, PolicyConfig, SamplerConfig
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.models.families.qwen2_5_vl import AnswerModel, EncodedQueries
from visual_grpo.models.model import Model
from visual_grpo.models.tokens import generation
from visual_grpo.models.tokens.token_policy import TokenPolicy
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training.components import load_model

QUERIES = ["light red", "the small thing to the left of the other one", "左边的红色部分"]
SHAPES = [(64, 64), (32, 128), (96, 48)]
MODES = [pytest.param({}, marks=pytest.mark.slow), {"gradient_checkpointing": True}]
ONE = pytest.mark.parametrize("folder", [pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "qwen3_vl"], indirect=True)
"""For what both families share."""
TOKENS = 12
OPTIONS: dict[str, object] = {"max_tokens": TOKENS, "instruction": "Find: {query}"}
GREEDY = SamplerConfig(temperature=1.0, top_p=1.0, top_k=1)
ROLLOUT = SamplerConfig(temperature=1.0, top_p=1.0, top_k=0)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    {"qwen2_5_vl": save_qwen2_5_vl, "qwen3_vl": save_qwen3_vl}[request.param](folder)
    return folder


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[PromptRecord]:
    folder, generator = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    records = []
    for number, (query, (height, width)) in enumerate(zip(QUERIES, SHAPES, strict=True)):
        path = folder / f"{number}.png"
        blocks = generator.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        Image.fromarray(blocks.repeat(8, 0).repeat(8, 1)).save(path)
        records.append(PromptRecord(id=str(number), prompt=query, source_images=(path,)))
    return records


VlPolicy = TokenPolicy[EncodedQueries]


def model_of(folder: Path, **changes: Any) -> Model:
    """With an adapter that has an effect."""
    config = PolicyConfig(**{"rollout_batch": 4, **changes})
    whole = load_model(str(folder), train=["vl"], policy=config, options=OPTIONS, device="cpu")
    stir(whole.policy("vl", rollout=ROLLOUT, evaluation=GREEDY))
    return whole


def policy_of(folder: Path, **changes: Any) -> VlPolicy:
    policy: Any = model_of(folder, **changes).policy("vl", rollout=ROLLOUT, evaluation=GREEDY, kl_reference=True)
    return policy


def answers_of(policy: VlPolicy | Model) -> AnswerModel:
    assert isinstance(policy.model, AnswerModel)
    return policy.model


def rollout(policy: VlPolicy, records: list[PromptRecord], group_size: int = 3) -> Any:
    return policy.rollout(records, group_size, torch.Generator().manual_seed(3))


def plain_log_probs(policy: VlPolicy, records: list[PromptRecord], tokens: Tensor, *, pixels: bool = True) -> Tensor:
    """[B, T] by one plain forward on everything that the processor gives, one row of ``tokens`` a record."""
    answers = answers_of(policy)
    inputs = answers.processed(records)
    more = torch.ones_like(tokens)
    arguments: dict[str, Any] = {
        "input_ids": torch.cat([inputs["input_ids"], tokens], 1),
        "attention_mask": torch.cat([inputs["attention_mask"], more], 1),
        "mm_token_type_ids": torch.cat([inputs["mm_token_type_ids"], 0 * more], 1),
        "image_grid_thw": inputs["image_grid_thw"],
    }
    if pixels:
        arguments["pixel_values"] = inputs["pixel_values"]
    logits = answers.network(**arguments, logits_to_keep=tokens.shape[1] + 1).logits[:, :-1]
    return (logits + answers.bias).log_softmax(-1).gather(2, tokens[..., None])[..., 0]


@pytest.mark.parametrize("mode", MODES)
def test_the_replay_gives_the_samplers_log_probs_back(
    folder: Path, records: list[PromptRecord], mode: dict[str, Any]
) -> None:
    policy = policy_of(folder, **mode)
    got = rollout(policy, records)
    (chunk,) = policy.replay(got.trajectory, torch.arange(9))
    lengths = got.mask.sum(1)
    assert got.trajectory.prompts.mask.sum(1).unique().numel() == 3, "three lengths, so two are padded"
    assert lengths.min() < TOKENS, "some answers end early"
    torch.testing.assert_close(chunk.log_probs[got.mask], got.log_probs[got.mask], rtol=0, atol=5e-6)


@torch.no_grad()
def test_sampling_agrees_with_the_models_own_forward(folder: Path, records: list[PromptRecord]) -> None:
    """Which needs everything the processor gives: positions, token types, padding and pixels."""
    policy = policy_of(folder)
    got = rollout(policy, records, group_size=1)
    plain = plain_log_probs(policy, records, got.trajectory.tokens)
    torch.testing.assert_close(plain[got.mask], got.log_probs[got.mask], rtol=0, atol=5e-5)
    blind = plain_log_probs(policy, records, got.trajectory.tokens, pixels=False)
    assert (blind - got.log_probs)[got.mask].abs().max() > 0.1


@ONE
@pytest.mark.parametrize("targets", [None, "all-linear", r".*(_proj|\.linear_fc1)"])
def test_one_step_moves_every_lora_matrix_and_nothing_else(
    folder: Path, records: list[PromptRecord], targets: str | None
) -> None:
    policy = policy_of(folder, lora=LoraParams(target_modules=targets))  # B is not 0: a fresh A has no gradient yet
    model = answers_of(policy).network
    before = {name: value.clone() for name, value in model.named_parameters()}
    rewards = RewardSet({"length": (lambda prompts, samples: [float(len(s.text)) for s in samples], 1.0)})
    config = GRPOConfig(steps=1, prompts_per_step=3, group_size=4, learning_rate=1e-2)
    assert len(list(GRPOTrainer(policy, rewards, config).fit(records))) == 1
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {name for name, value in model.named_parameters() if value.requires_grad}
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert moved == {
        f"model.language_model.layers.{layer}.{'mlp' if name in projections[4:] else 'self_attn'}.{name}"
        f".lora_{side}.default.weight"
        for layer in range(3)
        for name in projections
        for side in "AB"
    }


@ONE
@torch.no_grad()
def test_what_an_answer_may_not_contain_is_banned(folder: Path, records: list[PromptRecord]) -> None:
    policy = policy_of(folder)
    model, tokenizer = answers_of(policy).network, answers_of(policy).processor.tokenizer
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    model.lm_head.weight[image] = 50 * model.lm_head.weight.abs().max()  # the likeliest token of all, were it allowed
    got = rollout(policy, records)
    assert not (got.trajectory.tokens == image).any()
    (chunk,) = policy.replay(got.trajectory, torch.arange(9))
    torch.testing.assert_close(chunk.log_probs[got.mask], got.log_probs[got.mask], rtol=0, atol=5e-6)


@ONE
def test_the_end_counts_and_what_follows_does_not(folder: Path, records: list[PromptRecord]) -> None:
    policy = policy_of(folder)
    got = rollout(policy, records)
    ends = set(answers_of(policy).ends)
    assert {sample.finished for sample in got.samples} == {True, False}
    for tokens, mask, sample in zip(got.trajectory.tokens.tolist(), got.mask, got.samples, strict=True):
        said = next((place for place, token in enumerate(tokens) if token in ends), TOKENS)
        assert mask.tolist() == [place <= said for place in range(TOKENS)]
        assert sample.finished == (said < TOKENS)
        assert sample.text == answers_of(policy).processor.tokenizer.decode(tokens[:said])


def test_frames_are_what_the_processor_made_of_the_images(folder: Path, records: list[PromptRecord]) -> None:
    whole = model_of(folder)
    samples = whole.generate(records, [1, 2, 3], GREEDY)
    inputs = answers_of(whole).processed(records)
    if answers_of(whole).network.config.model_type == "qwen3_vl":
        assert [sample.frame for sample in samples] == [(1001, 1001)] * 3
        return
    assert [sample.frame for sample in samples] == [
        (8 * rows, 8 * columns) for _, rows, columns in inputs["image_grid_thw"].tolist()
    ]
    assert samples[1].frame == (32, 128)


@torch.no_grad()
def test_greedy_answers_are_the_models_own(folder: Path, records: list[PromptRecord]) -> None:
    """The eval sampler agrees with transformers' generate(), which bans nothing, wherever that says nothing banned."""
    whole = model_of(folder)
    answers = answers_of(whole)
    ours = whole.generate(records, [1, 2, 3], GREEDY)
    assert answers.bias is not None
    banned = (answers.bias < 0).nonzero().flatten().tolist()
    inputs = answers.processed(records)
    ids = answers_of(whole).network.generate(**inputs, max_new_tokens=TOKENS, suppress_tokens=banned)
    theirs = answers.processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert len({sample.text for sample in ours}) == 3
    for sample, text in zip(ours, theirs, strict=True):
        # generate() leaves the end in the text where it is no special token.
        assert text.startswith(sample.text)
        assert len(text) <= len(sample.text) + 1


@ONE
def test_settings_that_no_sampler_here_has_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    given = {"repetition_penalty": 1.05, "min_p": 0.1, "no_repeat_ngram_size": 3, "suppress_tokens": [7]}
    GenerationConfig(**given, do_sample=True, typical_p=1.0, top_p=0.8, eos_token_id=1).save_pretrained(
        tmp_path / "model"
    )
    model_of(tmp_path / "model")
    said = capsys.readouterr().out
    assert {name for name in (*given, "typical_p", "top_p") if name in said} == set(given)
    model_of(folder)
    assert "generation_config" not in capsys.readouterr().out


@ONE
def test_an_answer_depends_on_its_own_record_and_seed_only(folder: Path, records: list[PromptRecord]) -> None:
    whole = model_of(folder)
    together = whole.generate(records, [5, 6, 7], ROLLOUT)
    alone = whole.generate(records[2:], [7], ROLLOUT)
    assert alone[0] == together[2]


@ONE
@torch.no_grad()
def test_the_adapter_loads_with_plain_peft(folder: Path, records: list[PromptRecord], tmp_path: Path) -> None:
    whole = model_of(folder)
    policy: Any = whole.policy("vl", rollout=ROLLOUT, evaluation=GREEDY)
    got = rollout(policy, records, group_size=1)
    whole.adapters.save(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    plain = PeftModel.from_pretrained(model, str(tmp_path / "vl"))
    inputs = AutoProcessor.from_pretrained(folder)(
        text=[
            answers_of(policy).processor.apply_chat_template(
                answers_of(policy)._messages(record), tokenize=False, add_generation_prompt=True
            )
            for record in records
        ],
        images=[Image.open(record.source_images[0]) for record in records],
        return_tensors="pt",
        padding=True,
    )
    first = plain(**inputs).logits[:, -1] + answers_of(policy).bias
    torch.testing.assert_close(
        first.log_softmax(-1).gather(1, got.trajectory.tokens[:, :1])[:, 0], got.log_probs[:, 0], rtol=0, atol=5e-5
    )
    again = load_model(str(folder), train=["vl"], adapters=tmp_path, options=OPTIONS, device="cpu")
    assert again.generate(records, [1, 2, 3], ROLLOUT) == whole.generate(records, [1, 2, 3], ROLLOUT)


def test_a_query_is_about_one_image(folder: Path) -> None:
    whole = model_of(folder)
    with pytest.raises(UserError, match="record 'a' has 0 source images"):
        whole.generate([PromptRecord(id="a", prompt="x")], [1], GREEDY)


@ONE
def test_captured_steps_give_the_same_answers(
    folder: Path, records: list[PromptRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that end early, pictures of different sizes."""
    expected = rollout(policy_of(folder), records)
    monkeypatch.setattr(generation, "TokenSteps", CapturedOnCpu)
    found = rollout(policy_of(folder), records)
    assert found.trajectory.mask.sum(1).unique().numel() > 1
    assert torch.equal(found.trajectory.tokens, expected.trajectory.tokens)
    assert torch.equal(found.trajectory.mask, expected.trajectory.mask)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-6)
