"""The report's page: what it says, that it is bounded, and that prompts stay text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.evaluation.defaults import FILE, parameters
from tests.evaluation.painter import records
from tests.evaluation.reports import drawn, reported, written
from visual_grpo.evaluation import page
from visual_grpo.evaluation.page import configuration

HOSTILE = (
    '<script>document.title = "executed"</script>',
    '"><img src="x" onerror="document.title = \'executed\'">',
    "</script><script>document.title = 'executed'</script>",
    "{{ 7 * 191 }} {% raw %}",
)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[dict[str, str | None]] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.scripts.append(dict(attrs))
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def read(folder: Path) -> str:
    return (folder / "evaluation.html").read_text(encoding="utf-8")


def data(text: str) -> list[dict[str, Any]]:
    """The embedded pairs."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    pairs: list[dict[str, Any]] = json.loads(found.group(1))
    return pairs


def test_a_prompt_is_never_part_of_the_markup(tmp_path: Path) -> None:
    prompts = [replace(record, prompt=text) for record, text in zip(records("held_out", 4), HOSTILE, strict=True)]
    training = {"mlflow_run_id": HOSTILE[0], HOSTILE[1]: "x"}
    text = read(reported(tmp_path, 0.2, {"held_out": prompts}, training=training, adapter=HOSTILE[2]))
    tags = Tags()
    tags.feed(text)
    assert tags.scripts == [{"type": "application/json", "id": "data"}, {}]
    assert tags.handlers == []
    assert "1337" not in re.sub(r'"data:image/[^"]*"', "", text)
    assert not any(hostile in text for hostile in HOSTILE[:3])
    assert all(hostile in unescape(text) for hostile in HOSTILE)
    assert {pair["prompt"] for pair in data(text)} == set(HOSTILE)


def test_nothing_runs_but_the_pages_own_script(tmp_path: Path) -> None:
    text = read(reported(tmp_path, 0.2))
    own = re.search(r"<script>(.*)</script>", text, re.DOTALL)
    assert own is not None
    digest = base64.b64encode(hashlib.sha256(own.group(1).encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text


def test_the_headline_its_control_and_where_it_comes_from_are_said(tmp_path: Path) -> None:
    training = {"mlflow_run_id": "0123456789abcdef0123456789abcdef", "command": "kedro run", "seed": 3, "versions": {}}
    text = unescape(read(reported(tmp_path, 0.2, training=training)))
    assert "On 4 held-out prompts (8 pairs) it is not shown that the trained model is better: fewer than 10" in text
    assert "<title>The trained model against the base model: doubtful</title>" in text
    assert "Control: without training, steps=20 gives the base model" in text
    assert '<dt>MLflow run</dt><dd title="0123456789abcdef0123456789abcdef">0123456789ab…</dd>' in text
    assert '<dt>command</dt><dd title="kedro run">kedro run</dd>' in text
    assert "<dt>versions" not in text
    assert text.count("Eval prompts choose the best adapter and may occur in training too") == 3


def test_no_number_of_the_tables_is_minus_zero(tmp_path: Path) -> None:
    text = read(reported(tmp_path, -1e-9))
    assert "-0.000" not in "".join(re.findall(r"<td.*?</td>", text))
    assert "+0.000 <span" in text


def test_the_list_of_pairs_is_bounded_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = read(reported(tmp_path, 0.2))
    assert len(data(everything)) == 24
    assert "24 of 24 pairs are embedded" in everything
    (tmp_path / "few").mkdir()
    monkeypatch.setattr(page, "MOST_PAIRS", 10)
    few = read(reported(tmp_path / "few", 0.2))
    shown = [(pair["split"], pair["sampler"]) for pair in data(few)]
    assert shown == [("held_out", "stock")] * 8 + [("held_out", "rollout")] * 2
    assert "10 of 24 pairs are embedded" in few


def test_unscored_samples_have_pictures_of_their_own(tmp_path: Path) -> None:
    before = drawn(tmp_path / "baseline", 0.0)
    blank = drawn(tmp_path / "trained", 0.2)
    blank.loc[blank["split"] == "held_out", ["total", "reward/brightness"]] = float("nan")
    blank.to_parquet(tmp_path / "trained" / "scores.parquet", index=False)
    folder = written(tmp_path, before, blank)
    text = read(folder)
    assert "16 of 24 pairs, over all samplers and splits, have a side that could not be scored." in text
    assert "Could not be scored: base 0, trained 8 of 8 each; the shares differ." in text
    assert "trained could not be scored" in text
    assert (folder / "unscored.png").is_file()


def test_parameters_that_differ_from_the_base_come_first(tmp_path: Path) -> None:
    base = parameters().model_dump(mode="json")
    found = configuration(base | {"seed": 3, "resume": "auto", "grpo": base["grpo"] | {"loss": "dapo"}}, FILE)
    assert found["changed"] == [("grpo.loss", "dapo", "grpo"), ("seed", 3, 0)]
    assert ("grpo.steps", 80, 80) in found["all"]
    removed = configuration({**base, "rewards": {"shapes": base["rewards"]["shapes"]}}, FILE)["changed"]
    assert ("rewards.palette.weight", None, 0.0) in removed
    without = configuration({name: section for name, section in base.items() if name != "retrain"}, FILE)["changed"]
    assert without == []
    tree = yaml.safe_load(FILE.read_text(encoding="utf-8")) | {"sead": 1}
    (tmp_path / "broken.yml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    for unusable in (tmp_path / "broken.yml", tmp_path / "none.yml"):
        found = configuration(base, unusable)
        assert found["changed"] == []
        assert len(found["all"]) > 50


def test_the_configuration_is_on_the_page(tmp_path: Path) -> None:
    base = parameters().model_dump(mode="json")
    text = unescape(read(reported(tmp_path, 0.2, parameters=base | {"grpo": base["grpo"] | {"loss": "dapo"}})))
    assert "<tr><th>grpo.loss</th><td>dapo</td><td>grpo</td></tr>" in text
    assert "<tr><th>modules.dit.rewards.palette</th><td>1.0</td></tr>" in text


def test_intervals_of_a_reward_and_its_parts_share_a_scale_with_zero() -> None:
    def entry(name: str, low: float, high: float) -> dict[str, Any]:
        return {"name": name, "ci_low": low, "ci_high": high, "difference": (low + high) / 2}

    rows = [entry("a", 0.5, 1.0), entry("a/part", -1.0, 0.0), entry("b", 10.0, 20.0)]
    scale = page._scaled(rows[0], rows)["scale"]
    assert scale == {"zero": 50.0, "low": 73.0, "high": 96.0, "at": 84.5}
