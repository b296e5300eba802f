"""A dataset of the hub: what is read is what the hub has at the commit, or there is one reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.making import data_config
from tests.data.test_layouts import refusal
from tests.hub import COMMIT, FILES, RESET, hub, hub_at
from visual_grpo.common.errors import UserError
from visual_grpo.config.pipelines import GenerateConfig
from visual_grpo.data.manifest import RecordTable
from visual_grpo.data.preparation import Preparation, ad_hoc_records
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


def test_the_commit_that_is_read_is_in_the_report(tmp_path: Path) -> None:
    rows = "".join(f'{{"prompt": "a cat {number}"}}\n' for number in range(20))
    with hub(NAME, repository(tmp_path / "repository", {"train.jsonl": rows}), kind="datasets"):
        Preparation(data_config(PATH, revision="main")).write(tmp_path / "records.parquet")
    table = RecordTable(tmp_path / "records.parquet")
    assert (len(table), table.report["commit"]) == (20, COMMIT)


@pytest.mark.parametrize("path", ["https://huggingface.co/datasets/acme/pictures/", PATH])
def test_a_dataset_is_named_by_its_page(path: str) -> None:
    assert data_config(path).path == PATH


@pytest.mark.parametrize(
    "path", ["https://huggingface.co/acme/pictures", "https://hf.co/datasets/acme/pictures/tree/a"]
)
def test_a_different_address_of_the_hub_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="expected hf://datasets/OWNER/NAME"):
        data_config(path)


def test_one_of_several_configurations_is_named(tmp_path: Path) -> None:
    with hub(NAME, repository(tmp_path / "repository", TWO), kind="datasets"):
        assert prompts(config="fr") == ["bonjour"]
        assert "has the configurations en, fr, and none is named: set data.config to one" in refusal(PATH)
        assert "has the configurations en, fr, and data.config is 'de'" in refusal(PATH, config="de")
        prepared = ad_hoc_records(PATH, data_config(PATH), "generate.prompts")
        with pytest.raises(UserError, match=r"none is named: set data\.config to one"), prepared:
            pass


def test_what_was_read_last_is_not_taken_for_what_the_hub_has_now(tmp_path: Path) -> None:
    folder = repository(tmp_path / "repository", ONE)
    with hub(NAME, folder, kind="datasets"):
        assert prompts() == ["from the hub"]
    later = {"kind": "datasets", "commit": "f" * 40}
    with hub(NAME, folder, refused=FILES, **later):  # type: ignore[arg-type]
        assert f"cannot be read at commit {'f' * 40}: only 0123" in refusal(PATH)


@pytest.mark.parametrize(
    ("files", "refused", "said"),
    [
        (ONE, (401, "GatedRepo"), "acme/pictures is gated"),
        (ONE, (401, "RepoNotFound"), "the hub has no dataset acme/pictures"),
        (ONE, (429, ""), "the hub answers 429"),
        (ONE, RESET, "the download of acme/pictures broke off"),
        (ONE | {"pictures.py": ""}, None, "acme/pictures is a script"),
        (TWO, None, "has the configurations en, fr"),
    ],
)
def test_an_error_names_the_parameter_that_names_the_dataset(
    files: dict[str, str], refused: tuple[int, str] | None, said: str, tmp_path: Path
) -> None:
    folder = repository(tmp_path / "repository", files)
    prepared = ad_hoc_records(PATH, data_config("elsewhere"), "generate.prompts")
    with hub(NAME, folder, kind="datasets", refused=refused), pytest.raises(UserError, match=said) as told, prepared:
        pass
    assert str(told.value).startswith("generate.prompts: ")
    assert "data.path" not in str(told.value)


@pytest.mark.parametrize(
    ("training", "files", "read"),
    [
        ({"path": "hf://datasets/acme/other", "config": "fr", "revision": "v2"}, ONE, "from the hub"),
        ({"path": PATH, "config": "fr"}, TWO, "bonjour"),
    ],
)
def test_revision_and_configuration_are_of_the_dataset_at_data_path(
    training: dict[str, str], files: dict[str, str], read: str, tmp_path: Path
) -> None:
    with (
        hub(NAME, repository(tmp_path / "repository", files), kind="datasets"),
        ad_hoc_records(PATH, data_config(**training), "generate.prompts") as records,
    ):
        assert [record.prompt for record in records] == [read]


def test_prompts_to_generate_are_named_by_the_page_of_a_dataset() -> None:
    assert GenerateConfig(prompts="https://huggingface.co/datasets/acme/pictures").prompts == PATH
