"""What is Wan's own: frame counts, a VAE that keeps state, tiles, first frames, and the models that are refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from peft.tuners.lora import LoraLayer
from torch import Tensor

from tests.conftest import SIZE, stir
from tests.models.families.wan import tiny
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import read_image
from visual_grpo.common.types import PromptRecord, VideoSample
from visual_grpo.config import LoraParams, ModelConfig, PolicyConfig, SamplerConfig
from visual_grpo.models.families.wan import FAMILY, Wan, WanOptions
from visual_grpo.models.families.wan_i2v import WanI2V, WanI2VOptions
from visual_grpo.models.family import find_family
from visual_grpo.models.module import ModelSettings
from visual_grpo.models.run_spec import options_of
from visual_grpo.models.without_weights import without_weights
from visual_grpo.training.components import load_model, load_policy

CPU = ModelConfig(path="unused", device="cpu")


def wan(size: tuple[int, int] = (64, 96), frames: int = tiny.FRAMES, **options: Any) -> Wan:
    settings = ModelSettings(size=size, frames=frames, fps=12.0, policy=PolicyConfig(), options=WanOptions(**options))
    return Wan(tiny.pipeline(unipc=False), settings)


def latents(model: Wan, seed: int = 0, count: int = 1) -> Tensor:
    return torch.randn(count, *model.latent_shape, generator=torch.Generator().manual_seed(seed))


def levels(one: Tensor, other: Tensor) -> int:
    """The largest difference."""
    return int((one.int() - other.int()).abs().max())


@pytest.mark.parametrize(("frames", "latent_frames"), [(5, 2), (17, 5)])
def test_videos_have_the_frames_that_were_asked_for(frames: int, latent_frames: int) -> None:
    model = wan(frames=frames)
    assert model.latent_shape == (4, latent_frames, 8, 12)
    [video] = model.pixels(latents(model))
    assert (video.frames.shape, video.frames.dtype, video.fps) == ((frames, 3, 64, 96), torch.uint8, 12.0)


@pytest.mark.parametrize("frames", [None, 1, 4, 6, 8, 85])
def test_another_number_of_frames_is_refused(frames: int | None, tmp_path: Path) -> None:
    told = (
        rf"data.frames is {'null' if frames is None else frames}; wan generates videos of 5, 9, 13, \.\.\. or 81 frames"
    )
    with pytest.raises(UserError, match=told):
        FAMILY.check_frames(frames)
    tiny.pipeline().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=told):
        load_model(str(tmp_path), size=(64, 96), frames=frames, device="cpu")


def test_a_family_of_images_refuses_frames() -> None:
    with pytest.raises(UserError, match=r"data.frames is 5, but sd3 does not generate videos: set data.frames to null"):
        find_family("sd3").check_frames(5)


def test_threads_that_decode_at_once_do_not_mix_up_their_videos() -> None:
    model = wan((64, 64), frames=5)
    states = [latents(model, seed) for seed in range(4)]
    alone = [model.pixels(state)[0].frames for state in states]
    with ThreadPoolExecutor(4) as pool:
        together = [videos[0].frames for videos in pool.map(model.pixels, states * 3)]
    assert all(torch.equal(video, alone[row % 4]) for row, video in enumerate(together))


def test_a_batch_is_decoded_as_its_rows_are() -> None:
    model = wan(frames=5)
    states = latents(model, count=3)
    for row, video in enumerate(model.pixels(states)):
        assert levels(video.frames, model.pixels(states[row : row + 1])[0].frames) <= 1


def test_tiles_change_little() -> None:
    whole, tiled = wan((320, 32), 5), wan((320, 32), 5, tiles=True)
    state = latents(whole)
    seamless, video = whole.pixels(state)[0].frames, tiled.pixels(state)[0].frames
    assert 0 < (seamless.int() - video.int()).abs().float().mean() < 8


def test_videos_that_are_decoded_do_not_mix_up_with_first_frames_that_are_encoded(source_images: list[Path]) -> None:
    settings = ModelSettings(size=(64, 96), frames=5, policy=PolicyConfig(), options=WanI2VOptions())
    model = WanI2V(tiny.pipeline(unipc=False, i2v=True), settings)
    state, images = latents(model), [read_image(path) for path in source_images[:2]]
    video, frames = model.pixels(state)[0].frames, [model._first_frame(image) for image in images]
    with ThreadPoolExecutor(4) as pool:
        videos = [pool.submit(model.pixels, state) for _ in range(4)]
        for first, again in zip(frames * 4, pool.map(model._first_frame, images * 4), strict=True):
            assert torch.equal(first.channels, again.channels)
    assert all(torch.equal(each.result()[0].frames, video) for each in videos)
    assert not torch.equal(*(frame.channels for frame in frames))


def test_the_image_is_read_after_512_tokens_of_text() -> None:
    with pytest.raises(UserError, match=r"model\.options\.max_sequence_length: Input should be 512$"):
        options_of(find_family("wan_i2v"), {"max_sequence_length": 200})


@pytest.mark.parametrize("i2v", [False, True])
def test_wan_2_2_is_refused(tmp_path: Path, i2v: bool) -> None:
    pipeline = tiny.pipeline(i2v=i2v)
    pipeline.register_modules(transformer_2=pipeline.transformer)
    pipeline.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"is of Wan 2\.2; the families wan and wan_i2v need Wan 2\.1"):
        find_family("auto", str(tmp_path)).load(str(tmp_path), CPU)


@pytest.mark.parametrize("other", [{"image_dim": None, "added_kv_proj_dim": None}, {"pos_embed_seq_len": 10}])
def test_a_model_that_does_not_read_one_first_frame_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    tiny.pipeline(i2v=True, **other).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"does not read one first frame by CLIP, as Wan 2\.1 I2V does"):
        find_family("auto", str(tmp_path)).load(str(tmp_path), CPU)


@pytest.mark.parametrize("i2v", [False, True])
def test_the_vae_and_clip_keep_the_precision_of_their_files(i2v: bool, tmp_path: Path) -> None:
    saved = tiny.pipeline(i2v=i2v)
    saved.save_pretrained(tmp_path)
    config = CPU.model_copy(update={"dtype": "bfloat16"})
    pipeline = find_family("auto", str(tmp_path)).load(str(tmp_path), config)
    with without_weights("meta"):
        planned = find_family("auto", str(tmp_path)).load(str(tmp_path), config.model_copy(update={"device": "meta"}))
    for name in ("vae", "image_encoder") if i2v else ("vae",):
        read, network = getattr(pipeline, name).state_dict(), getattr(planned, name)
        torch.testing.assert_close(read, getattr(saved, name).state_dict(), rtol=0, atol=0)
        assert network.dtype == torch.float32
    assert pipeline.transformer.dtype == planned.transformer.dtype == torch.bfloat16


def test_unipc_is_replaced(tmp_path: Path) -> None:
    tiny.pipeline().save_pretrained(tmp_path)
    pipeline = FAMILY.load(str(tmp_path), CPU.model_copy(update={"dtype": "bfloat16"}))
    assert type(pipeline.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    assert pipeline.scheduler.config.shift == 3.0
    model = load_model(str(tmp_path), size=(64, 64), frames=5, dtype="bfloat16", device="cpu")
    [video] = model.generate([PromptRecord(id="1", prompt="a cat")], [0], SamplerConfig(steps=2, guidance_scale=3.0))
    assert isinstance(video, VideoSample)


@pytest.mark.parametrize("unipc", [False, True])
def test_a_shift_replaces_the_checkpoints(tmp_path: Path, unipc: bool) -> None:
    tiny.pipeline(unipc=unipc).save_pretrained(tmp_path)
    policy: Any = load_policy(str(tmp_path), size=(64, 64), frames=5, options={"shift": 8.0}, device="cpu")
    want = FlowMatchEulerDiscreteScheduler(shift=8.0)
    want.set_timesteps(10)
    assert policy.model.schedule(10).sigmas == pytest.approx(want.sigmas.tolist())
    pipeline = FAMILY.load(str(tmp_path), CPU.model_copy(update={"options": {"shift": 8.0}}))
    assert not unipc or pipeline.saved_scheduler.config.flow_shift == 8.0


@pytest.mark.parametrize("i2v", [False, True])
def test_a_lora_on_every_layer_loads_into_the_plain_pipeline(i2v: bool, tmp_path: Path) -> None:
    """Its file has the names of Wan's authors for layers outside the blocks, too."""
    tiny.pipeline(i2v=i2v).save_pretrained(tmp_path / "model")
    lora = PolicyConfig(lora=LoraParams(rank=4, alpha=12, target_modules="all-linear"))
    policy: Any = load_policy(str(tmp_path / "model"), size=SIZE, frames=9, policy=lora, device="cpu")
    stir(policy)
    policy.save_adapter(tmp_path / "adapter")
    names = {name.split(".")[0] for name in policy.adapter.saved(tmp_path / "adapter")}
    assert names == {"blocks", "condition_embedder", "proj_out"}
    pipeline = find_family("auto", str(tmp_path / "model")).load(str(tmp_path / "model"), CPU)
    pipeline.load_lora_weights(str(tmp_path / "adapter"), adapter_name="mine")
    for name, layer in policy.model.transformer.named_modules():
        if isinstance(layer, LoraLayer):
            read = pipeline.transformer.get_submodule(name).get_delta_weight("mine")
            torch.testing.assert_close(read, layer.get_delta_weight("default"), rtol=1e-5, atol=1e-6)
