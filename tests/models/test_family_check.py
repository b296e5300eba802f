"""Faults that are planted in families are found, all before a training where they change its latents."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.models.families.flux import tiny as flux
from tests.models.families.test_flow_families import CASES, SIZE
from visual_grpo.common.errors import UserError
from visual_grpo.config import ModelConfig, PolicyConfig, Task
from visual_grpo.models import families
from visual_grpo.models.family import Family, find_family
from visual_grpo.models.family_check import check_before_training, check_family
from visual_grpo.models.module import ModelSettings
from visual_grpo.models.run_spec import options_of

pytestmark = pytest.mark.usefixtures("small_sources")
LEVELS, LATENTS, GUIDED, BATCH = "noise levels", "latents, guidance 1", "latents, guidance 4", "3 prompts"
PIXELS, REPLAY, ADAPTER = "pixels, of 255", "replay against sampler", "adapter in the plain pipeline"


class Fault(NamedTuple):
    family: str
    before: str
    after: str
    """What replaces ``before`` in the family's file."""
    found_by: str
    early: bool = True
    """The latents of one prompt show it."""


FAULTS = {
    "no prompt template": Fault(
        "z_image",
        "        texts, _ = self",
        "        self.pipeline.tokenizer.chat_template = '{{ messages[0].content }}'\n        texts, _ = self",
        LATENTS,
    ),
    "prompts cut too early": Fault("flux", "length = self.options.max_sequence_length", "length = 4", LATENTS),
    "another layer of the text encoder": Fault(
        "flux2_klein", "encode_prompt(prompt,", "encode_prompt(prompt, text_encoder_out_layers=(10, 18, 27),", LATENTS
    ),
    "a shift that ignores the steps": Fault("flux2_klein", "num_steps=steps", "num_steps=50", LEVELS),
    "timesteps not divided": Fault("flux", "dtype=dtype) / 1000", "dtype=dtype)", LATENTS),
    "image minus noise": Fault("z_image", "return -torch.stack", "return torch.stack", LATENTS),
    "a state in half precision": Fault(
        "z_image", "state.to(self.transformer.dtype)", "state.bfloat16().float()", LATENTS
    ),
    "tokens not unpacked": Fault(
        "flux",
        "return unpacked(velocity[:, : tokens.shape[1]].float(), h)",
        "return velocity.float().reshape(state.shape)",
        LATENTS,
    ),
    "positions swapped": Fault("flux", "len(entries), h // 2, w // 2", "len(entries), w // 2, h // 2", LATENTS),
    "guidance off by one": Fault(
        "sd3", "negative_prompt, guidance_scale)", "negative_prompt, guidance_scale + 1)", GUIDED
    ),
    "no negative prompt": Fault("sd3", "self.options.negative_prompt", '""', GUIDED),
    "rows that see each other": Fault(
        "sd3",
        "return velocity.float()",
        "return velocity.float() + velocity[:1].float() - velocity.float().mean(0)",
        REPLAY,
        early=False,
    ),
    "padding without a mask": Fault("qwen_image", "_mask=text.mask", "_mask=None", BATCH, early=False),
    "latents not rescaled": Fault(
        "flux2_klein", "latents = latents * std + mean", "latents = latents * 1", PIXELS, early=False
    ),
    "a source in the scale of another VAE": Fault(
        "flux_kontext", "(encoded(vae, pixels) - vae.config.shift_factor)", "encoded(vae, pixels)", LATENTS
    ),
    "a source of another size": Fault(
        "flux_kontext", "if self.options.auto_resize:", "if not self.options.auto_resize:", LATENTS
    ),
    "sources at each other's positions": Fault(
        "flux2_klein",
        "times = range(10, 10 * len(references.grids) + 1, 10)",
        "times = [10] * len(references.grids)",
        LATENTS,
    ),
    "sources in another order": Fault(
        "flux2_klein", "references.beside(tokens)", "references.beside(tokens.flip(1)).flip(1)", LATENTS
    ),
    "sources that the text encoder does not see": Fault(
        "qwen_image_edit_plus", "CONDITION_IMAGE_SIZE)", "VAE_IMAGE_SIZE)", LATENTS
    ),
    "an adapter for another call": Fault(
        "flux",
        "FAMILY = Family(",
        "from dataclasses import replace\nfrom visual_grpo.models.lora import DiffusersAdapter\n"
        "MODULES = {'dit': replace(MODULES['dit'], adapter=DiffusersAdapter)}\nFAMILY = Family(",
        ADAPTER,
        early=False,
    ),
}


def faulty(tmp_path: Path, fault: Fault) -> Family:
    source = Path(families.__path__[0], f"{fault.family}.py").read_text("utf-8")
    assert source.count(fault.before) == 1, "the fault is where it is meant to be"
    file = tmp_path / f"faulty_{fault.family}.py"
    file.write_text(source.replace(fault.before, fault.after), "utf-8")
    module = types.ModuleType(file.stem)
    sys.modules[file.stem] = module
    exec(compile(file.read_text("utf-8"), file, "exec"), vars(module))
    return module.FAMILY


def task_of(family: Family) -> Task:
    return "i2i" if "i2i" in family.tasks else "t2i"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (of.found_by == LATENTS and name != "positions swapped"))
        for name, of in FAULTS.items()
    ],
)
def test_a_fault_is_found_before_a_training(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    family, (build, options) = faulty(tmp_path, fault), CASES[fault.family]
    pipeline, settings = build(), ModelSettings(size=SIZE, policy=PolicyConfig(), options=options_of(family, options))
    built = family.build(pipeline, settings)
    told = rf"The family {fault.family} generates different latents than its pipeline .*\n.*: .*, at most"
    with pytest.raises(UserError, match=told) if fault.early else nullcontext():
        check_before_training(family, pipeline, built, settings, task_of(family), 4.0, "float32")


def test_a_mixed_family_is_compared_with_and_without_sources(tmp_path: Path) -> None:
    fault = FAULTS["sources in another order"]
    family, (build, options) = faulty(tmp_path, fault), CASES[fault.family]
    pipeline, settings = build(), ModelSettings(size=SIZE, policy=PolicyConfig(), options=options_of(family, options))
    with pytest.raises(UserError, match=r"latents, guidance 4, 1 prompt, 2 sources: "):
        check_before_training(family, pipeline, family.build(pipeline, settings), settings, "mixed", 4.0, "float32")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, r"must be at least 64px\Z"),
        ({"plain_guidance": lambda scale: {"scale": scale}}, r"unexpected keyword argument 'scale'\nIts call needs"),
    ],
    ids=["a size", "an argument"],
)
def test_only_a_call_with_other_arguments_names_those_that_it_needs(changes: dict[str, Any], said: str) -> None:
    family, (build, options) = replace(find_family("flux2_klein"), **changes), CASES["flux2_klein"]
    pipeline, settings = (
        build(),
        ModelSettings(size=(32, 64), policy=PolicyConfig(), options=options_of(family, options)),
    )
    built = family.build(pipeline, settings)
    with pytest.raises(UserError, match=said):
        check_before_training(family, pipeline, built, settings, "i2i", 4.0, "float32")


def test_velocities_of_another_shape_are_refused(tmp_path: Path) -> None:
    family = faulty(tmp_path, Fault("flux", ".float(), h)", ".float(), w)", ""))
    pipeline, settings = flux.pipeline(), ModelSettings(size=SIZE, policy=PolicyConfig(), options=family.options())
    built = family.build(pipeline, settings)
    with pytest.raises(UserError, match=r"velocity gives \[1, 16, 12, 8\] for latents \[1, 16, 8, 12\]"):
        check_before_training(family, pipeline, built, settings, "t2i", 4.0, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_command_finds_a_fault(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    family, (build, options) = faulty(tmp_path, fault), CASES[fault.family]
    build().save_pretrained(tmp_path / "model")
    cpu = ModelConfig(path="unused", device="cpu")
    findings = check_family(family, str(tmp_path / "model"), cpu, SIZE, options_of(family, options), 4.0)
    failed = [finding.name for finding in findings if not finding.passed]
    assert any(fault.found_by in each for each in failed), failed
