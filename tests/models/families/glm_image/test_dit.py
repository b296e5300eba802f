from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import GlmImagePipeline
from peft import PeftModel

from tests.conftest import SIZE, stir
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import FlowConfig, PolicyConfig, SamplerConfig
from visual_grpo.models.families.glm_image.decoder import DecoderConditions, GlmImageDecoder
from visual_grpo.models.families.glm_image.model import GlmImage
from visual_grpo.models.families.glm_image.processor import PreviewProcessor
from visual_grpo.models.family_check import replay_error
from visual_grpo.models.flow.flow_policy import FlowPolicy
from visual_grpo.training.components import load_model, load_policy

TEXTS = [
    "a red circle",
    "a sign that says 'OPEN' and a small yellow square at the bottom, with more words than its neighbours",
    "画一只猫 “猫咪”",
]
RECORDS = [PromptRecord(id=str(i), prompt=text) for i, text in enumerate(TEXTS)]
ROLLOUT = SamplerConfig(temperature=1.0, top_p=1.0, top_k=0, steps=4, guidance_scale=1.5)
TWO_STEPS = FlowConfig(window_steps=2)
MODES: list[dict[str, Any]] = [
    {"flow": FlowConfig(sampler="cps", window_steps=None)},
    {"flow": FlowConfig(window_start=1, window_steps=2), "gradient_checkpointing": True},
]

DitPolicy = FlowPolicy[DecoderConditions]


def model_with(folder: Path, **changes: Any) -> GlmImage:
    model = load_model(str(folder), size=SIZE, device="cpu", **changes)
    assert isinstance(model, GlmImage)
    return model


def policy_with(folder: Path, sampler: SamplerConfig = ROLLOUT, **changes: Any) -> DitPolicy:
    policy: Any = load_policy(
        str(folder),
        module="dit",
        size=SIZE,
        policy=PolicyConfig(**changes),
        rollout=sampler,
        kl_reference=True,
        device="cpu",
    )
    stir(policy)
    return policy


def rollout(policy: DitPolicy, group_size: int = 2) -> Any:
    return policy.rollout(RECORDS, group_size, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("mode", MODES)
def test_the_replay_gives_the_samplers_log_probs_back(pipeline_folder: Path, mode: dict[str, Any]) -> None:
    """Prompts of three glyph lengths, guided, with an adapter that has an effect."""
    policy = policy_with(pipeline_folder, **mode)
    got = rollout(policy)
    chunks = list(policy.replay(got.trajectory, torch.arange(6)))
    steps = mode["flow"].window_steps or 3
    assert [chunk.steps for chunk in chunks] == [slice(i, i + 1) for i in range(steps)]
    assert got.log_probs.shape == got.mask.shape == (6, steps)
    # In the mean over elements, the unit in which the published floor is 2e-5 (without guidance).
    assert replay_error(policy, RECORDS) < 1e-6


def test_the_ode_is_the_pipelines_own(pipeline_folder: Path) -> None:
    image = model_with(pipeline_folder)
    decoder = image.decoder(ROLLOUT)
    tokens = torch.randint(0, 200, (3, 2, 3), generator=torch.Generator().manual_seed(1))
    conditions = decoder.conditions_of(RECORDS, tokens, 1.5)
    denoiser = image.denoiser(decoder)
    noise = denoiser.start_noise([4, 5, 6])
    ours = denoiser.integrate(conditions, torch.arange(3), [4, 5, 6], 5)
    for row, text in enumerate(TEXTS):
        want = image.pipeline(
            prompt=text,
            prior_token_ids=tokens[row : row + 1].repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1),
            latents=noise[row : row + 1],
            height=SIZE[0],
            width=SIZE[1],
            num_inference_steps=5,
            guidance_scale=1.5,
            output_type="latent",
        ).images
        torch.testing.assert_close(ours[row : row + 1], want, rtol=0, atol=1e-5)


def test_rows_of_one_noise_share_the_first_unconditional_step(pipeline_folder: Path) -> None:
    image = model_with(pipeline_folder)
    decoder = image.decoder(ROLLOUT)
    tokens = torch.randint(0, 200, (3, 2, 3), generator=torch.Generator().manual_seed(1))
    seeds = [7, 4, 7]
    rows: list[tuple[bool, int]] = []
    image.pipeline.transformer.register_forward_pre_hook(
        lambda _, __, given: rows.append((bool(given["prior_token_drop"]), len(given["hidden_states"]))),
        with_kwargs=True,
    )

    def latents(known: list[int] | None) -> torch.Tensor:
        rows.clear()
        conditions = decoder.conditions_of(RECORDS, tokens, 1.5, known)
        return image.denoiser(decoder).integrate(conditions, torch.arange(3), seeds, 3)

    want = latents(None)
    assert [count for dropped, count in rows if dropped] == [3, 3, 3]
    torch.testing.assert_close(latents(seeds), want, rtol=0, atol=1e-5)
    assert [count for dropped, count in rows if dropped] == [2, 3, 3]
    assert (latents([7, 7, 4]) - want).abs().max() > 1e-3, "another row's noise gives another picture"


def test_the_unconditional_branch_carries_no_gradient(pipeline_folder: Path) -> None:
    """The guided velocity's gradient is the conditional one's, times the guidance."""
    policy = policy_with(pipeline_folder)
    decoder = policy.model
    assert isinstance(decoder, GlmImageDecoder)
    tokens = torch.randint(0, 200, (3, 2, 3), generator=torch.Generator().manual_seed(1))
    state, rows = policy.denoiser.start_noise([1, 2, 3]), torch.arange(3)
    gradients = []
    for guidance in (1.0, 1.5):
        velocity = decoder.velocity(decoder.conditions_of(RECORDS, tokens, guidance), rows)(state, 700.0)
        gradients.append(torch.autograd.grad(velocity.sum(), policy.adapter.parameters()))
    for plain, guided in zip(*gradients, strict=True):
        torch.testing.assert_close(guided, 1.5 * plain, rtol=1e-4, atol=1e-5)


def test_a_drawn_window_and_a_share_are_the_same_for_all_rows_and_vary_between_rollouts(pipeline_folder: Path) -> None:
    sampler = ROLLOUT.model_copy(update={"steps": 6, "guidance_scale": 1.0})
    flow = FlowConfig(window_start=None, window_steps=3, train_share=0.6)
    policy = policy_with(pipeline_folder, sampler, flow=flow)
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(6):
        got = policy.rollout(RECORDS[:1], 2, generator)
        assert got.log_probs.shape == (2, 2)
        assert max(got.trajectory.steps) < 5
        assert got.trajectory.steps[-1] - got.trajectory.steps[0] <= 2
        seen.add(got.trajectory.steps)
    assert len({steps[0] for steps in seen}) > 1
    assert len({steps[1] - steps[0] for steps in seen}) > 1, "not always the first ones of the window"


def test_the_reference_is_the_base_model_and_its_kl_is_closed_form(pipeline_folder: Path) -> None:
    policy = policy_with(pipeline_folder)
    got = rollout(policy)
    plain: Any = load_policy(str(pipeline_folder), module="dit", size=SIZE, rollout=ROLLOUT, device="cpu")
    rows = torch.arange(6)
    for column, chunk in enumerate(policy.replay(got.trajectory, rows)):
        mean, std = plain.denoiser.step(
            got.trajectory.states[:, column],
            got.trajectory.conditions,
            got.trajectory.entries,
            got.trajectory.schedule,
            got.trajectory.steps[column],
        )
        torch.testing.assert_close(got.trajectory.reference_means[:, column], mean.detach(), rtol=0, atol=1e-5)
        want = (got.trajectory.means[:, column] - mean).square().flatten(1).mean(1) / (2 * std**2)
        assert chunk.kl is not None
        torch.testing.assert_close(chunk.kl[:, 0], want.detach(), rtol=1e-3, atol=1e-7)
        assert chunk.kl.requires_grad
        assert chunk.kl.min() > 1e-6


def test_both_adapters_load_together_into_the_plain_pipeline(pipeline_folder: Path, tmp_path: Path) -> None:
    image = model_with(pipeline_folder, train=["ar", "dit"])
    for module in ("ar", "dit"):
        for number, parameter in enumerate(image.adapters[module].parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.data.add_(0.05 * noise)
    image.adapters.save(tmp_path)
    pipe = GlmImagePipeline.from_pretrained(pipeline_folder)
    pipe.set_progress_bar_config(disable=True)
    pipe.processor = PreviewProcessor.of(pipe.processor, preview_side=2)
    base = _plain_image(pipe)
    pipe.transformer.load_lora_adapter(str(tmp_path / "dit"), prefix=None, use_safetensors=True)
    with_dit = _plain_image(pipe)
    pipe.vision_language_encoder = PeftModel.from_pretrained(pipe.vision_language_encoder, tmp_path / "ar")
    with_both = _plain_image(pipe)
    assert (base - with_dit).abs().max() > 0.02
    assert (with_dit - with_both).abs().max() > 0.02
    restored = model_with(pipeline_folder, train=["ar", "dit"], adapters=tmp_path)
    sampler = SamplerConfig(steps=3, guidance_scale=1.5)
    for ours, again in zip(
        image.generate(RECORDS, [1, 2, 3], sampler), restored.generate(RECORDS, [1, 2, 3], sampler), strict=True
    ):
        assert torch.equal(ours, again)
    with pytest.raises(UserError, match=r"holds no adapter.*Train one"):
        model_with(pipeline_folder, train=["dit"], adapters=tmp_path / "ar")


def test_generation_may_be_stochastic(pipeline_folder: Path) -> None:
    image = model_with(pipeline_folder)
    noisy = ROLLOUT.model_copy(update={"stochastic": True})
    plain, one, two = (image.generate(RECORDS[:1], [3], sampler)[0] for sampler in (ROLLOUT, noisy, noisy))
    assert torch.equal(one, two)
    assert (one.int() - plain.int()).abs().max() > 8


def test_a_joint_rollout_goes_on_from_the_tokens_it_trains(pipeline_folder: Path) -> None:
    image = model_with(pipeline_folder, train=["ar", "dit"])
    sampler = SamplerConfig(steps=4, guidance_scale=1.5)
    ar, dit = (image.policy(module, rollout=ROLLOUT, evaluation=sampler) for module in ("ar", "dit"))
    both = image.joint_policy(ar, dit).joint_rollout(RECORDS, 2, 3, torch.Generator().manual_seed(0))
    assert both.outer is not None
    assert both.inner is not None
    tokens = both.outer.trajectory.tokens[:, image.tokens(sampler).grid(0)[0] :].view(6, 2, 3)
    trajectory = both.inner.trajectory
    told = trajectory.conditions.tokens[trajectory.entries].view(6, 3, 4, 6)
    assert torch.equal(told[:, 0, ::2, ::2], tokens)
    assert torch.equal(told[:, 0], told[:, 2])
    assert [record.id for record in both.inner.prompts] == [record.id for record in RECORDS for _ in range(6)]
    starts = trajectory.states[:, 0].view(3, 6, -1)
    assert torch.equal(starts[:, 0], starts[:, 5])
    assert all(torch.equal(a, b) for a, b in zip(both.outer.samples, both.inner.samples[::3], strict=True))


def _plain_image(pipe: Any) -> torch.Tensor:
    image = pipe(
        prompt=TEXTS[0],
        height=SIZE[0],
        width=SIZE[1],
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(2),
        output_type="np",
    ).images[0]
    return torch.from_numpy(image)


def test_the_guidance_of_token_samples_may_be_another(pipeline_folder: Path) -> None:
    """Of the pictures that they become; the second stage's own training is not touched by it."""
    images = []
    for guidance, apart in ((1.5, None), (1.5, 1.0), (1.0, None)):
        rollout = ROLLOUT.model_copy(update={"guidance_scale": guidance, "steps": 2})
        config = PolicyConfig(decode_guidance_scale=apart)
        given: dict[str, Any] = {"size": SIZE, "policy": config, "rollout": rollout, "device": "cpu"}
        tokens = load_policy(str(pipeline_folder), module="ar", **given)
        images.append(tokens.rollout(RECORDS[:1], 2, torch.Generator().manual_seed(0)).samples)
        decoder: Any = load_policy(str(pipeline_folder), module="dit", **given)
        assert decoder.guidance_scale == guidance
    guided, unguided, expected = (torch.stack(list(own)) for own in images)
    assert torch.equal(unguided, expected)
    assert not torch.equal(guided, unguided)
