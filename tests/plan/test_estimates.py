"""Seconds, hours and advice from counted work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.plan.page import parameters_of
from visual_grpo.components import make_plan
from visual_grpo.decisive_parameters import decisive
from visual_grpo.errors import UserError
from visual_grpo.plan.advice import changes
from visual_grpo.plan.cards import CARDS, find_card
from visual_grpo.plan.largest import Batch, LargestBatch, largest
from visual_grpo.plan.meter import Phase
from visual_grpo.plan.run_time import run_time
from visual_grpo.plan.time_model import BANDWIDTH_SHARE, FLOPS_SHARE, LAUNCH_SECONDS, seconds_of

H100 = CARDS["H100"]


def phase(flops: float, moved: float, kernels: int) -> Phase:
    work = Counter({(int(flops / kernels), int(moved / kernels)): kernels})
    return Phase(flops=flops, bytes=moved, kernels=kernels, work=work)


def test_the_longest_of_three_times_counts():
    assert seconds_of(phase(1e15, 1e6, 10), H100, "bfloat16") == pytest.approx(2.54, rel=0.01), "the published rate"
    assert seconds_of(phase(0, 3.35e12, 10), H100, "bfloat16") == pytest.approx(1 / BANDWIDTH_SHARE)
    assert seconds_of(phase(10, 10, 2397), H100, "bfloat16") == pytest.approx(2397 * LAUNCH_SECONDS)
    assert pytest.approx(0.035, rel=0.01) == 2397 * LAUNCH_SECONDS, "the published seconds of a token"


def test_another_card_has_its_own_rates():
    work = phase(1e15, 1e6, 10)
    a100 = seconds_of(work, CARDS["A100 80GB"], "bfloat16")
    assert a100 == pytest.approx(1e15 / (FLOPS_SHARE * 312e12))
    assert seconds_of(work, H100, "float32") > 10 * seconds_of(work, H100, "bfloat16")


def test_hours_are_those_of_everything_that_is_drawn():
    config = parameters_of("glm_image", {"evaluation": {"batch_size": 4}})
    plan = make_plan(config.model_copy(update={"model": config.model.model_copy(update={"family": "glm_image"})}))
    times = run_time(config, plan, 100.0, {"rollout": 1.0, "sde": 2.0, "stock": 4.0}, 1)
    assert times.steps == 400 * 100
    assert (times.evaluations_in_training, times.evaluation_in_training) == (8, 4 * 4.0)
    assert times.baseline == times.evaluate == 75 * (1 + 2 + 4), "2 splits of 150 prompts in batches of 4"
    assert times.signal_check == 3 * 100
    assert times.total == 300 + 40000 + 8 * 16 + 2 * 525
    two = run_time(config, plan, 100.0, {"rollout": 1.0, "sde": 2.0, "stock": 4.0}, 2)
    assert (two.evaluation_in_training, two.baseline) == (2 * 4.0, 38 * 7.0)


def test_a_batch_that_is_not_full_takes_its_share():
    config = parameters_of("glm_image", {"evaluation": {"batch_size": 32, "max_prompts": 20}})
    plan = make_plan(config.model_copy(update={"model": config.model.model_copy(update={"family": "glm_image"})}))
    seconds = {"rollout": 1.0, "sde": 2.0, "stock": 4.0}

    def share(images: int) -> float:
        return 0.5 + images / 64

    one = run_time(config, plan, 100.0, seconds, 1, share)
    assert one.evaluation_in_training == share(16) * 4.0
    assert one.baseline == (1 + share(8)) * 7.0, "2 splits of 20 prompts"
    three = run_time(config, plan, 100.0, seconds, 3, share)
    assert three.evaluation_in_training == share(6) * 4.0, "the largest of three shares of 16"
    assert three.baseline == share(14) * 7.0


def test_a_card_is_found_however_it_is_spelled_and_an_unknown_one_is_told_with_all():
    assert find_card("rtx4090") is CARDS["RTX 4090"]
    with pytest.raises(
        UserError, match=r"no known card.*Known: L4 \(22 GiB\), .*RTX 4090 \(24 GiB\), L40S.*H200"
    ) as told:
        find_card("H10")
    assert "Did you mean 'H100'" in str(told.value)
    with pytest.raises(UserError, match="Did you mean 'A100 80GB'"):
        find_card("A100")
    assert find_card("4090") is CARDS["RTX 4090"]


@pytest.mark.parametrize(("usable", "most"), [(99, 0), (100, 1), (399, 3), (400, 4), (10**6, 9)])
def test_the_largest_batch_is_the_last_that_fits(usable, most):
    batch = Batch(parameter="x", value=2, most=9, peak=lambda count: 100 * count)
    assert largest(batch, usable).largest == most


def test_memory_that_does_not_grow_evenly_is_run_again():
    batch = Batch(parameter="x", value=2, most=100, peak=lambda count: 10 * count**2)
    assert 90 < largest(batch, 100_000).peak <= 100_000


@pytest.mark.parametrize(
    ("peak", "most"),
    [
        (lambda count: 100 if count == 1 else 300 + count, 700),  # The second row moves the peak elsewhere.
        (lambda count: 200 + 100 * -(-count // 8), 64),  # A prompt more for every eighth row.
        (lambda count: 100 + 20 * count if count < 20 else 100 * count, 19),
    ],
)
def test_the_search_goes_on_until_the_card_is_nearly_full(peak: Callable[[int], int], most: int) -> None:
    asked: list[int] = []

    def noted(count: int) -> int:
        asked.append(count)
        return peak(count)

    batch = Batch(parameter="x", value=2, most=1000, peak=noted)
    found = largest(batch, 1000)
    assert 0.85 * most <= found.largest <= most
    assert found.peak == peak(found.largest) <= 1000
    assert found.peak >= 970 or peak(found.largest + max(1, found.largest // 16)) > 1000
    assert len(asked) == len(set(asked)) <= 16


def test_what_to_change_is_said_in_parameters():
    config, card = parameters_of("sd3", {}), CARDS["RTX 4090"]
    too_much = LargestBatch(parameter="policy.denoise_batch", value=8, largest=3, peak=1)
    fits = LargestBatch(parameter="policy.decode_batch", value=4, largest=9, peak=1)
    assert changes(config, card, 10**10, card.usable, [too_much]) == []
    assert changes(config, card, 10**10, card.usable + 1, [too_much, fits]) == ["policy.denoise_batch=3 (set: 8)"]
    judged = changes(config, card, 10**10, card.usable + 1, [too_much], step=card.usable)
    assert judged[0].startswith(f"evaluation.batch_size={config.evaluation.batch_size // 2} ")
    assert changes(config, card, 10**10, card.usable + 1, [too_much], step=card.usable + 1) == [
        "policy.denoise_batch=3 (set: 8)"
    ]
    keeping = parameters_of("sd3", {"policy": {"gradient_checkpointing": False}})
    unknown = changes(keeping, card, 10**10, card.usable + 1, [])
    assert unknown[:2] == ["policy.gradient_checkpointing=true", "data.height=256,data.width=256"]
    not_searched = parameters_of("sd3", {"plan": {"largest_batches": False}})
    assert changes(not_searched, card, 10**10, card.usable + 1, [])[0].startswith("plan.largest_batches=true ")
    whole = changes(config, card, card.usable + 1, card.usable + 1, [])
    assert whole[0].startswith("model.base_weights=8bit ")
    assert "plan.gpu=L40S" in whole[1]
    assert whole[2].startswith("model.options.max_sequence_length=0")
    assert whole[3].startswith("distributed.sharded=true,distributed.processes=2 ")
    of_several = changes(config, card, card.usable + 1, card.usable + 1, [], networks=4)
    assert of_several[0].startswith("model.offload=phases")
    assert of_several[1:] == whole
    swapping = parameters_of("sd3", {"model": {"offload": "phases"}})
    assert changes(swapping, card, card.usable + 1, card.usable + 1, [], networks=4) == whole[:-1]
    cut = parameters_of("sd3", {"distributed": {"processes": 2, "sharded": True}})
    assert changes(cut, card, card.usable + 1, card.usable + 1, [], networks=4) == whole[1:-1]


def test_every_configuration_names_a_card_that_is_known():
    for environment in ("glm_image", "sd3", "qwen_image", "qwen2_5_vl"):
        config = parameters_of(environment, {})
        assert config.plan.gpu is not None
        find_card(config.plan.gpu)


def test_a_plan_says_what_all_processes_keep_on_the_host_and_where_cards_idle(tmp_path):
    from tests.policies.sd3 import tiny
    from visual_grpo.plan.make import make_plan as make

    tiny.pipeline().save_pretrained(tmp_path)
    changes_: dict[str, Any] = {
        "model": {"path": str(tmp_path), "dtype": "float32", "offload": "phases"},
        "data": {"height": 64, "width": 96},
        "evaluation": {"batch_size": 2, "prompts": 2, "max_prompts": None},
        "plan": {"gpu": "L4", "largest_batches": False, "prompt_words": 5},
    }
    one, three = (make(parameters_of("sd3", {**changes_, "distributed": {"processes": n}})) for n in (1, 3))
    elements = sum(one["parameters"].values())
    assert one["host_gb"] == one["host_kept_gb"] > 4 * elements / 1e9, "pinned in powers of two"
    assert three["host_kept_gb"] == pytest.approx(3 * one["host_kept_gb"])
    assert one["idle"] == ""
    assert three["idle"].startswith(
        "A step has 4 prompts for 3 cards, and takes as long as the 2 of one card: a multip"
    )
    assert one["counted_for"] == {"prompt_words": 5, "prompts_of_a_split": 2}
    with_all = make(parameters_of("sd3", {**changes_, "model": {**changes_["model"], "offload": "none"}}))
    assert with_all["host_kept_gb"] == 0
    assert with_all["host_gb"] == pytest.approx(4 * elements / 1e9)


def refused(changes_: dict[str, Any]) -> str:
    from visual_grpo.plan.make import make_plan as make

    with pytest.raises(UserError) as told:
        make(parameters_of("base", changes_))
    return str(told.value)


def test_bad_input_is_refused_before_anything_runs():
    assert "plan.gpu is 'GTX 1'" in refused({"plan": {"gpu": "GTX 1"}})
    assert "distributed.processes is 9, but grpo.prompts_per_step is 8" in refused({"distributed": {"processes": 9}})
    unknown = refused({"model": {"path": "zai-org/GLM-Imag", "family": "glm_image"}})
    assert "Did you mean 'zai-org/GLM-Image'" in unknown
    assert "Qwen/Qwen-Image" in unknown


def test_nothing_of_a_plan_decides_a_result():
    config = parameters_of("glm_image", {"plan": {"price_per_hour": 2.5}})
    assert (config.plan.gpu, config.plan.price_per_hour) == ("H100", 2.5)
    assert decisive("train", config.model_dump()) == decisive("train", parameters_of("glm_image", {}).model_dump())


def test_a_module_without_weights_has_the_types_that_loading_gives(tmp_path):
    """Saved buffers follow the weights; what is made anew on loading does not."""
    from diffusers import SD3Transformer2DModel

    from visual_grpo.plan.released.weightless import frozen
    from visual_grpo.starter.sd3.modules import build_transformer

    build_transformer(64, 0).save_pretrained(tmp_path)
    loaded = SD3Transformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.float16)
    planned = frozen(lambda: SD3Transformer2DModel.from_config(loaded.config), torch.float16)
    found = {name: value.dtype for name, value in (*planned.named_parameters(), *planned.named_buffers())}
    assert found == {name: value.dtype for name, value in (*loaded.named_parameters(), *loaded.named_buffers())}
    assert "pos_embed.pos_embed" in found
