"""What each parameter decides, and what follows from it."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field

from visual_grpo import provenance
from visual_grpo.config import decides
from visual_grpo.config.base import Strict
from visual_grpo.config.decides import PIPELINES, Decides, declarations
from visual_grpo.config.pipelines import FLOW

ROUNDED = Decides.SAMPLES | Decides.ROUNDING
# By hand, from what the code reads: a declaration is wrong without an error, and its results are then wrong in silence.
BY_HAND: dict[Decides, str] = {
    Decides.NOTHING: """
        output resume trust starter run generate score compare reward_report vote promotion plan gpu_check reproduce
        publish retrain
        tracking evaluation.redraw rewards.*.max_failed_share
        data.max_pixels data.max_file_mb data.max_zip_ratio data.max_zip_files""",
    Decides.CONTENT: """
        data.path data.layout data.columns data.split data.held_out_split data.revision data.config data.mask_value
        data.eval_share data.held_out_share data.sealed_share data.strict data.allow_outside model.path model.lora
        train.start""",
    Decides.ASKED: "evaluation.images_per_prompt evaluation.max_prompts evaluation.controls",
    Decides.ASKED | Decides.TRAINING: "evaluation.seed",
    Decides.SAMPLES: """
        data.task data.height data.width data.frames data.fps sampling policy.flow
        model.family model.revision model.dtype model.base_weights model.options""",
    ROUNDED: """
        model.device model.offload model.attention model.compile model.threads
        policy.denoise_batch policy.decode_batch policy.rollout_batch evaluation.batch_size""",
    Decides.SCORES: """
        reward rewards.*.function rewards.*.judge rewards.*.judge_of rewards.*.options rewards.*.frames
        rewards.*.over_frames rewards.*.clip rewards.*.only_where""",
    Decides.TRAINING: """
        seed train.seed train.ema_decay grpo modules evaluation.prompts evaluation.adapter policy.train policy.stages
        policy.lora policy.signal_check policy.share_start_noise policy.decode_guidance_scale sampling.rollout.height
        sampling.rollout.width sampling.rollout.frames""",
    Decides.TRAINING | Decides.ROUNDING: """
        grpo.micro_batch_size modules.*.micro_batch_size policy.gradient_checkpointing distributed""",
    Decides.TRAINING | Decides.JUDGEMENT: "rewards.*.weight modules.*.rewards",
    Decides.STOPPING: "alarm grpo.non_finite evaluation.every train.early_stopping_patience",
    Decides.JUDGEMENT: "adapter evaluation.bootstrap_samples",
}


def test_every_parameter_is_declared_as_it_is_read() -> None:
    kinds = {name: kind for kind, names in BY_HAND.items() for name in names.split()}
    expected = {}
    for name in declarations():
        parts = name.split(".")
        own = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        expected[name] = next((kinds[part] for part in own if part in kinds), "nowhere in this table")
    assert declarations() == expected


class Outer(Strict, decides=Decides.TRAINING):
    inherited: int = 0
    own: Annotated[int, Decides.STOPPING] = 0


class Probe(Strict):
    undeclared: int = 0
    content: Annotated[int, Decides.CONTENT] = 0
    asked: Annotated[int, Decides.ASKED] = 0
    samples: Annotated[int, Decides.SAMPLES] = 0
    rounded: Annotated[int, ROUNDED] = 0
    scores: Annotated[int, Decides.SCORES] = 0
    judgement: Annotated[int, Decides.JUDGEMENT] = 0
    nothing: Annotated[int, Decides.NOTHING] = 0
    section: Outer = Outer()
    several: dict[str, Outer] = Field(default_factory=dict)


# Is the baseline made again, does it not pair, is a resume refused, does judging take it from the command?
QUESTIONS = [
    ("undeclared", (True, True, True, True)),
    ("content", (False, False, False, False)),
    ("asked", (True, True, False, True)),
    ("samples", (True, True, True, False)),
    ("rounded", (True, False, False, True)),
    ("scores", (True, True, True, False)),
    ("judgement", (False, False, False, True)),
    ("nothing", (False, False, False, True)),
    ("section.inherited", (False, False, True, False)),
    ("section.own", (False, False, False, True)),
    ("several.any.inherited", (False, False, True, False)),
    ("several.any.own", (False, False, False, True)),
]


@pytest.mark.parametrize(("name", "answers"), QUESTIONS)
def test_what_follows_from_a_declaration(name: str, answers: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    known = {f"probe.{leaf}": kind for leaf, kind in decides._leaves(Probe, (), Decides.EVERYTHING)}
    monkeypatch.setattr(decides, "declarations", lambda: known)
    decides.declared.cache_clear()

    def record(value: int) -> dict[str, Any]:
        tree: Any = value
        for part in reversed(["probe", *name.split(".")]):
            tree = {part: tree}
        return {"parameters": tree}

    before, now = record(1), record(2)
    baseline, training = PIPELINES["baseline"], PIPELINES["train"] & ~Decides.STOPPING
    judged = provenance.parameters_of_training(now["parameters"], before["parameters"], {})
    found = (
        bool(provenance.differences(before, now, baseline)),
        bool(provenance.differences(before, now, baseline, rounding=False, covers=True)),
        bool(provenance.differences(before, now, training, rounding=False)),
        judged == now["parameters"],
    )
    decides.declared.cache_clear()
    assert found == answers


def test_a_baseline_of_more_samples_covers_one_of_fewer_and_a_pipeline_that_judges_is_known() -> None:
    assert set(PIPELINES) == {*FLOW} - {"starter", "data_preparation"}
    asked = Decides.ASKED
    more, fewer = ({"parameters": {"evaluation": {"max_prompts": count}}} for count in (9, 3))
    assert provenance.differences(more, fewer, asked) != {} == provenance.differences(more, fewer, asked, covers=True)
    assert provenance.differences(fewer, more, asked, covers=True) != {}
