"""The README's code runs as it stands, on a small untrained model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def code_after(heading: str, model: Path, steps: int = 2) -> str:
    """The first Python block of a section, with the trained model's folder replaced and less work."""
    section = README.split(f"## {heading}\n", 1)[1]
    match = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert match is not None
    code = match.group(1).replace("data/06_models/base", str(model))
    return re.sub(r"steps=20", f"steps={steps}", code)


def test_the_core_without_kedro(
    pipeline_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code_after("The core without Kedro", pipeline_folder), "README.md", "exec"), {})
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2"]
    assert (tmp_path / "redness-adapter" / "adapter_model.safetensors").is_file()


def test_the_adapters_load_as_shown(pipeline_folder: Path, tmp_path: Path) -> None:
    from visual_grpo.components import load_model

    load_model(str(pipeline_folder), train=["ar", "dit"]).adapters.save(tmp_path)
    shown = code_after("Use the adapters", pipeline_folder).replace("data/06_models/adapters", str(tmp_path))
    names: dict[str, Any] = {}
    exec(compile(shown, "README.md", "exec"), names)
    assert names["image"].size == (128, 128)


def test_it_is_for_the_first_ten_minutes() -> None:
    assert len(README.split()) <= 1350
    headings = re.findall(r"^## (.*)$", README, re.M)
    assert headings[:6] == ["Demo", "What it does", "Your data", "Your reward", "Your model", "Your GPU"]
