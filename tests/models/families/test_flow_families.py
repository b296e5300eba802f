"""Every flow family on small models of the real classes: the checks of `check_model`, and a training."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import takewhile
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from peft.tuners.lora import LoraLayer
from PIL import Image
from safetensors.torch import load_file

from tests.conftest import stir
from tests.evaluation.painter import brightness
from tests.markdown import ROOT
from tests.models.families.flux import tiny as flux
from tests.models.families.flux2_klein import tiny as flux2_klein
from tests.models.families.ltx import tiny as ltx
from tests.models.families.qwen_image import tiny as qwen_image
from tests.models.families.sd3 import tiny as sd3
from tests.models.families.wan import tiny as wan
from tests.models.families.z_image import tiny as z_image
from tests.training.few_steps import parameters
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Needs, PromptRecord, VideoSample
from visual_grpo.common.videos import frames_of
from visual_grpo.config import GRPOConfig, LoraParams, ModelConfig, PolicyConfig, SamplerConfig
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.models.families.flux_kontext import FluxKontext, FluxKontextOptions
from visual_grpo.models.family import BUILT_IN, find_family
from visual_grpo.models.family_check import check_family, records_of
from visual_grpo.models.module import ModelSettings
from visual_grpo.models.run_spec import resolve
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training.components import build_model, load_policy
from visual_grpo.training.likely_mistakes import likely_mistakes

pytestmark = pytest.mark.usefixtures("small_sources")
SIZE = (64, 96)
CPU = ModelConfig(path="unused", device="cpu")
CASES: Mapping[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "sd3": (sd3.pipeline, {"negative_prompt": "blurry", "max_sequence_length": 100}),
    "sd3, without T5": (lambda: sd3.pipeline(t5=False), {}),
    "qwen_image": (qwen_image.pipeline, {"negative_prompt": "blurry", "max_sequence_length": 200}),
    "flux": (flux.pipeline, {"max_sequence_length": 64}),
    "flux, schnell": (lambda: flux.pipeline(schnell=True), {"max_sequence_length": 64}),
    "z_image": (z_image.pipeline, {"negative_prompt": "blurry", "max_sequence_length": 100}),
    "z_image, turbo": (lambda: z_image.pipeline(turbo=True), {"max_sequence_length": 100}),
    "flux2_klein": (flux2_klein.pipeline, {"max_sequence_length": 100}),
    "flux_kontext": (lambda: flux.pipeline(kontext=True), {"max_sequence_length": 64}),
    "flux_kontext, sources as prepared": (lambda: flux.pipeline(kontext=True), {"auto_resize": False}),
    "qwen_image_edit": (lambda: qwen_image.pipeline(edit=True), {"negative_prompt": "blurry"}),
    "qwen_image_edit_plus": (lambda: qwen_image.pipeline(plus=True), {"negative_prompt": "blurry"}),
    "qwen_image_edit_plus, 2511": (lambda: qwen_image.pipeline(plus=True, zero_cond_t=True), {}),
    "flux2_klein, distilled": (lambda: flux2_klein.pipeline(distilled=True), {"max_sequence_length": 256}),
    "wan": (wan.pipeline, {"negative_prompt": "blurry", "max_sequence_length": 200, "shift": 8.0}),
    "wan, saved with Euler": (lambda: wan.pipeline(unipc=False), {"max_sequence_length": 100, "shift": 8.0}),
    "wan_i2v": (lambda: wan.pipeline(i2v=True), {"negative_prompt": "blurry"}),
    "ltx": (ltx.pipeline, {"negative_prompt": "blurry", "max_sequence_length": 100}),
}
"""A model of each flow family, and options that are not its defaults."""
FRAMES = {"wan": 5, "wan_i2v": 5, "ltx": 9}
"""Of a video: two latent frames."""
MORE_FRAMES = {"wan": 9, "wan_i2v": 9, "ltx": 17}
_LAST = "transformer_blocks.1."
_QWEN_UNTRAINED = {
    _LAST + name for name in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
}
_QWEN = ("qwen_image", "qwen_image_edit", "qwen_image_edit_plus")
UNTRAINED = {"sd3": {"transformer_blocks.2.attn.add_q_proj"}, **dict.fromkeys(_QWEN, _QWEN_UNTRAINED)}
"""What the last block's text stream gives is dropped, so nothing asks for it."""

TRAINED = {
    "sd3": ("ff_context.net.2", "attn2.to_q"),
    **dict.fromkeys(_QWEN, ("img_mlp.net.2", "txt_mlp.net.0.proj")),
    **dict.fromkeys(("flux", "flux_kontext"), ("ff_context.net.2", "single_transformer_blocks.0.attn.to_q")),
    "z_image": ("layers.0.feed_forward.w2", "context_refiner.0.attention.to_q"),
    "wan": ("blocks.0.attn2.to_k", "blocks.1.ffn.net.0.proj"),
    "wan_i2v": ("blocks.1.attn2.to_q", "blocks.0.attn2.add_k_proj", "blocks.1.attn2.add_v_proj"),
    "ltx": ("transformer_blocks.0.attn1.to_q", "transformer_blocks.1.attn2.to_k", "transformer_blocks.1.ff.net.2"),
    "flux2_klein": ("ff_context.linear_out", "transformer_blocks.0.attn.to_out", "attn.to_qkv_mlp_proj"),
}
"""Some of the matrices that have a LoRA."""


_QKVO = r"(to_[qkv]|to_out\.0)"
_MMDIT = rf"transformer\.transformer_blocks\.\d+\.(attn\.({_QKVO}|add_[qkv]_proj|to_add_out)|%s)"
_FLUX = rf"{_MMDIT % r'ff(_context)?.net.(0.proj|2)'}|transformer\.single_transformer_blocks\.\d+\.attn\.to_[qkv]"
_WAN = r"(self_attn\.[qkvo]|cross_attn\.([qkvo]|[kv]_img)|ffn\.[02])"
COMFYUI = {
    "sd3": _MMDIT % rf"ff(_context)?\.net\.(0\.proj|2)|attn2\.{_QKVO}",
    **dict.fromkeys(("flux", "flux_kontext"), _FLUX),
    "flux2_klein": rf"{_MMDIT % r'ff(_context)?.linear_(in|out)'}"
    r"|transformer\.single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)",
    **dict.fromkeys(_QWEN, _MMDIT % r"(img|txt)_mlp\.net\.(0\.proj|2)"),
    "z_image": rf"transformer\.(layers|(context|noise)_refiner)\.\d+\.(attention\.{_QKVO}|feed_forward\.w[123])",
    **dict.fromkeys(("wan", "wan_i2v"), rf"diffusion_model\.blocks\.\d+\.{_WAN}"),
    "ltx": rf"diffusion_model\.transformer_blocks\.\d+\.(attn[12]\.{_QKVO}|ff\.net\.(0\.proj|2))",
}
"""Layers that ComfyUI's loader finds, by their names in a file, before ``.lora_A.weight`` and ``.lora_B.weight``.

From github.com/Comfy-Org/ComfyUI: ``model_lora_keys_unet`` of comfy/lora.py (17358c8f), the maps of comfy/utils.py
(09708eae), and the names of modules in comfy/ldm/wan/model.py (0c9a69ae) and comfy/ldm/lightricks/model.py (e03185cf).
"""


EXTENDED = ("wan", "qwen_image_edit", "flux")
"""Families that a quick run tests by those that extend them: wan_i2v, qwen_image_edit_plus and flux_kontext."""


def quick(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * ("," in name or name in EXTENDED)) for name in names]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * ("," in name)) for name in CASES])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, Any]]:
    build, options = CASES[request.param]
    folder = tmp_path_factory.mktemp("model")
    build().save_pretrained(folder)
    return request.param, folder, options


@pytest.mark.parametrize("case", quick(CASES), indirect=True)
def test_it_draws_as_its_pipeline_does(case: tuple[str, Path, dict[str, Any]]) -> None:
    name, folder, options = case
    family = find_family("auto", str(folder))
    assert family.name == name.partition(",")[0]
    findings = check_family(family, str(folder), CPU, SIZE, family.options(**options), 4.0, FRAMES.get(family.name))
    reported = [finding for finding in findings if finding.limit == math.inf]
    assert [finding.name for finding in reported] == ["5 steps of Euler against UniPCMultistepScheduler"] * (
        name in ("wan", "wan_i2v")
    )
    assert all(0.001 < finding.difference < 0.5 for finding in reported), "they are other steps of the same flow"
    findings = [finding for finding in findings if finding not in reported]
    kinds = 2 if name.startswith("flux2_klein") else 1  # Prompts, and prompts with sources.
    assert len(findings) == 2 + 5 * kinds
    assert {finding.name: finding.difference for finding in findings if finding.difference > 1e-6} == {}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_difference(case: tuple[str, Path, dict[str, Any]], dtype: Any) -> None:
    _, folder, options = case
    family, half = find_family("auto", str(folder)), ModelConfig(path="unused", device="cpu", dtype=dtype)
    findings = check_family(family, str(folder), half, SIZE, family.options(**options), 4.0, FRAMES.get(family.name))
    assert [finding for finding in findings if not finding.passed] == []


@pytest.mark.parametrize("case", quick(name for name in CASES if "," not in name), indirect=True)
def test_a_training_moves_its_adapter(case: tuple[str, Path, dict[str, Any]], tmp_path: Path) -> None:
    name, folder, options = case
    family = find_family(name)
    records = records_of("i2i" if "i2i" in family.tasks else "t2i", family, SIZE, tmp_path)
    sampler = SamplerConfig(steps=3, guidance_scale=4.0)
    policy = load_policy(
        str(folder),
        size=SIZE,
        frames=FRAMES.get(name),
        rollout=sampler,
        options=options,
        kl_reference=True,
        device="cpu",
    )
    before, reward = policy.adapter_state_dict(), _brightness_of_videos if name in FRAMES else brightness
    config = GRPOConfig(steps=1, prompts_per_step=2, group_size=2, learning_rate=1e-2, kl_weight=0.01)
    steps = list(GRPOTrainer(policy, RewardSet({"brightness": (reward, 1.0)}), config).fit(records))
    assert steps[0].values["ratio/first_max_abs_log"] < 1e-4
    after = policy.adapter_state_dict()
    still = {
        key.split(".lora")[0] for key, value in after.items() if "lora_B" in key and torch.equal(value, before[key])
    }
    assert [part for part in TRAINED[name] if not any(part in key for key in after)] == []
    assert still == UNTRAINED.get(name, set())


@pytest.mark.parametrize(
    "case",
    [
        "flux2_klein",
        "wan_i2v",
        "ltx",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in TRAINED
            if name not in ("flux2_klein", "wan_i2v", "ltx")
        ),
    ],
    indirect=True,
)
def test_training_samples_may_be_smaller_than_what_is_judged(
    case: tuple[str, Path, dict[str, Any]], tmp_path: Path
) -> None:
    name, folder, options = case
    family = find_family(name)
    task, frames = ("i2i" if "i2i" in family.tasks else family.tasks[0]), MORE_FRAMES.get(name)
    fewer = {} if frames is None else {"frames": FRAMES[name]}
    steps = {"steps": 3, "guidance_scale": 4.0}
    config = parameters(
        tmp_path,
        model={"path": str(folder), "device": "cpu", "options": options},
        data={"path": "unused", "task": task, "height": 64, "width": 128, "frames": frames},
        policy={"train": "dit"},
        sampling={"rollout": {**steps, "height": 32, "width": 64, **fewer}, "eval": steps},
    )
    spec, records = resolve(config), records_of(task, family, (64, 128), tmp_path)[:1]
    model = build_model(spec)
    model.adapters.attach({"dit": config.policy.lora}, 0)
    policy = model.policy("dit", rollout=spec.rollout, evaluation=config.sampling.eval)
    rollout = policy.rollout(records, 2, torch.Generator().manual_seed(0))
    (judged,), (again,) = (model.generate(records, [0], sampler) for sampler in (config.sampling.eval, spec.rollout))
    drawn = [frames_of(sample) for sample in (rollout.samples[0], judged, again)]
    trained, shown = [fewer.get("frames", 1), 3, 32, 64], [frames or 1, 3, 64, 128]
    assert [each is not None and list(each.shape) for each in drawn] == [trained, shown, shown]


def _brightness_of_videos(prompts: Sequence[PromptRecord], samples: Sequence[VideoSample]) -> list[float]:
    return brightness(prompts, [sample.frames for sample in samples])


_brightness_of_videos.needs = Needs(video=True)  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", quick(CASES), indirect=True)
def test_a_reader_that_takes_alpha_for_the_rank_gets_the_trained_effect(
    case: tuple[str, Path, dict[str, Any]], tmp_path: Path
) -> None:
    """As ComfyUI reads the file: its own names, up times down, strength 1. The pipeline reads the configuration too."""
    name, folder, _ = case
    known = COMFYUI[name.partition(",")[0]]
    lora, frames = PolicyConfig(lora=LoraParams(rank=4, alpha=12)), FRAMES.get(name.partition(",")[0])
    policy: Any = load_policy(str(folder), size=SIZE, frames=frames, policy=lora, device="cpu")
    stir(policy)
    policy.save_adapter(tmp_path)
    pipeline = find_family("auto", str(folder)).load(str(folder), CPU)
    pipeline.load_lora_weights(str(tmp_path), adapter_name="mine")
    saved = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    assert [key for key in saved if not re.fullmatch(rf"({known})\.lora_[AB]\.weight", key)] == []
    state = policy.adapter.saved(tmp_path)  # By the names of the transformer's layers.
    layers = {name: layer for name, layer in policy.model.transformer.named_modules() if isinstance(layer, LoraLayer)}
    for name, layer in layers.items():
        down, up = (state[f"{name}.lora_{part}.weight"] for part in "AB")
        torch.testing.assert_close(up @ down, layer.get_delta_weight("default"), rtol=1e-5, atol=1e-6)
        read = pipeline.transformer.get_submodule(name).get_delta_weight("mine")
        torch.testing.assert_close(read, layer.get_delta_weight("default"), rtol=1e-5, atol=1e-6)
    assert len(saved) == 2 * len(layers)


@pytest.mark.parametrize("case", quick(CASES), indirect=True)
def test_a_prompts_end_is_ignored_exactly_where_its_tokens_say_so(
    case: tuple[str, Path, dict[str, Any]], tmp_path: Path
) -> None:
    name, folder, options = case
    family = find_family("auto", str(folder))
    frames = FRAMES.get(family.name)
    settings = ModelSettings(size=SIZE, frames=frames, policy=PolicyConfig(), options=family.options(**options))
    model: Any = family.build(family.load(str(folder), CPU), settings)
    if name.startswith("qwen_image_edit"):
        assert model.text_tokens("a red cat") == (model.text_tokens("a red ")[0] + 3,) * 2  # Never cut; one a byte.
        return
    sources = records_of("i2i", family, SIZE, tmp_path)[0].source_images if "t2i" not in family.tasks else ()

    def is_read(start: str) -> bool:
        """Whether the model tells apart prompts that differ after ``start``."""
        records = [PromptRecord(id=end, prompt=f"{start} {end}", source_images=sources) for end in ("cat", "dog")]
        one, other = (model.model.conditions([record], [0], 1.0).prompts for record in records)
        tensors = [(one.embeds, other.embeds)] if name == "qwen_image" else zip(one[0], other[0], strict=True)
        return not all(torch.equal(*pair) for pair in tensors)

    words = "a red cat on a mat "
    counts = (model.text_tokens(words * number) for number in range(1, 120))
    fitting = sum(1 for _ in takewhile(lambda each: each[0] + 2 <= each[1], counts))
    assert is_read(words * fitting)
    assert not is_read(words * (fitting + 6))


@pytest.mark.parametrize("name", ["flux", "z_image", "flux2_klein"])
def test_a_distilled_model_is_warned_of_before_it_is_trained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    family, sampler = find_family(name), SamplerConfig(steps=3, guidance_scale=1.0)
    settings = ModelSettings(size=SIZE, policy=PolicyConfig(), options=family.options())
    for case, (build, _) in CASES.items():
        if case.partition(",")[0] == name:
            model = family.build(build(), settings)
            model.adapters.attach({"dit": LoraParams()}, 0)
            assert not capsys.readouterr().out
            model.policy("dit", rollout=sampler, evaluation=sampler)
            assert ("distilled to a few steps" in capsys.readouterr().out) == ("," in case)


@pytest.mark.parametrize("name", ["flux", "z_image", "flux2_klein"])
def test_guidance_that_a_model_does_not_read_is_told(name: str, tmp_path: Path) -> None:
    rollout, judged = {"steps": 3, "guidance_scale": 1.0}, {"steps": 3, "guidance_scale": 4.0}
    config = parameters(tmp_path, policy={"train": "dit"}, sampling={"rollout": rollout, "eval": judged})
    for case, (build, _) in CASES.items():
        if case.partition(",")[0] == name:
            spec = resolve(config, family=find_family(name))
            warnings = list(likely_mistakes(spec, spec.build(build()), [PromptRecord(id="a", prompt="a")], []))
            told = any("the guidance of sampling.eval changes nothing" in warning for warning in warnings)
            assert told == (case in ("flux, schnell", "flux2_klein, distilled"))


SOURCES = {"flux": (0, 1), "flux_kontext": (1, 0), "flux2_klein": (4, 5), "qwen_image": (0, 1)}
SOURCES |= {"qwen_image_edit": (1, 2), "qwen_image_edit_plus": (3, 4), "sd3": (0, 1), "z_image": (0, 1)}
SOURCES |= {"wan": (0, 1), "wan_i2v": (1, 2), "ltx": (0, 1)}
"""Numbers of sources that a family takes, and that it does not."""


@pytest.mark.parametrize("name", SOURCES)
def test_a_number_of_sources_that_the_family_does_not_take_is_refused(name: str, source_images: list[Path]) -> None:
    family = find_family(name)
    settings = ModelSettings(size=SIZE, frames=FRAMES.get(name), policy=PolicyConfig(), options=family.options())
    model: Any = family.build(CASES[name][0](), settings)
    taken, refused = SOURCES[name]
    for count in (taken, refused):
        record = PromptRecord(id="mine", prompt="a cat", source_images=tuple(source_images[:count]))
        with nullcontext() if count == taken else pytest.raises(UserError, match=f"'mine' has {count}"):
            model.model.conditions([record], [0], 1.0)
        assert family.sources is None or (count in family.sources) == (count == taken)


def test_a_source_that_the_pipeline_refuses_is_named(tmp_path: Path) -> None:
    file, family = tmp_path / "narrow.png", find_family("flux2_klein")
    Image.new("RGB", (96, 32)).save(file)
    model: Any = family.build(
        flux2_klein.pipeline(), ModelSettings(size=SIZE, policy=PolicyConfig(), options=family.options())
    )
    with pytest.raises(UserError, match=r"cannot read the source image .*narrow\.png: Image too small: 96×32"):
        model.model.conditions([PromptRecord(id="a", prompt="a", source_images=(file,))], [0], 1.0)


def test_rows_run_together_where_their_sources_have_the_same_sizes(tmp_path: Path) -> None:
    """A row's velocity is the same beside rows whose sources have other sizes."""
    family = find_family("flux2_klein")
    model: Any = family.build(
        flux2_klein.pipeline(), ModelSettings(size=SIZE, policy=PolicyConfig(), options=family.options())
    ).model
    files = [tmp_path / f"{side}.png" for side in (64, 96)]
    for number, file in enumerate(files):
        Image.new("RGB", (64 + 32 * number, 64), (90 * number, 60, 30)).save(file)
    records = [
        PromptRecord(id=str(row), prompt=f"prompt {row}", source_images=(files[row % 2], files[0])) for row in range(3)
    ]
    conditions = model.conditions(records, [], 1.0)
    state, entries = torch.randn(4, *model.latent_shape), torch.tensor([2, 1, 0, 1])
    with torch.no_grad():
        together = model.velocity(conditions, entries)(state, 500.0)
        for row, entry in enumerate(entries):
            alone = model.velocity(conditions, entry[None])(state[row, None], 500.0)
            torch.testing.assert_close(together[row, None], alone, rtol=0, atol=1e-5)


def test_kontext_takes_the_shape_of_a_source_rounded_down_as_its_pipeline_does() -> None:
    model = FluxKontext(flux.pipeline(kontext=True), SIZE, FluxKontextOptions())
    assert model._source(Image.new("RGB", (101, 64))).shape[2:] == (5, 5)  # 96 x 64 is nearest to 80 x 80.


def test_the_page_says_what_kontexts_pipeline_needs_for_the_trained_size() -> None:
    area = inspect.signature(diffusers.FluxKontextPipeline.__call__).parameters["max_area"].default
    assert area > SIZE[0] * SIZE[1], "which it would enlarge"
    page = (ROOT / "docs/own_model.md").read_text(encoding="utf-8")
    assert "In diffusers' `FluxKontextPipeline`, pass `max_area=height * width`" in page


@pytest.mark.parametrize("name", ["qwen_image_edit", "qwen_image_edit_plus"])
def test_an_edit_has_no_length_of_a_prompt(name: str) -> None:
    with pytest.raises(ValueError, match="max_sequence_length"):
        find_family(name).options.model_validate({"max_sequence_length": 64})


def test_every_flow_family_has_a_case() -> None:
    families = {name for name in BUILT_IN if "flow" in find_family(name).kinds()}
    assert families == {name.partition(",")[0] for name in CASES} | {"glm_image"}
