"""DVC's hashes of what a training read, on a real DVC repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from visual_grpo.tracking.lineage_lookup import input_tags


def test_only_what_is_read_and_is_as_recorded_has_a_hash(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for name in ("01_raw/mine", "06_models/adapters"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "file").write_text(name)
    for words in (("init", "-q"), ("add", "-q", "data/01_raw/mine", "data/06_models/adapters")):
        subprocess.run([sys.executable, "-m", "dvc", *words], cwd=tmp_path, check=True, capture_output=True)
    assert input_tags(["data/01_raw", "data/05_model_input"], tmp_path).keys() == {"dvc.data/01_raw/mine"}
    (tmp_path / "data/01_raw/mine/file").write_text("changed")
    assert input_tags(["data/01_raw"], tmp_path) == {}
