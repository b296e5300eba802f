"""Signals that ask a training to save itself and stop."""

from __future__ import annotations

import signal

import pytest

from visual_grpo import stopping
from visual_grpo.stopping import Stopped, stop_request, terminate_as_interrupt


def test_the_same_sigterm_twice_within_seconds_is_one_stop() -> None:
    """A batch system and torchrun both pass it on."""
    asked: list[int] = []
    with terminate_as_interrupt(), stop_request(lambda: asked.append(1)) as request:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert request.by == signal.SIGTERM
        assert asked == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_later_one_acts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_ONE_STOP", -1.0)
    with terminate_as_interrupt(), stop_request(lambda: None):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)


def test_a_second_ctrl_c_acts_at_once() -> None:
    with stop_request(lambda: None) as request:
        signal.raise_signal(signal.SIGINT)
        assert request.by == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
