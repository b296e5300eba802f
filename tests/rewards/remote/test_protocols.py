"""The bodies and answers of each protocol, written out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from visual_grpo.rewards.remote.client import RequestError, Scored
from visual_grpo.rewards.remote.http_reward import PROTOCOLS, Batch

SENT = {"images": ["AA", "BB"], "prompts": ["a cat", "a dog"]}
BATCH = Batch(
    images=SENT["images"],
    prompts=SENT["prompts"],
    metadata=[{"k": 1}, {}],
    sources=[["SS"], ["S1", "S2"]],
    model="overall_quality",
)


def test_this_projects_own_body_and_answer() -> None:
    own = PROTOCOLS["worker"]
    assert own.body(BATCH) == {**SENT, "metadata": [{"k": 1}, {}], "sources": [["SS"], ["S1", "S2"]]}
    first, second = own.answers({"scores": [0.5, None], "parts": {"fine": [1, "x"]}}, BATCH)
    assert first == Scored(0.5, {"fine": 1.0})
    assert isinstance(second, Scored)
    assert math.isnan(second.value)
    assert math.isnan(second.parts["fine"])


def test_flow_factorys_body_and_answer() -> None:
    service = PROTOCOLS["flow_factory"]
    assert service.path == "/compute"
    assert service.body(BATCH) == {**SENT, "condition_images": [["SS"], ["S1", "S2"]]}
    assert service.answers({"rewards": [0.25, 1]}, BATCH) == [Scored(0.25), Scored(1.0)]


def test_unirls_body_has_the_result_as_the_last_turn() -> None:
    body = PROTOCOLS["unirl"].body(BATCH)
    assert body["requests"][0] == {
        "history": [{"text": "", "image_b64": "SS"}, {"text": "a cat", "image_b64": "AA"}],
        "required_rewards": ["overall_quality"],
        "metadata": {"k": 1},
    }
    assert [turn["image_b64"] for turn in body["requests"][1]["history"]] == ["S1", "S2", "BB"]


@pytest.mark.parametrize(
    ("result", "score"),
    [
        ({"overall_quality": {"overall_quality": 0.5, "Fine detail": 2}}, Scored(0.5, {"Fine_detail": 2.0})),
        ({"overall_quality": {"overall": 0.5, "style": 3.0}}, Scored(0.5, {"style": 3.0})),
        ({"overall_quality": {"mean": 0.5}}, Scored(0.5)),
        (
            {"overall_quality": {"a": 1.0, "b": 2.0}},
            "neither 'overall_quality' nor 'overall' is among its metrics a, b",
        ),
        ({"other": {"other": 1.0}}, "no score of 'overall_quality': out of memory"),
        (None, "no score of 'overall_quality': out of memory"),
    ],
)
def test_unirls_answers(result: Any, score: Scored | str) -> None:
    results = [result, {"overall_quality": {"x": 1.0}}]
    answer = {"results": results, "errors": [{"overall_quality": "out of memory"}, {}]}
    first, second = PROTOCOLS["unirl"].answers(answer, BATCH)
    assert (first.reason if isinstance(first, RequestError) else first) == score
    assert second == Scored(1.0)


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("values", [None, [1.0], [1.0, 2.0, 3.0], "ab"])
def test_another_number_of_scores_is_refused(name: str, values: Any) -> None:
    key = {"worker": "scores", "flow_factory": "rewards", "unirl": "results"}[name]
    with pytest.raises(RequestError, match=r"must be a list|for 2 images"):
        PROTOCOLS[name].answers({key: values}, BATCH)
