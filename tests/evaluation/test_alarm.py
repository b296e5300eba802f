"""The comparison of a training with the base model at its evaluations: bounds by hand, limits, false alarms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy import stats

from visual_grpo.common.types import PromptRecord, TextSample
from visual_grpo.config import AlarmConfig
from visual_grpo.evaluation.alarm import DISTANCE, UNSCORED, HackingMonitor, InterimAnalysis, Watched

COUNT = 24
RECORDS = [PromptRecord(id=f"p{i:02d}", prompt=f"prompt {i}") for i in range(COUNT)]
BASE = np.linspace(0.2, 0.6, COUNT)
"""Of the guard, on the base model's pictures."""
WEIGHTS = {"ocr": 1.0, "guard": 0.0}


def baseline(folder: Path, guard: np.ndarray = BASE, judges: dict[str, str] | None = None, **columns: Any) -> Path:
    """Scores and pictures with rows that are not of the eval prompts' first image."""
    (folder / "eval").mkdir(parents=True)
    rows = []
    for i, record in enumerate(RECORDS):
        Image.new("RGB", (64, 32), (100, 100, 100)).save(folder / f"eval/{record.id}.png")
        row = {"sampler": "eval", "split": "eval", "id": record.id, "index": 0, "unit": record.id}
        row |= {"total": 1.0, "reward/ocr": 1.0, "reward/guard": guard[i], "file": f"eval/{record.id}.png"}
        rows += [row, row | {"index": 1, "total": 99.0}, row | {"split": "held_out", "reward/guard": 99.0}]
        rows += [row | {"sampler": "rollout", "total": 99.0}]
    table = pd.DataFrame(rows).assign(**columns)
    table.attrs = {"weights": WEIGHTS, "judges": judges or {}}
    table.to_parquet(folder / "scores.parquet")
    return folder


def look(monitor: HackingMonitor, guard: Any = BASE, total: Any = 2.0, pixel: int = 100) -> InterimAnalysis:
    images = [torch.full((3, 32, 64), pixel, dtype=torch.uint8)] * COUNT
    totals = torch.as_tensor(np.broadcast_to(total, COUNT).copy(), dtype=torch.float32)
    return monitor.look(RECORDS, images, totals, {"guard": torch.as_tensor(np.asarray(guard), dtype=torch.float32)})


def watched(found: InterimAnalysis, name: str) -> Watched:
    return next(one for one in found.watched if one.name == name)


@pytest.mark.parametrize(("max_distance", "signals"), [(None, 2), (0.5, 3)])
def test_the_bounds_are_of_the_paired_changes_at_the_level_of_all_looks_and_signals(
    tmp_path: Path, max_distance: float | None, signals: int
) -> None:
    monitor = HackingMonitor(
        baseline(tmp_path), AlarmConfig(error=0.06, max_distance=max_distance), looks=4, weights=WEIGHTS
    )
    now = BASE * 0.7 + 0.02 * np.sin(np.arange(COUNT))
    guard = watched(look(monitor, guard=now), "guard")
    change = now - BASE
    half = stats.t.ppf(1 - 0.06 / (4 * signals), COUNT - 1) * change.std(ddof=1) / COUNT**0.5
    expected = [value / BASE.mean() for value in (change.mean(), change.mean() - half, change.mean() + half)]
    assert [guard.change, guard.low, guard.high] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("guard", "total", "alarm"),
    [
        (BASE * 0.6, 2.0, "the reward rose by 1, and guard fell by 40% (at least "),
        (BASE * 0.6, 1.0, None),  # Nothing is won by it.
        (BASE * 0.6, 0.5, None),
        (BASE * 0.8, 2.0, None),  # Within the limit of 25%.
        (BASE * 1.9, 2.0, None),
        (BASE, 2.0, None),
    ],
)
def test_an_alarm_needs_a_rise_and_a_fall(tmp_path: Path, guard: np.ndarray, total: float, alarm: str | None) -> None:
    found = look(
        HackingMonitor(baseline(tmp_path), AlarmConfig(), looks=4, weights=WEIGHTS), guard=guard, total=total
    ).alarm
    assert found is None if alarm is None else found is not None and found.startswith(alarm)


def test_a_fall_that_chance_explains_is_no_alarm(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 0.5, COUNT)
    noise += BASE.mean() * -0.4 - noise.mean()
    found = look(HackingMonitor(baseline(tmp_path), AlarmConfig(), looks=4, weights=WEIGHTS), guard=BASE + noise)
    assert watched(found, "guard").change == pytest.approx(-0.4, abs=1e-5)
    assert found.alarm is None


def test_samples_that_can_no_longer_be_scored_are_an_alarm_without_a_rise(tmp_path: Path) -> None:
    monitor = HackingMonitor(baseline(tmp_path), AlarmConfig(), looks=4, weights=WEIGHTS)
    total = np.where(np.arange(COUNT) < 14, np.nan, 1.0)
    found = look(monitor, total=total)
    assert not found.risen
    assert found.alarm is not None
    assert found.alarm.startswith("58% more of the samples cannot be scored (at least ")
    assert look(monitor, total=np.where(np.arange(COUNT) < 2, np.nan, 1.0)).alarm is None
    assert (
        look(
            HackingMonitor(monitor.folder, AlarmConfig(max_unscored_rise=0.5), looks=4, weights=WEIGHTS), total=total
        ).alarm
        is None
    )


def test_the_distance_is_that_of_the_pictures(tmp_path: Path) -> None:
    folder = baseline(tmp_path)
    found = look(HackingMonitor(folder, AlarmConfig(), looks=4, weights=WEIGHTS), pixel=151)
    assert watched(found, DISTANCE).change == pytest.approx(0.2)
    assert found.alarm is None, "it is only followed"
    alarm = look(HackingMonitor(folder, AlarmConfig(max_distance=0.01), looks=4, weights=WEIGHTS), pixel=151).alarm
    assert alarm == "the reward rose by 1, and the pictures are 0.20 away from the base model's (at least 0.12)"
    assert watched(
        look(HackingMonitor(folder, AlarmConfig(), looks=4, weights=WEIGHTS)), DISTANCE
    ).change == pytest.approx(0)


def test_the_distance_is_a_root_mean_square(tmp_path: Path) -> None:
    half = torch.full((3, 32, 64), 100, dtype=torch.uint8)
    half[:, :, 32:] = 151
    monitor = HackingMonitor(baseline(tmp_path), AlarmConfig(), looks=4, weights=WEIGHTS)
    found = monitor.look(RECORDS, [half] * COUNT, torch.ones(COUNT), {"guard": torch.as_tensor(BASE)})
    assert watched(found, DISTANCE).change == pytest.approx(0.2 / 2**0.5)


def test_what_the_baseline_does_not_have_is_left_out_and_texts_have_no_distance(tmp_path: Path) -> None:
    monitor = HackingMonitor(baseline(tmp_path), AlarmConfig(), looks=1, weights=WEIGHTS)
    records = [*RECORDS[:5], PromptRecord(id="new", prompt="new")]
    texts = [TextSample(text="", finished=True, frame=(8, 8))] * 6
    found = monitor.look(records, texts, torch.full((6,), 2.0), {"guard": torch.full((6,), 0.1)})
    assert {own.name for own in found.watched} == {"guard", UNSCORED}
    assert {name: one.difference for name, one in found.rises.items()} == {"total": 1.0}
    assert monitor.files(records)[4:] == [tmp_path / "eval/p04.png", None]
    nothing = monitor.look(records[5:], texts[5:], torch.ones(1), {"guard": torch.ones(1)})
    assert nothing.alarm is None
    assert nothing.metrics() == {}, "a metric is a number"


def test_the_metrics_have_every_signal_with_its_bounds(tmp_path: Path) -> None:
    metrics = look(
        HackingMonitor(baseline(tmp_path), AlarmConfig(), looks=4, weights=WEIGHTS), guard=BASE * 0.9
    ).metrics()
    kinds = ("watch", "watch_low", "watch_high")
    names = [f"{kind}/{name}" for name in ("guard", UNSCORED, DISTANCE) for kind in kinds]
    assert list(metrics) == names
    assert metrics["watch/guard"] == pytest.approx(-0.1, abs=1e-6)
    assert metrics["watch_low/guard"] < -0.1 < metrics["watch_high/guard"] < 0


@pytest.mark.parametrize(
    ("of", "second", "ocr", "total", "alarm"),
    [
        ("total", BASE * 0.9, 1.0, 2.0, "the reward rose by 1, and the judge guard fell by 10% (at least "),
        ("total", BASE * 1.1, 1.0, 2.0, None),
        ("total", BASE * 0.9, 2.0, 1.0, None),
        # The judge of one reward is looked at where that rose, whatever the total did.
        ("ocr", BASE * 0.9, 2.0, 1.0, "ocr rose by 1, and the judge guard fell by 10% (at least "),
        ("ocr", BASE * 0.9, 1.0, 2.0, None),
    ],
)
def test_a_judge_may_not_fall_at_all(
    tmp_path: Path, of: str, second: np.ndarray, ocr: float, total: float, alarm: str | None
) -> None:
    of_ocr: dict[str, Any] = {"reward/ocr": 1.0}
    monitor = HackingMonitor(
        baseline(tmp_path, judges={"guard": of}, **of_ocr), AlarmConfig(), looks=4, weights=WEIGHTS
    )
    rewards = {"guard": torch.tensor(second), "ocr": torch.full((COUNT,), ocr)}
    images = [torch.full((3, 32, 64), 100, dtype=torch.uint8)] * COUNT
    found = monitor.look(RECORDS, images, torch.full((COUNT,), total), rewards)
    assert found.alarm is None if alarm is None else found.alarm is not None and found.alarm.startswith(alarm)
    assert found.suspicion == pytest.approx(0.1 if alarm else 0.0, abs=1e-6)


def test_a_judge_whose_mean_is_zero_can_fall_too(tmp_path: Path) -> None:
    centred = BASE - BASE.mean()
    monitor = HackingMonitor(
        baseline(tmp_path, centred - centred.mean(), {"guard": "total"}), AlarmConfig(), looks=1, weights=WEIGHTS
    )
    found = look(monitor, guard=centred - centred.mean() - 0.1)
    assert found.alarm is not None
    assert "the judge guard fell by " in found.alarm


def test_the_total_of_the_baseline_is_that_of_the_trainings_weights(tmp_path: Path) -> None:
    """A baseline pairs with any weights: nothing has risen where a reward only counts twice."""
    folder = baseline(tmp_path)
    twice = HackingMonitor(folder, AlarmConfig(), looks=4, weights={"ocr": 2.0, "guard": 0.0})
    found = look(twice, guard=BASE * 0.5, total=2.0)
    assert (found.rises["total"].difference, found.alarm) == (0.0, None)
    trained = HackingMonitor(folder, AlarmConfig(), looks=4, weights={"ocr": 1.0, "guard": 1.0})
    assert trained.guards == []
