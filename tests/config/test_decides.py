"""What each parameter decides, and what follows from it."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field

from visual_grpo import provenance
from visual_grpo.config import decides
from visual_grpo.config.base import Strict
from visual_grpo.config.decides import DEPENDS_ON, Decides, declarations
from visual_grpo.config.pipelines import DATA_FLOW

# By hand, from what the code reads: a declaration is wrong without an error, and its results are then wrong in silence.
# What follows where a parameter changes, see `consequences` -> the parameters of which that is true.
BY_HAND = {
    "": """
        output resume trust starter run generate score compare reward_report vote promotion plan gpu_check reproduce
        publish retrain
        tracking evaluation.redraw rewards.*.max_failed_share
        data.max_pixels data.max_file_mb data.max_zip_ratio data.max_zip_files""",
    # What is read, whose digests are compared in its place.
    "named own": """
        data.path data.layout data.columns data.split data.held_out_split data.revision data.config data.mask_value
        data.eval_share data.held_out_share data.sealed_share data.strict data.allow_outside model.path model.lora
        train.start""",
    # Which samples are asked for.
    "named again unpaired rejudged": "evaluation.images_per_prompt evaluation.max_prompts evaluation.controls",
    "named again unpaired retrained refused rejudged": "evaluation.seed",
    # The samples, and only their last bits.
    "named again unpaired retrained refused rejudged own": """
        data.task data.height data.width data.frames data.fps sampling policy.flow
        model.family model.revision model.dtype model.base_weights model.options reward""",
    "again retrained rejudged": """
        model.device model.offload model.attention model.compile model.threads
        policy.denoise_batch policy.decode_batch policy.rollout_batch evaluation.batch_size""",
    # The scores, and their total.
    "named again unpaired retrained refused rejudged own rewarded": """
        rewards.*.function rewards.*.judge rewards.*.judge_of rewards.*.options rewards.*.frames
        rewards.*.over_frames rewards.*.clip rewards.*.only_where""",
    "named retrained refused rejudged own rewarded": "rewards.*.weight",
    "named retrained refused rejudged own": "modules.*.rewards",
    # The adapters, their last bits, and when their training ends.
    "named retrained refused own": """
        seed train.seed train.ema_decay grpo modules evaluation.prompts evaluation.adapter policy.train policy.stages
        policy.lora policy.signal_check policy.share_start_noise policy.decode_guidance_scale sampling.rollout.height
        sampling.rollout.width sampling.rollout.frames""",
    "retrained": """
        grpo.micro_batch_size modules.*.micro_batch_size policy.gradient_checkpointing distributed""",
    "named retrained": "alarm grpo.non_finite evaluation.every train.early_stopping_patience",
    # What is said about scores.
    "named rejudged": "adapter evaluation.bootstrap_samples",
}


def test_what_follows_from_a_change_of_each_parameter() -> None:
    follows = {name: words for words, names in BY_HAND.items() for name in names.split()}
    expected = {}
    for name in declarations():
        parts = name.split(".")
        own = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        expected[name] = next((follows[part] for part in own if part in follows), "nowhere in this table")
    assert {name: consequences(name) for name in declarations()} == expected


def consequences(name: str) -> str:
    """What follows where the parameter changes, in the order of these words.

    named: the run has it in its name. again: the baseline is generated again. unpaired: samples with and without the
    change do not pair. retrained: DVC trains again. refused: a training is not resumed. rejudged: DVC evaluates again.
    own: an adapter is judged with what its training had. rewarded: the rewards of candidate and champion differ.
    """
    before, now = ({"parameters": tree(name, value)} for value in ("a", "b"))
    judged = provenance.parameters_of_training(now["parameters"], before["parameters"], {})
    baseline, train = DEPENDS_ON["baseline"], DEPENDS_ON["train"]
    found = {
        "named": decides.decides(name, Decides.EVERYTHING, rounding=False),
        "again": provenance.differences(before, now, baseline),
        "unpaired": provenance.differences(before, now, baseline, rounding=False, covers=True),
        "retrained": provenance.differences(before, now, train),
        "refused": provenance.differences(before, now, train & ~Decides.STOPPING, rounding=False),
        "rejudged": provenance.differences(before, now, DEPENDS_ON["evaluate"]),
        "own": judged == before["parameters"],
        "rewarded": name.startswith("rewards.")
        and provenance.differences(before, now, Decides.SCORES | Decides.JUDGEMENT),
    }
    return " ".join(word for word, follows in found.items() if follows)


def tree(name: str, value: Any) -> Any:
    for part in reversed(name.replace("*", "any").split(".")):
        value = {part: value}
    return value


class Outer(Strict, decides=Decides.TRAINING):
    inherited: int = 0
    own: Annotated[int, Decides.STOPPING] = 0


class Probe(Strict):
    undeclared: int = 0
    section: Outer = Outer()
    several: dict[str, Outer] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("name", "follows"),
    [
        ("undeclared", "named again unpaired retrained refused rejudged"),
        ("section.inherited", "named retrained refused own"),
        ("section.own", "named retrained"),
        ("several.*.inherited", "named retrained refused own"),
        ("several.*.own", "named retrained"),
        ("not_there_any_more", "named again unpaired retrained refused rejudged"),
    ],
)
def test_a_new_parameter_without_a_declaration_decides_what_its_section_does_or_everything(
    name: str, follows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = dict(decides._leaves(Probe, (), Decides.EVERYTHING))
    monkeypatch.setattr(decides, "declarations", lambda: known)
    decides.declared.cache_clear()
    found = consequences(name)
    decides.declared.cache_clear()
    assert found == follows


def test_a_baseline_of_more_samples_covers_one_of_fewer_and_a_pipeline_that_judges_is_known() -> None:
    assert set(DEPENDS_ON) == {*DATA_FLOW} - {"starter", "data_preparation"}
    asked = Decides.ASKED
    more, fewer = ({"parameters": {"evaluation": {"max_prompts": count}}} for count in (9, 3))
    assert provenance.differences(more, fewer, asked) != {} == provenance.differences(more, fewer, asked, covers=True)
    assert provenance.differences(fewer, more, asked, covers=True) != {}
