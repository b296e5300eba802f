"""Saved models that several tests score with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rewards.learned import tiny


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="session")
def dino_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved_dino(tmp_path_factory.mktemp("dino"))
