"""The reward ``http`` against a worker in a separate process, with every fault planted that a worker can have."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rewards.learned import tiny
from tests.rewards.remote.processes import Running, running
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Needs, PromptRecord, RewardOutput
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.rewards.remote import client
from visual_grpo.rewards.remote.client import RequestError, ScoredSample, ServerRefusedError
from visual_grpo.rewards.remote.http_reward import PROTOCOLS, Batch, HttpReward
from visual_grpo.rewards.reward import FunctionReward

PLAIN = 7
"""Images without a planted fault."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Running]:
    with running() as server:
        yield server


def images(count: int) -> list[torch.Tensor]:
    return [torch.full((3, 6, 4), 10 * row, dtype=torch.uint8) for row in range(count)]


def prompts(faults: dict[int, str], count: int = PLAIN + 1) -> list[PromptRecord]:
    return [PromptRecord(id=f"r{row}", prompt=faults.get(row, f"prompt {row}")) for row in range(count)]


def http(server: Running, share: float = 0.5, **options: Any) -> FunctionReward:
    options = {"timeout": 0.25, "retries": 1, "batch_size": 4, **options}
    return FunctionReward("judge", HttpReward(server.url, **options), max_failed_share=share)


def expected(count: int = PLAIN + 1) -> torch.Tensor:
    return torch.arange(count) * 10 / 255


def check_all_but(output: RewardOutput, lost: int) -> None:
    others = [row for row in range(len(output.values)) if row != lost]
    assert torch.allclose(output.values[others], expected(len(output.values))[others], atol=1e-6)
    assert output.values[lost].isnan()


@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"batch_size": 3, "concurrency": 1}])
def test_every_image_gets_its_own_score_whatever_the_batches(worker: Running, options: dict) -> None:
    output = http(worker, **options)(prompts({}, 11), images(11))
    assert torch.allclose(output.values, expected(11), atol=1e-6)
    assert output.failed == {}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("hang", "did not answer within 0.25 s"),
        ("drip", "did not answer within 0.25 s"),
        ("500", "answered 500: a fault"),
        ("rubbish", r"did not answer with JSON: \\x1b\[31m\\x00"),
        ("empty", "did not answer with JSON: nothing"),
        ("deep", "did not answer with JSON"),
        ("array", r"must answer with a JSON object, got \[1, 2\]"),
        ("huge", "answered with more than 8 MB"),
        ("short", "scores are 0 for 1 images"),
        ("nan", "its score is nan, not a finite number or null"),
        ("big", "its score is inf"),
        ("true", "its score is True"),
        ("parts99", "parts.double are 99 for 1 images"),
    ],
)
def test_one_bad_image_is_unscored(worker: Running, fault: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    row = 6
    output = http(worker)(prompts({row: f"!{fault}"}), images(PLAIN + 1))
    check_all_but(output, row)
    assert re.search(rf"'judge' failed on 'r{row}', left unscored: .*{reason}", caplog.text)


def test_null_is_unscored_and_no_failure_and_a_part_may_be_of_some_images(worker: Running) -> None:
    reward = http(worker, share=0.0, batch_size=1)
    output = reward(prompts({2: "!null", 3: "!parts"}), images(PLAIN + 1))
    check_all_but(output, 2)
    assert output.parts["double"].isnan().tolist() == [row != 3 for row in range(PLAIN + 1)]
    assert (reward.budget.scored, reward.budget.failed) == (PLAIN + 1, 0)


@pytest.mark.parametrize("plan", ["500,ok", "429,ok", "cut,ok", "late,ok"])
def test_what_passes_is_asked_again(plan: str) -> None:
    with running(plan) as server:
        reward = http(server, share=0.0)
        assert torch.allclose(reward(prompts({}), images(8)).values, expected(8), atol=1e-6)


@pytest.mark.parametrize(
    ("plan", "requests"), [("422", 1), ("html", 1), ("nan", 1), ("429later", 1), ("503", 4), ("429", 4)]
)
def test_retries_are_bounded_and_only_of_what_may_pass(plan: str, requests: int) -> None:
    with running(plan) as server:
        with pytest.raises(UserError):
            http(server, retries=3, stop_after=0)(prompts({}, 1), images(1))
        assert len(server.log) == requests


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("404", "answered 404: a fault. Every request would be refused: the option url must be"),
        ("401", "answered 401: a fault. Every request would be refused: set the option api_key"),
        ("302", r"redirects to http://elsewhere/ \(302\). Redirects are not followed"),
        ("another", "asks for 'mean', and the worker at http://127.0.0.1:[0-9]+ has 'another'"),
    ],
)
def test_what_every_request_would_be_refused_for_stops_the_run_at_once(plan: str, reason: str) -> None:
    with running(plan) as server:
        reward = http(server, share=0.99, retries=3, model="mean", batch_size=1, concurrency=1)
        with pytest.raises(ServerRefusedError, match=reason):
            reward(prompts({}), images(PLAIN + 1))
        assert len(server.log) == 1


def test_a_server_that_only_fails_is_left_alone_after_a_while() -> None:
    with running("ok,503") as server:
        reward = http(server, share=0.99, retries=0, stop_after=3, batch_size=1, concurrency=1)
        reward(prompts({}, 1), images(1))
        with pytest.raises(
            ServerRefusedError, match=r"3 requests in a row failed for good \(stop_after: 3\).*answered 503"
        ):
            reward(prompts({}, 20), images(20))
        assert len(server.log) == 4


def test_nobody_there_is_said_with_the_address_and_without_its_password() -> None:
    with running() as server:
        pass
    url = server.url.replace("http://", "http://me:swordfish@")
    reward = FunctionReward("judge", HttpReward(url, retries=0))
    with pytest.raises(UserError, match=r"failed on 8 of 8 samples: no connection to http://127.0.0.1:[0-9]+/score"):
        reward(prompts({}), images(8))
    start = time.monotonic()
    with pytest.raises(UserError, match=r"no connection to http://127.0.0.1:[0-9]+/health.*docs/reward_workers.md"):
        reward.check_machine()
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"url": "http://me:swordfish@127.0.0.1:1", "api_key": "swordfish"}, "url and api_key"),
        ({"url": "http://me@127.0.0.1:1", "headers": {"authorization": "swordfish"}}, "url and headers"),
        ({"api_key": "swordfish", "headers": {"AUTHORIZATION": "Bearer swordfish"}}, "api_key and headers"),
    ],
)
def test_a_request_authenticates_once(given: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"^{named} each authenticate the requests to http://127.0.0.1") as refused:
        HttpReward(**given)
    assert "swordfish" not in str(refused.value)


def test_a_worker_that_restarts_in_the_middle_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.1)
    with running("ok,die") as first:
        reward = http(first, share=0.0, retries=6, timeout=5, concurrency=1)
        result: list[RewardOutput] = []
        run = threading.Thread(target=lambda: result.append(reward(prompts({}), images(8))))
        run.start()
        first.process.wait(timeout=10)
        with running(port=first.port) as second:
            run.join(timeout=20)
            assert torch.allclose(result[0].values, expected(8), atol=1e-6)
            assert len(second.log) >= 1


def test_the_deadline_ends_all_requests_of_a_call_and_is_no_verdict_on_the_server(caplog) -> None:
    with running("ok,ok,hang") as server:
        reward = http(server, share=0.9, timeout=60, deadline=0.6, batch_size=1, concurrency=2, stop_after=1)
        reward(prompts({}, 1), images(1))
        start = time.monotonic()
        output = reward(prompts({}, 9), images(9))
        assert time.monotonic() - start < 2
    assert int(output.values.isnan().sum()) == 8
    assert "did not answer within" in caplog.text or "have passed" in caplog.text


def test_a_server_that_hangs_is_named_while_it_is_waited_for(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def told() -> list[str]:
        lines = [line for line in caplog.messages if "has not answered for" in line]
        return [re.sub(r"http://[^ ]+", "URL", line).split(";")[0] for line in lines]

    with running("ok,hang") as server:
        reward = http(server, share=1.0, timeout=60, retries=0)
        reward(prompts({}, 1), images(1))
        assert told() == []
        monkeypatch.setattr(client, "SILENCE", 0.1)
        call = threading.Thread(target=reward, args=(prompts({}, 1), images(1)))
        call.start()
        while len(told()) < 2:
            assert call.is_alive()
            time.sleep(0.01)
        server.process.kill()
        call.join()
    assert told()[:2] == [
        "URL has not answered for 0.1 s, with 0 of 1 samples judged",
        "URL has not answered for 0.3 s, with 0 of 1 samples judged",
    ]


def test_requests_at_a_time_are_bounded() -> None:
    with running("slow") as server:
        http(server, batch_size=1, concurrency=2, timeout=5)(prompts({}, 6), images(6))
        starts = sorted(each["at"] for each in server.log)
    # 6 requests of 0.15 s, two at a time: never a third within 0.15 s of the first of its pair.
    assert all(later - first > 0.14 for first, later in zip(starts, starts[2:], strict=False))


def test_an_interrupted_process_does_not_wait_for_answers() -> None:
    script = (
        "import sys, torch; from visual_grpo.rewards.combine import RewardSet;"
        "from visual_grpo.rewards.remote.http_reward import HttpReward;"
        "from visual_grpo.common.types import PromptRecord;"
        "rewards = RewardSet({'judge': (HttpReward(sys.argv[1], timeout=60), 1.0)});"
        "rewards.begin([PromptRecord(id='a', prompt='a')], [torch.zeros(3, 4, 4, dtype=torch.uint8)]);"
        "sys.stdin.readline(); print('leaving', flush=True)"
    )
    with running("hang") as server:
        process = subprocess.Popen(
            [sys.executable, "-c", script, server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        while not server.log:
            assert process.poll() is None
            time.sleep(0.1)
        # The answer would come after a minute.
        assert process.communicate("\n", timeout=30)[0] == "leaving\n"
        assert process.returncode == 0
        assert len(server.log) == 1


def test_a_whole_set_of_rewards_waits_for_it_in_the_background(worker: Running) -> None:
    rewards = RewardSet({"judge": (http(worker), 1.0), "local": (lambda prompts, images: [1.0] * len(images), 0.0)})
    asked = prompts({3: "!hang"})
    scores = rewards.begin(asked, images(8))()
    assert torch.allclose(scores.total[[0, 7]], expected(8)[[0, 7]], atol=1e-6)
    assert scores.total.isnan().tolist() == [row == 3 for row in range(8)]
    assert scores.rewards["local"].tolist() == [1.0] * 8


def test_sources_and_key_are_sent_only_if_asked_for(tmp_path: Path) -> None:
    record = [tiny.record("a", folder=tmp_path, source=images(1)[0])]
    with running() as server:
        http(server)(record, images(1))
        reward = http(server, sources=True, api_key="swordfish")
        assert reward.needs == Needs(source=True)
        reward(record, images(1))
        log = server.log
    keys = {"images", "prompts", "metadata"}
    assert [set(each["sent"]) for each in log] == [keys, keys | {"sources"}]
    assert [each["auth"] for each in log] == [None, "Bearer swordfish"]


def test_the_machine_check_says_what_to_start() -> None:
    with running() as server:
        HttpReward(server.url, model="mean").check_machine()
        with pytest.raises(UserError, match=r"asks for 'hpsv3', and the worker at .* has 'mean'"):
            HttpReward(server.url, model="hpsv3").check_machine()
    with running("loading") as server, pytest.raises(UserError, match="still loads its weights"):
        HttpReward(server.url).check_machine()


SENT = {"images": ["AA", "BB"], "prompts": ["a cat", "a dog"]}
BATCH = Batch(
    images=SENT["images"],
    records=[
        PromptRecord(id=prompt, prompt=prompt, metadata=metadata)
        for prompt, metadata in zip(SENT["prompts"], [{"k": 1}, {}], strict=True)
    ],
    sources=[["SS"], ["S1", "S2"]],
    model="overall_quality",
)


FORMATS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "worker": (
        "docs/reward_workers.md",
        "/score",
        {**SENT, "metadata": [{"k": 1}, {}], "sources": [["SS"], ["S1", "S2"]]},
        {"scores": [0.5, 1]},
    ),
    "flow_factory": (
        "X-GenGroup/Flow-Factory, reward_server/example_server.py at a0b2bc5a (2 May 2026)",
        "/compute",
        {"image": ["AA", "BB"], "prompt": ["a cat", "a dog"], "condition_images": [["SS"], ["S1", "S2"]]},
        {"rewards": [0.5, 1]},
    ),
    "unirl": (
        "Tencent-Hunyuan/UniRL, unirl-reward-service/reward_service/schemas.py at cb03dcd4",
        "/score",
        {
            "requests": [
                {
                    "history": [{"text": "", "image_b64": "SS"}, {"text": "a cat", "image_b64": "AA"}],
                    "required_rewards": ["overall_quality"],
                    "metadata": {"k": 1},
                },
                {
                    "history": [
                        {"text": "", "image_b64": "S1"},
                        {"text": "", "image_b64": "S2"},
                        {"text": "a dog", "image_b64": "BB"},
                    ],
                    "required_rewards": ["overall_quality"],
                    "metadata": {},
                },
            ]
        },
        {"results": [{"overall_quality": {"overall_quality": 0.5}}, {"overall_quality": {"mean": 1.0}}], "errors": []},
    ),
}
"""Protocol -> where its server's code is, the path, the request for `BATCH`, and an answer of 0.5 and 1."""


def test_requests_and_answers_are_those_of_the_servers_code() -> None:
    assert FORMATS.keys() == PROTOCOLS.keys()
    for name, (_, path, request, answer) in FORMATS.items():
        protocol = PROTOCOLS[name]
        assert (protocol.path, protocol.body(BATCH)) == (path, request)
        assert protocol.answers(answer, BATCH) == [ScoredSample(0.5), ScoredSample(1.0)]


def test_parts_and_nulls_of_a_worker() -> None:
    first, second = PROTOCOLS["worker"].answers({"scores": [0.5, None], "parts": {"fine": [1, "x"]}}, BATCH)
    assert first == ScoredSample(0.5, {"fine": 1.0})
    assert isinstance(second, ScoredSample)
    assert math.isnan(second.value)
    assert math.isnan(second.parts["fine"])


@pytest.mark.parametrize(
    ("result", "score"),
    [
        ({"overall_quality": {"overall_quality": 0.5, "Fine detail": 2}}, ScoredSample(0.5, {"Fine_detail": 2.0})),
        ({"overall_quality": {"overall": 0.5, "style": 3.0}}, ScoredSample(0.5, {"style": 3.0})),
        ({"overall_quality": {"mean": 0.5}}, ScoredSample(0.5)),
        (
            {"overall_quality": {"a": 1.0, "b": 2.0}},
            "neither 'overall_quality' nor 'overall' is among its metrics a, b",
        ),
        ({"other": {"other": 1.0}}, "no score of 'overall_quality': out of memory"),
        (None, "no score of 'overall_quality': out of memory"),
    ],
)
def test_unirls_answers(result: Any, score: ScoredSample | str) -> None:
    results = [result, {"overall_quality": {"x": 1.0}}]
    answer = {"results": results, "errors": [{"overall_quality": "out of memory"}, {}]}
    first, second = PROTOCOLS["unirl"].answers(answer, BATCH)
    assert (first.reason if isinstance(first, RequestError) else first) == score
    assert second == ScoredSample(1.0)


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("values", [None, [1.0], [1.0, 2.0, 3.0], "ab"])
def test_another_number_of_scores_is_refused(name: str, values: Any) -> None:
    key = {"worker": "scores", "flow_factory": "rewards", "unirl": "results"}[name]
    with pytest.raises(RequestError, match=r"must be a list|for 2 images"):
        PROTOCOLS[name].answers({key: values}, BATCH)
