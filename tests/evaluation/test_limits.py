"""What limits a training: curves that fail in each way, and real trainings of toys that do."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.grpo.test_trainer import trainer_of
from tests.toys import CountingScorer, ToyGaussianPolicy, ToyTokenPolicy, one_reward, records
from visual_grpo.evaluation.limits import FEWEST_STEPS, limit_notes

STEPS = np.arange(1, 41)
RISING = 0.3 + 0.5 * STEPS / 40
NOISE = 0.02 * np.random.default_rng(0).normal(size=40)


def curves(reward: Any = RISING, **columns: Any) -> pd.DataFrame:
    given = {name.replace("__", "/"): values for name, values in columns.items()}
    return pd.DataFrame({"step": STEPS, "reward/total": reward + NOISE} | given)


def every_ten(*values: float) -> list[float]:
    return [values[step // 10 - 1] if step % 10 == 0 else np.nan for step in STEPS]


def settings(**grpo: Any) -> dict[str, Any]:
    shared = {"loss": "grpo", "steps": 40, "updates_per_rollout": 1, "learning_rate": 0.1, "target_kl": None}
    shared |= {"prompts_per_step": 4, "group_size": 8, "kl_weight": 0.0, "schedule": "constant", "warmup_steps": 0}
    return {"grpo": shared | grpo, "modules": {}}


HALF_EQUAL = np.where(STEPS > 20, 0.8, 0.0)
FAST = np.minimum(0.3 + (STEPS - 1) / 6, 0.8)
RISEN = np.interp(STEPS, [1, 20, 40], [0.3, 0.8, 0.6])
FALLEN = np.interp(STEPS, [1, 30, 40], [0.3, 0.8, 0.6])
OF_DIT = {"modules": {"dit": {"learning_rate": 0.2, "target_kl": 0.3}}}
CASES: list[tuple[pd.DataFrame, dict[str, Any], str | None]] = [
    (curves(), settings(), None),
    (curves(zero_variance_share=0.5, clip_fraction=0.1, eval__total=every_ten(0.4, 0.5, 0.6, 0.59)), settings(), None),
    (curves(zero_variance_share=HALF_EQUAL), settings(), "80% of the scored groups .* had equal .*group_size"),
    (curves(ar__zero_variance_share=0.1, dit__zero_variance_share=0.9), settings(), "90% of the scored groups of dit"),
    (curves(clip_fraction=0.5, update_1__clip_fraction=0.9), settings(), r"50% of the decisions lost .*updates_per_ro"),
    (curves(clip_fraction=0.9), settings(loss="gspo"), None),
    (curves(clip_fraction=0.5), settings(loss="dppo"), r"gradient to grpo\.divergence_limit: .* \(0\.1\), or set"),
    (curves(clip_fraction=0.5), settings(target_kl=0.01), r"gradient to the clip: .* or grpo\.target_kl \(0\.01\)\.$"),
    (
        curves(ar__clip_fraction=0.5, dit__clip_fraction=0.1),
        settings() | OF_DIT,
        r"grpo\.updates_per_rollout or grpo\.learning_rate \(0\.1\), or set grpo\.target_kl\.$",
    ),
    (curves(0.5, learning_rate=0.02), settings(target_kl=0.01), r"group_size or grpo\.target_kl \(0\.01\)\.$"),
    (curves(eval__total=every_ten(0.5, 0.6, 0.5, 0.3)), settings(), r"fell from 0.6 at step 20 to 0.3, while .*"),
    (curves(np.where(STEPS < 25, RISING, 0.2)), settings(), r"fell from 0\.5\d* around step 24 to 0\.2\S* .*set grpo"),
    (curves(np.where(STEPS < 25, RISING, 0.2)), settings(target_kl=0.1), r"large: lower grpo\.target_kl \(0\.1\)\.$"),
    (
        curves(0.5),
        settings(),
        r"did not rise above its noise \(0\.\d+ in .* 0\.014 from .*raise grpo\.steps, grpo\.prompts",
    ),
    (curves(learning_rate=0.02), settings(target_kl=0.01), r"target_kl \(0\.01\) held the steps at 20% of the"),
    (curves(learning_rate=0.1 * (41 - STEPS) / 40), settings(target_kl=0.01, schedule="linear"), None),
    (curves(learning_rate=0.02 * (41 - STEPS) / 40), settings(target_kl=0.01, schedule="linear"), "at 20% of"),
    (
        curves(ar__learning_rate=0.1, dit__learning_rate=0.02),
        settings() | OF_DIT,
        r": modules\.dit\.target_kl \(0\.3\) held the steps of dit at 10% of",
    ),
    (curves(dit__learning_rate=0.2, ar__learning_rate=0.1), settings() | OF_DIT, None),
    (curves(FAST), settings(), None),
    (
        curves(RISEN, eval__total=every_ten(0.5, 0.8, 0.7, 0.6)),
        settings(),
        "^What limited the training: the reward fell",
    ),
    (curves(FALLEN + 100), settings(), r"fell from 101 around .*lower grpo\.learning_rate \(0\.1\), or set grpo\.ta"),
    (curves(learning_rate=0.02), settings() | OF_DIT, r": modules\.dit\.target_kl \(0\.3\) held the steps at 10% of"),
    (
        curves(FALLEN, ar__learning_rate=0.1, dit__learning_rate=0.2),
        settings() | OF_DIT,
        r"grpo\.learning_rate \(0\.1\) or modules\.dit\.target_kl \(0\.3\), or set grpo\.target_kl\.$",
    ),
    (
        curves(entropy=1.0, learning_rate=0.1, eval__total=every_ten(0.5, 0.6, 0.5, 0.3)),
        settings(),
        r"\(grpo\.kl_weight\)",
    ),
    (
        curves(
            ar__entropy=1.0, ar__learning_rate=0.1, dit__learning_rate=0.1, eval__total=every_ten(0.5, 0.6, 0.5, 0.3)
        ),
        settings() | {"modules": {"ar": {"kl_weight": 0.1}}},
        r"\(modules\.ar\.kl_weight or grpo\.kl_weight\)",
    ),
]


@pytest.mark.parametrize(("history", "parameters", "sentence"), CASES)
def test_a_limit_is_named_with_the_parameter_to_look_at(history: Any, parameters: Any, sentence: str | None) -> None:
    modules = sorted({name.partition("/")[0] for name in history} & {"ar", "dit"}) or ["dit"]
    if sentence is None:
        assert limit_notes(history, parameters, modules) == []
    else:
        (note,) = limit_notes(history, parameters, modules)
        assert note.startswith("What limited the training: ")

        assert re.search(sentence, note), note
    assert limit_notes(history.head(FEWEST_STEPS - 1), parameters, modules) == []


class Coarse(CountingScorer):
    """Nearly all samples get the same reward."""

    def __call__(self, prompts: Any, samples: Any) -> Any:
        return one_reward((super().__call__(prompts, samples).total > 0.99).float())


class Random(CountingScorer):
    def __call__(self, prompts: Any, samples: Any) -> Any:
        return one_reward(super().__call__(prompts, samples).total.roll(7).cumsum(0).sin())


TRAININGS: list[tuple[Any, Any, dict[str, Any], str]] = [
    (ToyTokenPolicy, Coarse(), {}, "had equal rewards, which teach nothing"),
    (ToyTokenPolicy, Random(), {"learning_rate": 1e-4}, "did not rise above its noise"),
    (ToyGaussianPolicy, CountingScorer(), {"learning_rate": 1.0, "updates_per_rollout": 6}, "lost their gradient"),
    (ToyGaussianPolicy, CountingScorer(), {"learning_rate": 1.0, "target_kl": 0.01}, r"held the steps at \d+% of"),
]


@pytest.mark.parametrize(("policy", "scorer", "options", "sentence"), TRAININGS)
def test_a_training_that_fails_in_a_way_says_so(policy: Any, scorer: Any, options: Any, sentence: str) -> None:
    trainer = trainer_of(policy(), scorer, steps=24, **options)
    history = pd.DataFrame([{"step": m.step, **m.values} for m in trainer.fit(records(10))])
    (note,) = limit_notes(history, {"grpo": trainer.config.model_dump(mode="json")}, ["policy"])

    assert re.search(sentence, note), note
