import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.defaults import parameters
from tests.evaluation.reports import numbers_only
from tests.evaluation.test_verdict import entry as an_entry
from tests.pipelines.painted import BRIGHTNESS, GAIN, SMALL, Project
from visual_grpo.adapter_folder import adapter_digest
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.data.manifest import RecordTable
from visual_grpo.evaluation import verdict
from visual_grpo.evaluation.verdict import lines, summarise
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.pipelines.evaluate import choose_adapters, show
from visual_grpo.tracking.sync import result_metrics

CONTROLS = ("guidance_scale=1", "guidance_scale=3", "temperature=0.5")


def test_the_difference_is_that_of_pairs(painted: Project, capsys: pytest.CaptureFixture[str]) -> None:
    painted.run(register_pipelines()["baseline"])
    painted.train()
    capsys.readouterr()
    result = painted.run(register_pipelines()["evaluate"]).load("result")
    assert painted.policies[1] == ("the model", painted.folder / "adapters")
    evaluation = json.loads((painted.folder / "evaluation_report" / "evaluation.json").read_text())
    views = {(e["name"], e["split"], e["sampler"]): e for e in evaluation["rewards"]}
    assert len(views) == 4 * 2 * 3
    for (name, split, _), entry in views.items():
        if name in ("edge_density", "colour_entropy"):  # The guards beside one's own reward.
            assert not entry["optimised"]
            continue
        assert name in ("total", "brightness")
        assert entry["optimised"]
        assert (entry["prompts"], entry["images"]) == ((3, 6) if split == "held_out" else (2, 4))
        assert entry["difference"] == pytest.approx(GAIN, abs=0.01)
        # Equal gains: the exact lower bound of the share of prompts that gain is 0.025 ** (1 / prompts).
        low = (2 * 0.025 ** (1 / entry["prompts"]) - 1) * entry["difference"]
        assert (entry["ci_low"], entry["ci_high"]) == pytest.approx((low, entry["difference"]), abs=2e-3)
        assert entry["win_rate"] == 1
    assert [Path(folder).name for folder in evaluation["adapter"].split(", ")] == ["ar", "dit"]
    assert evaluation["training"]["best_step"] == 10
    samples = {(e["sampler"], e["split"]): e["images"] for e in evaluation["controls"] if e["name"] == "total"}
    assert samples == {(f"eval {change}", "held_out"): 6 for change in CONTROLS}
    _, table = capsys.readouterr().out.split("3 held-out prompts, 6 pairs of samples, eval sampler")
    assert "total*" in table
    assert "rollout" not in table
    assert "+0.200 [-0.083, +0.200]" in table
    sentence, control, few = lines(evaluation["headline"])
    assert sentence.startswith("On 3 held-out prompts (6 pairs) no difference is shown: mean total 0.")
    assert few.startswith("Fewer than 10 independent prompts")
    assert control.startswith("Control: without training, guidance_scale=1 gives the base model 0.")
    assert (painted.folder / "evaluation_report" / "evaluation.html").is_file()
    found = evaluation["headline"]
    assert list(result)[:5] == ["gain", "low", "high", "base", "trained"]
    assert result["gain"] == pytest.approx(found["difference"], rel=1e-3) == pytest.approx(GAIN, abs=0.01)
    assert result["gain_over_control"] == pytest.approx(found["control"]["difference"], rel=1e-3)
    assert (result["unscored"], result["prompts"]) == (0, 3)


def test_the_result_is_on_the_card_of_the_judged_adapters_and_changes_no_digest(painted: Project) -> None:
    painted.run(register_pipelines()["baseline"])
    digest, config = RecordTable(painted.folder / "records.parquet").digest, parameters().public()
    painted.train(parameters=config, model="the model", data=digest, samples=9, seed=0, mlflow_run_id=None)
    adapters = painted.folder / "adapters"
    before = adapter_digest(adapters)
    with numbers_only():
        painted.run(register_pipelines()["evaluate"])
    headline = json.loads((painted.folder / "evaluation_report" / "evaluation.json").read_text())["headline"]
    assert "## Result\n\n" + "\n".join(lines(headline)) in (adapters / "README.md").read_text()
    assert adapter_digest(adapters) == before


def test_adapters_with_a_link_are_refused_before_the_report_shows_it(tmp_path: Path) -> None:
    (tmp_path / "film-000001.png").symlink_to(tmp_path / "private.png")
    with pytest.raises(UserError, match=r"film-000001\.png"):
        choose_adapters(str(tmp_path), tmp_path)


def test_a_training_with_another_seed_pairs_with_the_same_baseline(painted: Project) -> None:
    painted.run(register_pipelines()["baseline"])
    painted.train()
    with numbers_only():
        painted.run(register_pipelines()["evaluate"], seed=8)
    with pytest.raises(UserError, match=r"pair with this run:\n  evaluation.seed \(was 0, is 8\)\n"):
        painted.run(register_pipelines()["evaluate"], evaluation=SMALL | {"seed": 8})


def test_a_smaller_evaluation_uses_a_part_of_the_baseline(painted: Project) -> None:
    painted.run(register_pipelines()["baseline"])
    painted.train()
    with numbers_only():
        painted.run(register_pipelines()["evaluate"], evaluation=SMALL | {"images_per_prompt": 1, "max_prompts": 2})
    headline = json.loads((painted.folder / "evaluation_report" / "evaluation.json").read_text())["headline"]
    assert (headline["prompts"], headline["images"]) == (2, 2)
    assert headline["difference"] == pytest.approx(GAIN, abs=0.01)
    assert headline["control"] is not None


@pytest.mark.parametrize(
    ("trained", "changes", "said", "remedy"),
    [
        (
            {},
            {"evaluation": SMALL | {"controls": [{"top_p": 0.5}]}},
            r"evaluation\.controls \(was \[.*\], is \[.*'top_p': 0\.5",
            Remedy("baseline"),
        ),
        (
            {"mlflow_run_id": "a run"},
            {"sampling": {"eval": {"steps": 3}}},
            r"sampling\.eval\.steps \(was 10, is 3\)",
            Remedy("baseline", {"adapter": "a run"}),
        ),
        ({"digest": "another digest"}, {}, "different base model", Remedy("train")),
        ({"data": "other data"}, {}, "trained on data that differ", Remedy("compare", {"compare.second": "ADAPTER"})),
    ],
)
def test_what_does_not_pair_is_refused(
    painted: Project, trained: dict[str, str], changes: dict[str, Any], said: str, remedy: Remedy
) -> None:
    painted.run(register_pipelines()["baseline"])
    painted.train(**trained)
    with pytest.raises(UserError, match=said) as refused:
        painted.run(register_pipelines()["evaluate"], **changes)
    assert refused.value.remedy == remedy
    assert len(painted.policies) == 1
    assert not (painted.folder / "trained").exists()


def test_an_adapter_without_its_history_is_refused_before_anything_is_drawn(painted: Project) -> None:
    painted.run(register_pipelines()["baseline"])
    painted.train()
    (painted.folder / "adapters" / "training.csv").unlink()
    with pytest.raises(UserError, match=r"has no training\.csv"):
        painted.run(register_pipelines()["evaluate"])
    assert len(painted.policies) == 1


@pytest.mark.parametrize("evaluated", [0, 12])
def test_where_nothing_is_held_out_there_is_nothing_to_judge_by(
    painted: Project, capsys: pytest.CaptureFixture[str], evaluated: int
) -> None:
    painted.prepare(train=3, held_out=0, evaluated=evaluated)
    painted.run(register_pipelines()["baseline"])
    painted.train()
    result = painted.run(register_pipelines()["evaluate"]).load("result")
    assert len(painted.policies) == (2 if evaluated else 0), "no model is loaded to draw nothing"
    evaluation = json.loads((painted.folder / "evaluation_report" / "evaluation.json").read_text())
    headline = evaluation["headline"]
    assert (headline["verdict"], result["prompts"]) == ("not judged", evaluated)
    said = "Nothing was held out, so there is nothing to judge the trained model by."
    assert headline["sentence"].startswith(said)
    assert ("On 12 eval prompts (24 pairs): mean total" in headline["sentence"]) == bool(evaluated)
    page = (painted.folder / "evaluation_report" / "evaluation.html").read_text()
    assert '<p class="verdict">not judged</p>' in page
    assert ('id="pairs"' in page) == bool(evaluated)
    assert set(result_metrics(headline)) >= {"result/unscored"}
    verdict.show(headline)
    assert said in " ".join(capsys.readouterr().out.split())


def test_unscored_samples_are_in_the_table_and_in_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    entries = [an_entry(images=170, unscored_trained=34, unscored_differs=True), an_entry("guard", optimised=False)]
    entries.append(an_entry("delta_e", optimised=False, judge_of="total", confidence=0.95, baseline=-9.0, trained=-4.0))
    headline = summarise(entries)
    show({"headline": headline, "rewards": entries}, Path())
    verdict.show(headline)
    shown = capsys.readouterr().out
    assert "│ 0 / 34" in shown
    assert "│ delta_e (judge) │ -9.000" in shown
    assert "not show that the trained model is better: 34 of its 204 samples could not be scored" in shown
    assert shown.rstrip().endswith("Could not be scored: base 0, trained 34 of 204 each; the shares differ.")


def test_a_baseline_that_nothing_could_score_is_refused(painted: Project) -> None:
    none = {"none": {"function": "tests.pipelines.test_evaluate:none", "weight": 1.0}}
    with pytest.raises(UserError, match=r"none of \d+ samples could be scored.*unscored were: none"):
        painted.run(register_pipelines()["baseline"], rewards_used=none)


def none(prompts: object, images: list[object]) -> list[None]:
    return [None] * len(images)


def darkness(prompts: object, images: list[torch.Tensor], words: str) -> list[float]:
    """Falls as the trained painter paints brighter."""
    return [1 - float(image.float().mean()) / 255 for image in images]


def test_a_judge_contradicts_from_the_scores_to_the_report(painted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(painted.folder)
    Path("w.bin").write_text("weights")
    second = {"function": "tests.pipelines.test_evaluate:darkness", "options": {"words": "w.bin"}, "judge": True}
    rewards = {**BRIGHTNESS, "second": second}
    painted.prepare(train=1, held_out=12)
    painted.run(register_pipelines()["baseline"], rewards_used=rewards)
    painted.train()
    result = painted.run(register_pipelines()["evaluate"], rewards_used=rewards).load("result")
    evaluation = json.loads((painted.folder / "evaluation_report" / "evaluation.json").read_text())
    headline = evaluation["headline"]
    assert (headline["verdict"], headline["judges"][0]["outcome"]) == ("contradicted", "contradicted")
    assert headline["judges"][0]["control"]["sampler"].startswith("eval ")
    metrics = result_metrics(headline)
    seen = result["judge/second"]
    assert seen == pytest.approx(-GAIN, abs=0.01)
    assert metrics["result/judge/second"] == metrics["result/by_judge"] == round(seen, 4)
    assert metrics["result/judge_high/second"] < 0
    page = (painted.folder / "evaluation_report" / "evaluation.html").read_text()
    assert '<p class="verdict">contradicted</p>' in page
    judges = page.split("<h3>Judges</h3>")[1].split("<h3>Guards</h3>")
    assert "<tr><th>second</th>" in judges[0]
    assert "<td>contradicted</td><td>total</td>" in judges[0]
    assert "second" not in judges[1].split("</ul>")[0], "it is no guard as well"
    Path("w.bin").write_text("other weights")
    with pytest.raises(UserError, match=r"does not pair with this run:\n  .*second: words"):
        painted.run(register_pipelines()["evaluate"], rewards_used=rewards)


def test_a_judge_of_targets_scores_the_prompts_that_have_one(painted: Project) -> None:
    rewards = {**BRIGHTNESS, "psnr": {"judge": True}}
    painted.prepare(train=1, held_out=12, targets=10)
    painted.run(register_pipelines()["baseline"], rewards_used=rewards)
    painted.train()
    painted.run(register_pipelines()["evaluate"], rewards_used=rewards)
    headline = json.loads((painted.folder / "evaluation_report" / "evaluation.json").read_text())["headline"]
    [judge] = headline["judges"]
    assert (headline["prompts"], headline["unscored_trained"], headline["guard_to_add"]) == (12, 0, None)
    assert (judge["prompts"], judge["all_prompts"], judge["images"], judge["unscored_trained"]) == (10, 12, 20, 4)
    assert any("; judged on 10 of 12 prompts. " in line for line in lines(headline))
    page = (painted.folder / "evaluation_report" / "evaluation.html").read_text()
    assert "<tr><th>psnr</th>" in page
    assert "<td>total</td><td>10 of 12</td>" in page
