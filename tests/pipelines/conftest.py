from pathlib import Path

import pytest

from tests.pipelines.painted import Project


@pytest.fixture
def painted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose policy is a painter."""
    return Project(tmp_path, monkeypatch)
