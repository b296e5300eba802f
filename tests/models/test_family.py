"""Which family a name or a saved model belongs to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import SIZE
from tests.models.toy_flow import FAMILY, ToyFlow
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import SamplerConfig
from visual_grpo.models.family import BUILT_IN, find_family
from visual_grpo.training.components import load_model, load_policy

OWN = "tests.models.toy_flow:FAMILY"


def test_every_built_in_family_has_its_name_and_saved_classes_of_its_own() -> None:
    families = [find_family(name) for name in BUILT_IN]
    assert [family.name for family in families] == list(BUILT_IN)
    saved_as = [name for family in families for name in family.saved_as]
    assert len(saved_as) == len(set(saved_as)) >= len(families)
    for family in families:
        assert family.modules
        assert set(family.modules) == {name for name in family.modules if name.isidentifier()}


def test_a_saved_model_of_another_class_names_the_known_families(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "DDPMPipeline", "unet": [None, None]}))
    with pytest.raises(UserError, match=r"DDPMPipeline, which does not belong to a known family.*glm_image, .*, sd3"):
        find_family("auto", str(tmp_path))


def test_a_folder_that_says_nothing_is_refused(tmp_path: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    FlowMatchEulerDiscreteScheduler().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"holds neither model_index\.json nor config\.json"):
        find_family("auto", str(tmp_path))
    (tmp_path / "model_index.json").write_text('{"_class_name": ')
    with pytest.raises(UserError, match=r"model_index\.json.* is damaged"):
        find_family("auto", str(tmp_path))
    with pytest.raises(UserError, match=r"family is auto, but no saved model is given.*name the family"):
        find_family("auto")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("qwen_imge", r"'qwen_imge', which is not a known family\. Did you mean 'qwen_image'\?.*sd3"),
        ("zzz", r"not a known family\. Built in: flux, .*glm_image"),
        ("tests.models.toy_flow:MODULES", r"toy_flow:MODULES', which is a dict, not a visual_grpo Family"),
        ("tests.models.toy_flow:FAMILI", r"has no 'FAMILI'.*Did you mean 'FAMILY'"),
        ("nowhere:FAMILY", "no module 'nowhere'"),
    ],
)
def test_what_is_no_family_is_refused(name: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        find_family(name)


def test_a_family_of_ones_own(tmp_path: Path) -> None:
    """Found by its name, loaded, trained and sampled like a built-in one; its folder need not be recognised."""
    assert find_family(OWN) is FAMILY
    records = [PromptRecord(id=str(i), prompt="x" * (i + 1)) for i in range(3)]
    model = load_model(tmp_path, family=OWN, size=SIZE, train="net", options={"brightness": 0.5})
    sampler = SamplerConfig(steps=4, guidance_scale=1.0)
    together = model.generate(records, [1, 2, 3], sampler)
    assert torch.equal(together[1], model.generate(records[1:2], [*np.array([2])], sampler)[0])
    assert together[0].shape == (3, *ToyFlow.latent_shape[1:])
    assert not torch.equal(together[1], model.generate(records[1:2], [3], sampler)[0])
    with pytest.raises(UserError, match="a seed for each record, got 2 seeds and 3 records"):
        model.generate(records, [1, 2], sampler)
    policy = load_policy(str(tmp_path), family=OWN, rollout=sampler)
    got = policy.rollout(records, 2, torch.Generator().manual_seed(0))
    (chunk,) = policy.replay(got.trajectory, torch.arange(6))
    torch.testing.assert_close(chunk.log_probs, got.log_probs, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match="toy has no module 'dit'; it has net"):
        load_policy(str(tmp_path), family=OWN, module="dit")
    with pytest.raises(UserError, match=r"family toy has the options brightness .*:\n  model.options.brightnes:.*Did"):
        load_model(str(tmp_path), family=OWN, options={"brightnes": 1})


def without(folder: Path, part: str) -> None:
    """As a pipeline is saved that was made without it."""
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, part: [None, None]}))


@pytest.mark.parametrize("part", ["text_encoder", "tokenizer", "scheduler"])
def test_a_pipeline_without_a_part_is_refused(pipeline_folder: Path, tmp_path: Path, part: str) -> None:
    damaged = tmp_path / "pipeline"
    shutil.copytree(pipeline_folder, damaged)
    shutil.rmtree(damaged / part)
    with pytest.raises(UserError, match=rf"lacks {part}\."):
        load_model(str(damaged), size=SIZE, device="cpu")
    shutil.copytree(pipeline_folder / part, damaged / part)
    without(damaged, part)
    with pytest.raises(UserError, match=r"cannot be loaded: Pipeline .* expected"):
        load_model(str(damaged), size=SIZE, device="cpu")
