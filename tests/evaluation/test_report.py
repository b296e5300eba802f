"""The report: what it says and shows, that it is bounded, and that prompts stay text."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections import Counter
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image, ImageColor

from tests.evaluation.defaults import FILE, parameters
from tests.evaluation.painter import records
from tests.evaluation.reports import drawn, reported, written
from tests.evaluation.test_pictures import where
from tests.evaluation.test_verdict import entry as an_entry
from visual_grpo.evaluation import page
from visual_grpo.evaluation.pictures import WIDTH, data_uri
from visual_grpo.evaluation.report import _base_value, choose, film, pair_sheet
from visual_grpo.evaluation.verdict import UNWATCHED
from visual_grpo.rewards.catalogue import BUILT_IN
from visual_grpo.starter.world_defaults import default_parameters

NAN = float("nan")
HOSTILE = (
    '<script>document.title = "executed"</script>',
    '"><img src="x" onerror="document.title = \'executed\'">',
    "</script><script>document.title = 'executed'</script>",
    "{{ 7 * 191 }} {% raw %}",
)
RUN = "0123456789abcdef0123456789abcdef"


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[dict[str, str | None]] = []
        self.images: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.scripts.append(dict(attrs))
        if tag == "img":
            self.images.append(dict(attrs)["src"] or "")
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a gain of 0.2 on four held-out prompts, which are hostile, and two eval prompts."""
    prompts = [replace(record, prompt=text) for record, text in zip(records("held_out", 4), HOSTILE, strict=True)]
    training = {"mlflow_run_id": RUN, "command": "kedro run", "seed": 3, "versions": {}, HOSTILE[1]: "x"}
    base = parameters().model_dump(mode="json")
    return reported(
        tmp_path_factory.mktemp("report"),
        0.2,
        {"held_out": prompts, "eval": records("eval", 2)},
        training=training,
        adapter=HOSTILE[2],
        parameters=base | {"grpo": base["grpo"] | {"loss": "dapo"}},
    )


def read(folder: Path) -> str:
    return (folder / "evaluation.html").read_text(encoding="utf-8")


def data(text: str) -> list[dict[str, Any]]:
    """The embedded pairs."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    pairs: list[dict[str, Any]] = json.loads(found.group(1))
    return pairs


def test_the_page_is_self_contained(report: Path) -> None:
    text = read(report)
    assert {path.name for path in report.glob("*.png")} == {"samples.png", "training.png"}
    kinds = [source.partition(";base64,")[0] for source in Tags(text).images]
    # Both sides of four held-out prompts (samples, gains), and the curve of the reward.
    assert Counter(kinds) == {"data:image/webp": 2 * (4 + 4), "data:image/svg+xml": 1}
    assert "http" not in text.replace("http-equiv", "")
    total = json.loads((report / "evaluation.json").read_text(encoding="utf-8"))["rewards"][0]
    assert total["difference"] == pytest.approx(0.2, abs=0.01)
    assert f"{total['difference']:+.3f}" in text


def test_a_prompt_is_never_part_of_the_markup(report: Path) -> None:
    text = read(report)
    tags = Tags(text)
    assert tags.scripts == [{"type": "application/json", "id": "data"}, {}]
    assert tags.handlers == []
    assert "1337" not in re.sub(r'"data:image/[^"]*"', "", text)
    assert not any(hostile in text for hostile in HOSTILE[:3])
    assert all(hostile in unescape(text) for hostile in HOSTILE)
    assert {pair["prompt"] for pair in data(text) if pair["split"] == "held_out"} == set(HOSTILE)


def test_nothing_runs_but_the_pages_own_script(report: Path) -> None:
    text = read(report)
    own = re.search(r"<script>(.*)</script>", text, re.DOTALL)
    assert own is not None
    digest = base64.b64encode(hashlib.sha256(own.group(1).encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text


def test_a_measure_has_the_verdicts_name_in_the_table_of_scores() -> None:
    rows = [an_entry("shapes"), an_entry("shapes/all", measure="all right"), an_entry("shapes/colour")]
    macros: Any = page._template().environment.get_template("parts.html.j2").module
    shown = str(macros.scores(page._tables(rows)[0], ""))
    assert re.findall(r'<th title="[^"]*">([^<]*)<', shown) == ["unscored", "shapes", "all right", "colour"]


def test_a_gain_of_few_prompts_is_doubtful(tmp_path: Path) -> None:
    before, after = drawn(tmp_path / "baseline", 0.0), drawn(tmp_path / "trained", 0.2)
    after["total"] += np.arange(len(after)) % 5 * 0.01
    text = read(written(tmp_path, before, after))
    assert "On 4 held-out prompts (8 pairs) the data do not show that the trained model is better: fewer" in text
    assert "<title>The trained model against the base model: doubtful</title>" in text


def test_the_verdict_where_it_comes_from_and_the_configuration_are_said(report: Path) -> None:
    text = unescape(read(report))
    assert "On 4 held-out prompts (8 pairs) no difference is shown: mean total 0." in text
    assert "<title>The trained model against the base model: no difference shown</title>" in text
    assert "Control: without training, steps=20 gives the base model" in text
    assert f'<dt>MLflow run</dt><dd title="{RUN}">0123456789ab…</dd>' in text
    assert '<dt>command</dt><dd title="kedro run">kedro run</dd>' in text
    assert "<dt>versions" not in text
    assert text.count("Eval prompts choose the best adapter and may occur in training too") == 3
    assert "<tr><th>grpo.loss</th><td>dapo</td><td>grpo</td></tr>" in text
    assert "<tr><th>modules.dit.rewards.rendering</th><td>1.0</td></tr>" in text


@pytest.mark.parametrize(
    ("rewards", "line", "name"),
    [
        ({"brightness": {"function": BUILT_IN["ocr"]}}, "tesseract: {function: ", "tesseract"),
        ({"brightness": {"function": "my_rewards:brightness"}}, None, None),
    ],
)
def test_what_nothing_watches_and_no_judge_sees_is_said_with_the_line_to_add(
    tmp_path: Path, rewards: dict[str, Any], line: str | None, name: str | None
) -> None:
    text = unescape(
        read(reported(tmp_path, 0.2, parameters=parameters().model_dump(mode="json") | {"rewards": rewards}))
    )
    [warning] = re.findall(r'<p class="warning">(.*?) <code>(.*?)</code></p>', text)
    assert warning == (UNWATCHED, "edge_density: {weight: 0}")
    assert text.count(UNWATCHED) == 1
    section = text.split('<section id="scores">')[1].split("</section>")[0]
    assert re.findall(r"install-worker NAME=(\w+)", section) == ([] if name is None else [name])
    assert [found.startswith(str(line)) for found in re.findall(r"<pre>(.*)</pre>", section)] == [True] * (
        name is not None
    )


def test_texts_can_be_read_on_a_light_a_dark_and_a_printed_page() -> None:
    style = (Path(page.__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")
    themes = [dict(re.findall(r"--(\w+): (#\w+)", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)]
    assert len(themes) == 3
    for theme in themes:
        colours = [theme[name] for name in ("ink", "muted", "up", "down", "accent")]
        low = {(c, on) for c in colours for on in (theme["paper"], theme["panel"]) if contrast(c, on) < 4.5}
        assert low == set()


def contrast(colour: str, background: str) -> float:
    """WCAG 2.1's contrast ratio."""
    light, dark = sorted((luminance(colour), luminance(background)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    channels = [value / 255 for value in ImageColor.getrgb(colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_a_reward_and_its_parts_share_a_scale_around_zero() -> None:
    def row(name: str, low: float | None, high: float | None, at: float | None) -> dict[str, Any]:
        where = {"name": name, "split": "held_out", "sampler": "eval", "prompts": 4}
        return where | {"ci_low": low, "ci_high": high, "difference": at}

    rows = [
        row("shapes", 0.1, 0.2, 0.15),
        row("shapes/all", -0.2, 0.4, 0.1),
        row("delta_e", 5.0, 10.0, 7.5),
        row("votes", None, None, None),
    ]
    (table,) = page._tables(rows)
    scales = [(row["scale"]["low"], row["scale"]["high"]) for row in table["rows"]]
    assert scales == [(61.5, 73.0), (27.0, 96.0), (73.0, 96.0), (None, None)]


def test_losses_are_shown_if_there_are_any_and_no_number_is_minus_zero(tmp_path: Path) -> None:
    folder = reported(tmp_path / "loss", gain=-0.1)
    assert re.findall("<h2>Greatest (.*)</h2>|<p.*>(No .*) on", read(folder)) == [("", "No gains"), ("losses", "")]
    text = read(reported(tmp_path / "none", -1e-9))
    assert "-0.000" not in "".join(re.findall(r"<td.*?</td>", text))
    assert "+0.000 <span" in text


def test_the_list_of_pairs_is_bounded(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = read(report)
    assert len(data(everything)) == 24
    assert "24 of 24 pairs are embedded" in everything
    monkeypatch.setattr(page, "MOST_PAIRS", 10)
    few = read(reported(tmp_path, 0.2))
    shown = [(pair["split"], pair["sampler"]) for pair in data(few)]
    rollout = "tokens as in training, sampling.rollout"
    assert shown == [("held_out", "plain pipeline, sampling.eval")] * 8 + [("held_out", rollout)] * 2
    assert "10 of 24 pairs are embedded" in few


@pytest.mark.parametrize(
    ("side", "counts", "cell"),
    [
        ("trained", "base 0, trained 7", '<td class="down">0 / 7</td>'),
        ("baseline", "base 7, trained 0", '<td class="">7 / 0</td>'),
    ],
)
def test_unscored_samples_have_pictures_of_their_own_and_more_after_training_are_red(
    tmp_path: Path, side: str, counts: str, cell: str
) -> None:
    frames = {"baseline": drawn(tmp_path / "baseline", 0.0), "trained": drawn(tmp_path / "trained", 0.2)}
    blank = frames[side]
    one = blank["id"].eq(blank.loc[blank["split"] == "held_out", "id"].iloc[0]) & blank["index"].eq(0)
    blank.loc[(blank["split"] == "held_out") & ~one, ["total", "reward/brightness"]] = NAN
    blank.to_parquet(tmp_path / side / "scores.parquet", index=False)
    text = read(written(tmp_path, frames["baseline"], frames["trained"]))
    assert "14 of 24 pairs, over all samplers and splits, have a side that could not be scored." in text
    assert f"Could not be scored: {counts} of 8 each; the shares differ." in text
    assert f"{side.removesuffix('line')} could not be scored" in text
    assert cell in text


def test_an_edit_is_shown_with_its_sources_and_its_target_above(tmp_path: Path) -> None:
    for colour in ("red", "lime", "blue"):
        Image.new("RGB", (32, 32), colour).save(tmp_path / f"{colour}.png")
    plain, one, two = records("held_out", 3)
    edits = [
        plain,
        replace(one, source_images=(tmp_path / "red.png",)),
        replace(two, source_images=(tmp_path / "red.png", tmp_path / "lime.png"), target_image=tmp_path / "blue.png"),
    ]
    folder = reported(tmp_path, gain=0.2, splits={"held_out": edits})
    [samples] = re.findall(r'<section id="samples">.*?</section>', read(folder), re.DOTALL)
    captions = [re.findall(r"<small>(source.*?|target)</small>", card) for card in samples.split("<figure")[1:]]
    assert captions == [[], ["source"], ["source 1", "source 2", "target"]]
    uris = [data_uri(tmp_path / f"{colour}.png", page.CARD_SIDE) for colour in ("red", "lime", "blue")]
    assert [samples.count(uri) for uri in uris] == [2, 1, 1]
    with Image.open(folder / "samples.png") as sheet:
        assert [where(sheet, colour).sum() / WIDTH**2 for colour in ("red", "lime", "blue")] == [2, 1, 0]


def read_uri(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def pairs(total_baseline: list[float], total_trained: list[float], **columns: list[Any]) -> pd.DataFrame:
    count = len(total_baseline)
    rows = {"split": ["held_out"] * count, "sampler": ["eval"] * count, "index": [0] * count} | columns
    frame = pd.DataFrame(rows | {"total_baseline": total_baseline, "total_trained": total_trained})
    return frame.assign(difference=frame["total_trained"] - frame["total_baseline"])


def test_the_sheet_has_both_sides_one_above_the_other(tmp_path: Path) -> None:
    for name in ("blue", "orange"):
        Image.new("RGB", (64, 64), name).save(tmp_path / f"{name}.png")
    columns = {"id": ["a"], "prompt": ["a prompt"], "file_baseline": ["blue.png"], "file_trained": ["orange.png"]}
    shown = pair_sheet(pairs([0.2], [NAN], **columns), tmp_path, tmp_path)
    blue, orange = (np.flatnonzero(where(shown, name).any(1)) for name in ("blue", "orange"))
    assert blue.max() < orange.min()


def test_samples_ignore_the_result_gains_and_losses_of_all_samplers_follow_it() -> None:
    after = [0.1, 0.9, -0.3, 0.0, 0.4, -0.8, -0.9, -2.0]
    columns: dict[str, list[Any]] = {"id": list("aabcdeaf"), "index": [0, 1, *[0] * 6]}
    columns |= {"sampler": [*["eval"] * 6, "sde", "eval"], "split": [*["held_out"] * 7, "eval"]}
    chosen = choose(pairs([0.0] * 8, after, **columns), "held_out", "eval", shown=3)
    assert chosen["samples"]["id"].tolist() == ["a", "c", "e"]
    assert chosen["gains"][["id", "index"]].values.tolist() == [["a", 1], ["d", 0]]
    assert chosen["losses"][["id", "sampler"]].values.tolist() == [["a", "sde"], ["e", "eval"], ["b", "eval"]]
    assert chosen["unscored"].empty


def test_what_could_not_be_scored_is_shown_the_trained_models_first() -> None:
    chosen = choose(pairs([NAN, 1.0, 1.0, 1.0], [1.0, NAN, 1.0, NAN], id=["a", "b", "c", "d"]), "held_out", "eval")
    assert chosen["unscored"]["id"].tolist() == ["b", "d", "a"]
    assert chosen["samples"]["id"].tolist() == ["a", "b", "c", "d"], "a sample is not left out for its result"
    assert chosen["gains"].empty
    assert chosen["losses"].empty


def test_parameters_that_differ_from_the_base_come_first(tmp_path: Path) -> None:
    base, before = parameters().model_dump(mode="json"), default_parameters(FILE)
    found = page.configuration(base | {"seed": 3, "resume": "auto", "grpo": base["grpo"] | {"loss": "dapo"}}, before)
    assert found["changed"] == [("grpo.loss", "dapo", "grpo"), ("seed", 3, 0)]
    assert ("grpo.steps", 80, 80) in found["all"]
    removed = page.configuration({**base, "rewards": {"shapes": base["rewards"]["shapes"]}}, before)["changed"]
    assert ("rewards.rendering", page.REMOVED, "") in removed
    assert not [name for name, *_ in removed if name.startswith("rewards.rendering.")]
    added = {**base, "rewards": {**base["rewards"], "own": base["rewards"]["rendering"] | {"weight": 2.0}}}
    values = {name: value for name, value, _ in page.configuration(added, before)["changed"]}
    assert values["rewards.own.weight"] == 2.0
    assert None not in values.values()
    assert page.configuration({name: s for name, s in base.items() if name != "retrain"}, before)["changed"] == []
    tree = yaml.safe_load(FILE.read_text(encoding="utf-8")) | {"sead": 1}
    (tmp_path / "broken.yml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    for unusable in (tmp_path / "broken.yml", tmp_path / "none.yml"):
        found = page.configuration(base, default_parameters(unusable))
        assert (found["changed"], len(found["all"]) > 50) == ([], True)


def test_the_film_has_the_first_and_the_last_step_and_at_most_nine(tmp_path: Path) -> None:
    for step in range(1, 24):
        Image.new("RGB", (4, 4)).save(tmp_path / f"film-{step:06d}.png")
    none = pairs([], [])
    steps = [step for step, _ in film(tmp_path, none, tmp_path, tmp_path)]
    assert (len(steps), steps[0], steps[-1]) == (9, "step 1", "step 23")
    assert film(None, none, tmp_path, tmp_path) == film(tmp_path / "empty", none, tmp_path, tmp_path) == []


@pytest.mark.parametrize(
    ("filmed", "prompts", "columns"),
    [
        (["held_out-00-0", "held_out-01-0"], 2, ["source", "base", "step 1", "step 5 (chosen)"]),
        (["held_out-00-0", "held_out-03-0"], 2, ["base", "step 1", "step 5 (chosen)"]),
        (["held_out-00-0", "of another evaluation"], 0, ["step 1"]),
    ],
)
def test_the_film_begins_with_its_sources_and_the_base_models_samples_and_marks_the_judged_step(
    tmp_path: Path, filmed: list[str], prompts: int, columns: list[str]
) -> None:
    Image.new("RGB", (64, 32), "red").save(tmp_path / "red.png")
    Image.new("RGB", (224, 458)).save(tmp_path / "film-000001.png")
    *edits, plain = records("held_out", 4)
    edits = [replace(record, source_images=(tmp_path / "red.png",)) for record in edits]
    facts = {"film": filmed, "adapter": "best", "best_step": 5, "steps": 9}
    folder = reported(tmp_path, 0.2, {"held_out": [*edits, plain]}, training=facts, adapters=tmp_path)
    film_of = read(folder).partition("during training</h3>")[2].partition("</section>")[0]
    assert (film_of.count("<li"), re.findall(r"<small>(.*?)</small>", film_of)) == (prompts, columns)
    shown = [read_uri(uri) for uri in re.findall(r'src="(.*?)"', film_of)]
    assert {picture.size for picture in shown} == {(224, 458)}, "prompts stand in rows"
    red, _, blue = np.asarray(shown[0].convert("RGB"), dtype=int)[341, 100]
    assert (red - blue > 200) == ("source" in columns)
    base, last = (np.asarray(shown[at], dtype=int).mean() for at in (columns.index("step 1") - 1, -1))
    assert not prompts or last > base, "the trained model's samples, which are brighter"


def test_the_first_point_of_the_curve_has_the_weights_of_what_was_trained(tmp_path: Path) -> None:
    row = {"sampler": "eval", "split": "eval", "id": "p", "index": 0, "total": 1.0, "reward/a": 1.0, "reward/b": 3.0}
    for name, weights in {"baseline": {"a": 1.0, "b": 0.0}, "trained": {"a": 0.0, "b": 2.0}}.items():
        scores = pd.DataFrame([row])
        scores.attrs["weights"] = weights
        (tmp_path / name).mkdir()
        scores.to_parquet(tmp_path / name / "scores.parquet")
    assert _base_value({}, tmp_path / "baseline", tmp_path / "trained") == 6.0
