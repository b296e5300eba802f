"""An adapter on a hub that speaks the hub's HTTP API: what others get, and what is never uploaded."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from tests.hub import COMMIT, Handler, hub
from tests.models.families.sd3 import tiny as sd3
from tests.models.families.test_flow_families import CPU
from tests.tracking.test_model_card import PROMPT, adapted, generated, same
from tests.tracking.toy_adapters import adapters as toy_adapters
from visual_grpo.adapter_folder import FACTS, adapter_digest
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.models.family import find_family
from visual_grpo.pipelines.publish import publish
from visual_grpo.tracking.adapter_lookup import start_of_training

BASE, MINE, TOKEN = "someone/sd3", "me/redder", "hf_0123456789abcdefghijklmnopqrstuvwx"
LICENCE = {"license": "other", "license_name": "community", "license_link": "LICENSE.md"}
LOADING = {"dit": "pipe.load_lora_weights(folder)"}


class Uploads(Handler):
    """Takes uploads: as huggingface.co/docs/hub/api says, and the client asks."""

    made: dict[str, Any]
    """Bodies of the requests that make a repository."""
    uploaded: dict[str, bytes]
    refusal: tuple[int, str] | None

    def send(
        self, content: bytes, tag: str, status: int = 200, code: str = "", *, broken: bool = False, location: str = ""
    ) -> None:
        if self.path.startswith("/api/models/") and b'"siblings"' in content:  # What the hub reads of a card.
            content = json.dumps(json.loads(content) | {"cardData": LICENCE}).encode()
        super().send(content, tag, status, code, broken=broken, location=location)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked = self.path.partition("?")[0]
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        if self.refusal is not None:
            return self.answer({"error": self.refusal[1]}, self.refusal[0])
        if asked == "/api/repos/create":
            self.made.update(json.loads(body))
            return self.answer({"url": f"{self.here()}/{MINE}"})
        if asked == "/api/validate-yaml":
            return self.answer({})
        if asked == f"/api/models/{MINE}/preupload/main":
            names = [entry["path"] for entry in json.loads(body)["files"]]
            return self.answer({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        assert asked == f"/api/models/{MINE}/commit/main"
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.uploaded[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self.answer({"commitUrl": f"{self.here()}/{MINE}/commit/{COMMIT}", "commitOid": COMMIT})

    def answer(self, content: Any, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def here(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture(autouse=True)
def takes_uploads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty working directory and cache, a token, and a hub that takes uploads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    Uploads.made, Uploads.uploaded, Uploads.refusal = {}, {}, None
    monkeypatch.setattr("tests.hub.Handler", Uploads)


def published(config: Parameters, base: Path, **settings: Any) -> dict[str, Any]:
    """Uploads to a hub with the base model in the folder ``base``."""
    tree = config.model_dump() | {"publish": {"repository": MINE} | settings, "output": "out"}
    with hub(BASE, base):
        latest, evaluation = Path("out/06_models/adapters"), Path("out/08_reporting/evaluation.json")
        return publish(Parameters.model_validate(tree), latest, evaluation)


@pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks` argument")
def test_what_is_published_loads_everywhere_and_gives_the_same_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sd3.pipeline().save_pretrained(tmp_path / "base")
    with hub(BASE, tmp_path / "base"):
        config = adapted(BASE, revision=COMMIT, options={"negative_prompt": "blurry"})
        expected = generated(config, prompt=PROMPT)
    facts = json.loads(Path("adapters", FACTS).read_text())
    facts |= {"command": f"kedro run --params=data.path={tmp_path}", "loading": LOADING}
    facts["parameters"]["data"]["path"] = str(tmp_path / "my photos")
    Path("adapters", FACTS).write_text(json.dumps(facts))
    Path("adapters/samples-000001.png").write_bytes(b"a picture of somebody")
    told = published(config, tmp_path / "base")
    assert told == {"repository": MINE, "commit": COMMIT, "adapters": adapter_digest(Path("adapters"))}
    assert Uploads.made == {"name": "redder", "organization": "me", "visibility": "private"}
    assert set(Uploads.uploaded) == {"README.md", "pytorch_lora_weights.safetensors"}
    assert not any(str(tmp_path).encode() in content for content in Uploads.uploaded.values())

    for name, content in Uploads.uploaded.items():
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_bytes(content)
    card = ModelCard.load(tmp_path / "mine/README.md")
    assert card.data.to_dict() == LICENCE | {
        "base_model": BASE,
        "base_model_relation": "adapter",
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "tags": ["lora", "grpo", "visual-grpo"],
    }
    assert "`my photos` (t2i)" in card.text
    assert f"`pipe.load_lora_weights({MINE!r})`" in card.text
    [code] = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    shutil.rmtree("adapters")
    with hub(MINE, tmp_path / "mine"):
        pipeline = find_family("sd3").load(str(tmp_path / "base"), CPU)
        pipeline.load_lora_weights(MINE)
        assert load_file(str(start_of_training(MINE, Path())))
        exec(compile(code.replace("prompt='...'", f"prompt={PROMPT!r}"), "card", "exec"), {})
    assert same(expected / "1.png", Path("sample.png"))


def toy(**facts: Any) -> Parameters:
    """Parameters for publishing adapters of two modules of a model on the hub."""
    toy_adapters(Path("adapters"), BASE, **facts)
    for file in Path("adapters").rglob("*.safetensors"):
        save_file({}, file)
    told = json.loads(Path("adapters", FACTS).read_text())
    Path("adapters", FACTS).write_text(json.dumps(told | {"sums": {}}))
    return Parameters.model_validate(told["parameters"] | {"adapter": "adapters"})


def test_two_modules_have_a_folder_each_and_peft_tells_no_place(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    config = toy(loading={"ar": "peft.PeftModel.from_pretrained(model, folder)", "dit": "pipe.x(folder, prefix=None)"})
    Path("adapters/ar/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path), "r": 4}))
    Path("adapters/ar/README.md").write_text(f"# Model card for {tmp_path}")
    published(config, tmp_path / "base", private=False)
    assert Uploads.made["visibility"] == "public"
    assert json.loads(Uploads.uploaded.pop("ar/adapter_config.json")) == {"base_model_name_or_path": BASE, "r": 4}
    card = Uploads.uploaded.pop("README.md").decode()
    assert f"- `dit`: `pipe.x({MINE!r}, subfolder='dit', prefix=None)`" in card
    assert set(Uploads.uploaded) == {"ar/adapter_model.safetensors", "dit/pytorch_lora_weights.safetensors"}


def test_the_result_of_these_very_adapters_is_on_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.setattr("visual_grpo.pipelines.publish.lines", lambda headline: [headline["sentence"]])
    config = toy()
    Path("out/08_reporting").mkdir(parents=True)
    for digest, expected in (("another", "None yet."), (adapter_digest(Path("adapters")), "Better by 0.4.")):
        judged = {"adapter_digest": digest, "headline": {"sentence": "Better by 0.4."}}
        Path("out/08_reporting/evaluation.json").write_text(json.dumps(judged))
        published(config, tmp_path / "base")
        assert f"## Result\n\n{expected}\n" in Uploads.uploaded["README.md"].decode()


def test_what_cannot_be_published_is_told_and_nothing_is_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    config = toy()
    with pytest.raises(UserError, match=r"publish\.repository=OWNER/NAME"):
        published(config, tmp_path / "base", repository=None)
    Uploads.refusal = 403, 'You don\'t have the rights to create a model under the namespace "me"'
    with pytest.raises(UserError, match=r"^publish: the hub refuses: .*rights to create a model under .*me"):
        published(config, tmp_path / "base")
    Uploads.refusal = None
    told = json.loads(Path("adapters", FACTS).read_text())
    for text, shown in (("x /srv/secret/place", "/srv/secret/place"), (TOKEN, "your token")):
        Path("adapters", FACTS).write_text(json.dumps(told | {"git.state": text}))
        with pytest.raises(UserError, match=rf"^publish: README\.md contains {shown}, which everybody"):
            published(config, tmp_path / "base")
    Path("adapters", FACTS).write_text(json.dumps(told | {"model": "/data/sd3", "model_content": "c"}))
    with pytest.raises(UserError, match=r"is the folder /data/sd3, which others .*publish\.base_model=OWNER/NAME"):
        published(config, tmp_path / "base")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="has no token of the hub"):
        published(config, tmp_path / "base", base_model=BASE)
    assert Uploads.uploaded == {}
