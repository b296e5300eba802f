"""A dataset of the hub: what is read is what the hub has at the commit, or there is one reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.making import data_config
from tests.data.test_layouts import refusal
from tests.hub import hub, hub_at
from visual_grpo.data.record import Record
from visual_grpo.data.sources import find_records

NAME = "acme/pictures"
PATH = f"hf://datasets/{NAME}"
CARD = "---\nconfigs:\n- config_name: en\n  data_files: en/*.jsonl\n- config_name: fr\n  data_files: fr/*.jsonl\n---\n"
ONE = {"train.jsonl": '{"prompt": "from the hub"}\n'}
TWO = {"en/a.jsonl": '{"prompt": "hello"}\n', "fr/a.jsonl": '{"prompt": "bonjour"}\n', "README.md": CARD}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty caches, no token, and a hub at which nobody answers."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    monkeypatch.chdir(tmp_path)
    with hub_at("http://127.0.0.1:9"):
        yield


def repository(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def prompts(**changes: Any) -> list[str]:
    return [item.prompt for item in find_records(data_config(PATH, **changes)).read() if isinstance(item, Record)]


def test_a_local_folder_of_the_same_name_is_not_read(tmp_path: Path) -> None:
    repository(tmp_path / NAME, {"train.jsonl": '{"prompt": "from the local folder"}\n'})
    with hub(NAME, repository(tmp_path / "repository", ONE), kind="datasets"):
        assert prompts() == ["from the hub"]


def test_one_of_several_configurations_is_named(tmp_path: Path) -> None:
    with hub(NAME, repository(tmp_path / "repository", TWO), kind="datasets"):
        assert prompts(config="fr") == ["bonjour"]
        assert "has the configurations en, fr, and none is named: set data.config to one" in refusal(PATH)
        assert "has the configurations en, fr, and data.config is 'de'" in refusal(PATH, config="de")


def test_what_was_read_last_is_not_taken_for_what_the_hub_has_now(tmp_path: Path) -> None:
    folder = repository(tmp_path / "repository", ONE)
    with hub(NAME, folder, kind="datasets"):
        assert prompts() == ["from the hub"]
    later = {"kind": "datasets", "commit": "f" * 40}
    with hub(NAME, folder, refused=(403, ""), **later):  # type: ignore[arg-type]
        assert f"cannot be read at commit {'f' * 40}: only 0123" in refusal(PATH)


REFUSED: list[tuple[str, dict[str, str], tuple[int, str] | None, str | None, str]] = [
    ("gated", ONE, (401, "GatedRepo"), None, "data.path: acme/pictures is gated, and this machine has no token"),
    ("script", {"pictures.py": "import os"}, None, None, "is a script, pictures.py, which would have to be run"),
    ("revision", ONE, None, "v9", "data.revision is 'v9', which is not a branch, tag or commit of acme/pictures"),
]


@pytest.mark.parametrize(
    ("files", "refused", "revision", "said"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_a_refusal_says_why(
    files: dict[str, str], refused: tuple[int, str] | None, revision: str | None, said: str, tmp_path: Path
) -> None:
    with hub(NAME, repository(tmp_path / "repository", files), kind="datasets", refused=refused):
        assert said in refusal(PATH, revision=revision)


def test_without_a_network_or_under_a_different_name(tmp_path: Path) -> None:
    assert "acme/pictures was not downloaded before, and http://127.0.0.1:9 does not answer" in refusal(PATH)
    with hub("acme/other", repository(tmp_path / "repository", ONE), kind="datasets"):
        assert "the hub has no dataset acme/pictures; or it is private" in refusal(PATH)
