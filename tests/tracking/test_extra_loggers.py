"""TensorBoard and Weights & Biases: what they wrote is read back with their own readers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from PIL import Image

from visual_grpo.common.errors import UserError
from visual_grpo.config import TrackingConfig
from visual_grpo.tracking.tracker import check_packages, open_logs


def write(config: TrackingConfig, name: str = "ar seed 0", steps: tuple[int, ...] = (1, 2)) -> None:
    with open_logs(config, name, {"grpo.steps": 2}) as logs:
        assert len(logs) == 1
        for step in steps:
            for log in logs:
                log.metrics({"reward/total": step / 4}, step)
                log.image(Image.new("RGB", (8, 4), "red"), "samples", step)


def test_tensorboard_gets_curves_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    write(TrackingConfig(checkpoints="c", tensorboard=str(tmp_path)))
    events = EventAccumulator(str(tmp_path / "ar seed 0"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/total")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.width, e.height) for e in events.Images("samples")] == [(1, 8, 4), (2, 8, 4)]


def test_wandb_offline_gets_curves_pictures_and_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    write(TrackingConfig(checkpoints="c", wandb="offline"))
    [file] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    # The client no longer reads its own files; the texts in them are not compressed.
    # A separate process writes them, which may take a moment longer than the run.
    deadline = time.monotonic() + 60
    while (written := file.read_bytes()).count(b"reward/total") < 2 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert written.count(b"reward/total") >= 2
    for text in (b"0.25", b"0.5", b"ar seed 0", b"grpo.steps"):
        assert text in written
    assert len(list((tmp_path / "wandb").rglob("samples_*.png"))) == 2


def test_a_tracker_that_fails_at_the_start_or_later_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    import wandb

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    with open_logs(
        TrackingConfig(checkpoints="c", wandb="offline", tensorboard=str(tmp_path / "file")), "ar", {}
    ) as logs:
        wandb.finish()  # As if its process had gone.
        for step in (1, 2):
            for log in logs:
                log.metrics({"reward/total": 1.0}, step)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("visual_grpo")]
    start, later = (f"{name} failed and gets nothing from here on" for name in ("tensorboard", "wandb"))
    assert [text.partition(":")[0] for text in said] == [start, later]


def test_an_error_of_the_run_itself_is_raised() -> None:
    with (
        pytest.raises(RuntimeError, match="of the training"),
        open_logs(TrackingConfig(checkpoints="c"), "ar", {}),
    ):
        raise RuntimeError("of the training")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tracking\.wandb needs the package wandb"):
        check_packages(TrackingConfig(checkpoints="c", wandb="offline"))
    check_packages(TrackingConfig(checkpoints="c"))
