from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import SIZE, stir
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import PolicyConfig, SamplerConfig
from visual_grpo.models.families.glm_image.model import GlmImage
from visual_grpo.models.tokens.generation import sample_tokens
from visual_grpo.models.tokens.probabilities import TokenSampler
from visual_grpo.models.tokens.prompt_cache import Prompts
from visual_grpo.models.tokens.token_policy import TokenPolicy
from visual_grpo.training.components import load_model, load_policy

TEXTS = [
    "a red circle",
    "a small yellow square at the bottom, with many more words than its neighbours",
    "画一只猫 “猫”",
]
RECORDS = [PromptRecord(id=str(i), prompt=text) for i, text in enumerate(TEXTS)]
EVAL_SAMPLER = SamplerConfig(steps=3, guidance_scale=1.5)
GREEDY = SamplerConfig(temperature=1.0, top_p=1.0, top_k=1, steps=1, guidance_scale=1.0)
MODES = [pytest.param({}, marks=pytest.mark.slow), {"gradient_checkpointing": True}]

ArPolicy = TokenPolicy[Prompts]


def policy_with(folder: Path, **changes: Any) -> ArPolicy:
    policy: Any = load_policy(str(folder), size=SIZE, policy=PolicyConfig(**changes), kl_reference=True, device="cpu")
    stir(policy)
    return policy


def rollout(policy: ArPolicy, group_size: int = 2) -> Any:
    return policy.rollout(RECORDS, group_size, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("mode", MODES)
def test_the_replay_gives_the_samplers_log_probs_back(pipeline_folder: Path, mode: dict[str, Any]) -> None:
    """Prompts of three lengths, left-padded, with an adapter that has an effect."""
    policy = policy_with(pipeline_folder, **mode)
    got = rollout(policy)
    (chunk,) = policy.replay(got.trajectory, torch.arange(6))
    assert got.log_probs.shape == (6, 1 * 2 + 2 * 3) == chunk.log_probs.shape
    assert got.log_probs.min() < -1
    torch.testing.assert_close(chunk.log_probs, got.log_probs, rtol=0, atol=5e-5)


def test_the_reference_is_the_base_model(ar_policy: ArPolicy, pipeline_folder: Path) -> None:
    got = rollout(ar_policy)
    plain = load_policy(str(pipeline_folder), size=SIZE, device="cpu")  # a fresh adapter has no effect
    (chunk,) = plain.replay(got.trajectory, torch.arange(6))
    torch.testing.assert_close(got.trajectory.reference_log_probs, chunk.log_probs.detach(), rtol=0, atol=1e-5)
    assert (got.trajectory.reference_log_probs - got.log_probs).abs().max() > 1e-2


def test_an_image_depends_on_its_own_prompt_and_seed(glm_image: GlmImage, ar_policy: ArPolicy) -> None:
    together = glm_image.generate(RECORDS, [7, 8, 9], EVAL_SAMPLER)
    alone = glm_image.generate(RECORDS[1:2], [8], EVAL_SAMPLER)[0]
    # Another padding rounds differently; in 8-bit pixels that is at most one step here and there.
    assert (together[1].int() - alone.int()).abs().max() <= 1
    other = glm_image.generate(RECORDS[1:2], [9], EVAL_SAMPLER)[0]
    assert (together[1].int() - other.int()).abs().max() > 8
    assert together[0].shape == (3, *SIZE)
    assert together[0].dtype == torch.uint8


def test_rows_of_a_group_differ_in_tokens_but_share_their_start_noise(pipeline_folder: Path) -> None:
    policy = policy_with(pipeline_folder)
    groups = policy.sample(RECORDS, 3, torch.Generator().manual_seed(3))
    noise_seeds, trajectory = groups.decode_seeds, groups.sampled.trajectory
    assert [record.id for record in groups.records] == list("000111222")
    assert len(set(noise_seeds[:3])) == 1
    assert len(set(noise_seeds)) == 3
    assert len({tuple(row.tolist()) for row in trajectory.tokens[:3]}) > 1
    for ours, again in zip(
        rollout(policy, group_size=3).samples,
        policy.model.samples(groups.records, trajectory, noise_seeds),
        strict=True,
    ):
        assert torch.equal(ours, again)


def test_a_small_rollout_batch_changes_nothing(pipeline_folder: Path) -> None:
    whole, parts = (
        policy_with(pipeline_folder),
        policy_with(pipeline_folder, rollout_batch=2, denoise_batch=4, decode_batch=1),
    )
    one, two = rollout(whole), rollout(parts)
    assert torch.equal(one.trajectory.tokens, two.trajectory.tokens)
    torch.testing.assert_close(one.log_probs, two.log_probs, rtol=0, atol=2e-5)


def test_a_damaged_adapter_is_refused(ar_policy: ArPolicy, pipeline_folder: Path, tmp_path: Path) -> None:
    ar_policy.save_adapter(tmp_path / "ar")
    weights = tmp_path / "ar" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(UserError, match=r"cannot be loaded.*\nTrain again"):
        load_model(str(pipeline_folder), size=SIZE, train=["ar"], adapters=tmp_path)


class HostReads(TorchDispatchMode):
    """Counts the values of tensors that Python looks at, for each of which it would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation.overloadpacket is torch.ops.aten._local_scalar_dense
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "records", [RECORDS, pytest.param(RECORDS[:1], marks=pytest.mark.slow)], ids=["padded", "one prompt"]
)
def test_no_token_waits_for_the_device(pipeline_folder: Path, records: list[PromptRecord]) -> None:
    reads = []
    for size in ((64, 64), (128, 160)):
        policy: Any = load_policy(str(pipeline_folder), size=size, device="cpu")
        with HostReads() as counted:
            sampled = sample_tokens(policy.model, records, range(len(records)), TokenSampler(), batch=8)
        reads.append((sampled.trajectory.tokens.shape[1], counted.count))
    (few, at_few), (many, at_many) = reads
    assert many > 2 * few
    assert at_few == at_many
