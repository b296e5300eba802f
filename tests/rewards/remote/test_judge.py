"""The reward ``vlm_judge`` against a model's endpoint in a separate process, and its arithmetic by hand."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from pydantic import TypeAdapter

from tests.rewards.learned import tiny
from tests.rewards.remote.processes import Running, running
from tests.rewards.remote.test_http_reward import expected, images, prompts
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Needs, PromptRecord
from visual_grpo.rewards.remote.client import RequestError
from visual_grpo.rewards.remote.judge import VlmJudge
from visual_grpo.rewards.remote.rubrics import reply_of, score_in, yes_probability
from visual_grpo.rewards.reward import FunctionReward

LOG = math.log
READ = {"model", "messages", "temperature", "seed", "max_tokens", "logprobs", "top_logprobs", "response_format"}
SERVERS = {
    # max_tokens is deprecated, and read. top_logprobs up to --max-logprobs, by default 20.
    "vllm-project/vllm 002032ee vllm/entrypoints/openai/chat_completion/protocol.py": READ | {"chat_template_kwargs"},
    "sgl-project/sglang 004c82e0 python/sglang/srt/entrypoints/openai/protocol.py": READ | {"chat_template_kwargs"},
    # Log-probabilities are those before sampling.
    "ggml-org/llama.cpp 006639c3 tools/server/server-common.cpp": READ | {"chat_template_kwargs"},
    # Other entries are ignored, and each part of a message becomes a message. top_logprobs up to 20, since 0.12.11.
    "ollama/ollama 634c4166 openai/openai.go": READ | {"reasoning_effort"},
}
"""Source -> the entries of a request that it reads."""
IMAGES = ("data:image/jpeg;base64,", "data:image/png;base64,")
"""Beginnings of an image's address that all of them read."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Running]:
    with running() as server:
        yield server


def judge(server: Running, **options: Any) -> FunctionReward:
    options = {"timeout": 0.25, "retries": 1, "image_format": "png", **options}
    return FunctionReward("judge", VlmJudge(f"{server.url}/v1", **options), max_failed_share=0.5)


@pytest.mark.parametrize(
    ("top", "probability", "mass"),
    [
        # 0.6 / (0.6 + 0.2), whatever else there is.
        ([("Yes", LOG(0.6)), ("No", LOG(0.2)), ("Maybe", LOG(0.2))], 0.75, 0.8),
        # Spellings are summed: (0.3 + 0.2 + 0.1) / (0.6 + 0.3).
        (
            [("Yes", LOG(0.3)), (" yes", LOG(0.2)), ("YES.", LOG(0.1)), ("\u0120no", LOG(0.2)), ("no", LOG(0.1))],
            2 / 3,
            0.9,
        ),
        ([("No", LOG(0.9)), ("Nobody", LOG(0.1))], 0.0, 0.9),
        ([("yes", 0.0), ("no", -9999.0)], 1.0, 1.0),
        ([("yesterday", LOG(0.5)), ("not", LOG(0.5))], math.nan, 0.0),
        ([("It", LOG(0.93)), ("Yes", LOG(0.05)), ("No", LOG(0.02))], math.nan, 0.07),
        ([], math.nan, 0.0),
        ([("yes", math.nan)], math.nan, 0.0),
    ],
)
def test_p_yes_by_hand(top: list[tuple[str, float]], probability: float, mass: float) -> None:
    found = yes_probability(top)
    assert found[0] == pytest.approx(probability, nan_ok=True)
    assert found[1] == pytest.approx(mass, abs=1e-9)


def test_the_first_word_counts_not_white_space_before_it() -> None:
    def position(token: str, *top: tuple[str, float]) -> dict[str, Any]:
        return {"token": token, "logprob": -1.0, "top_logprobs": [{"token": t, "logprob": p} for t, p in top]}

    content = [
        position("\n", ("\n", 0.0)),
        position("No", ("No", LOG(0.75)), ("Yes", LOG(0.25))),
        position("yes", ("yes", 0.0)),
    ]
    completion = {"choices": [{"message": {"content": "\nNo"}, "logprobs": {"content": content}}]}
    assert yes_probability(reply_of(completion).top)[0] == pytest.approx(0.25)


@pytest.mark.parametrize(
    "completion", [{}, None, {"choices": []}, {"choices": [{"message": {"content": 5}}]}, {"choices": {"0": 1}}]
)
def test_what_is_no_chat_completion_is_refused(completion: Any) -> None:
    with pytest.raises(RequestError, match="the answer is not a chat completion"):
        reply_of(completion)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("The cat has 2 heads and 5 legs.\nFinal score: **3.5**", 3.5),
        ("Score: 4, no: Score: 6", 6.0),
        ("8/10", 8.0),
        ("Rating = 9 / 10.", 9.0),
        ("Score (1-10): 6.25", 6.25),
        ("I would say 7.", 7.0),
        *((f"Score {scale}: 7", 7.0) for scale in ("(out of 10)", "out of 10", "1-10", "[1-10]", "(1 to 10)")),
        ("I would say 7 out of 10.", 7.0),
        ("Score (Out of 10): 7", 7.0),
        ("The score is 7. So the score is 7.0.", 7.0),
        ("Score: 1\n- 10 fingers are missing", 1.0),
        ("Score: 1 - 10 fingers are missing", 1.0),
        ("Score: 6 - 100% red", 6.0),
        ("Score: 8 and 2 dogs", 8.0),
        ("Score: 8 or 80%", 8.0),
        ("Score: 8 - 1 point lost for the hand", 8.0),
        ("I give it 4 stars", 4.0),
        ("Score: 6\nTo reach a score of 10 the hands would have to be right.", 6.0),
        ("Score: 6\nRating scale: 1 = bad, 10 = perfect", 6.0),
        ("2 heads and 5 legs: I give a score of 3.", 3.0),
        ("Score: 1,5", 1.5),
        ("A score of 6. To reach a score of 10, the hands would have to be right.", math.nan),
        *((f"Score: {scores}", math.nan) for scores in ("1 to 10: 6", "7-8", "7 -8", "**7 - 8**", "7 or 8")),
        ("Score: 4 or 5 stars", math.nan),
        ("Score: between 4 and 5 points", math.nan),
        ("The score is between 3 and 5.", math.nan),
        *(
            (text, math.nan)
            for text in ("Score: 11", "Score: -3", "Score: .8", "3 or 4", "4/5", "Score: high", "", "v2")
        ),
    ],
)
def test_a_score_is_parsed_or_there_is_none(text: str, score: float) -> None:
    assert score_in(text, 1, 10) == pytest.approx(score, nan_ok=True)
    pattern = re.compile(r"Alignment Score \(1-5\):\s*([\d.]+)")
    several = "Alignment Score (1-5): 3.62\nStyle Score (1-5): 2\n"
    assert score_in(several + text, 1, 5, pattern) == 3.62
    assert math.isnan(score_in(text, 1, 5, pattern))


@pytest.mark.parametrize(
    ("text", "score"), [("8", 8.0), ("Score: 8\nBecause the", 8.0), ("It asks for 3 cubes. The", math.nan)]
)
def test_a_reply_that_was_cut_off_has_a_score_if_that_came_first(text: str, score: float) -> None:
    assert score_in(text, 1, 10, cut=True) == pytest.approx(score, nan_ok=True)


@pytest.mark.parametrize("options", [{}, {"mode": "score", "score_range": [0, 10]}])
def test_every_image_is_judged_by_itself(endpoint: Running, options: dict) -> None:
    output = judge(endpoint, **options)(prompts({}), images(8))
    assert torch.allclose(output.values, expected() * (10 if options else 1), atol=1e-3)
    if not options:
        assert torch.allclose(output.parts["yes_or_no"], torch.full((8,), 0.5), atol=1e-3)


@pytest.mark.parametrize(
    ("fault", "mode"),
    [("prose", "yes_probability"), ("bare", "yes_probability"), ("two_scores", "score"), ("unfinished", "score")],
)
def test_an_answer_that_cannot_be_parsed_is_unscored_never_0(endpoint: Running, fault: str, mode: str, caplog) -> None:
    reward = judge(endpoint, score_range=[0, 10], mode=mode)
    output = reward(prompts({3: f"!{fault} please"}), images(8))
    assert output.values.isnan().tolist() == [row == 3 for row in range(8)]
    assert (reward.budget.failed, output.failed) == (0, {})
    assert "1 of 8 answers could not be parsed" in caplog.text
    assert ("must support top_logprobs" in caplog.text) == (fault == "bare")
    assert ("1 of them ended at max_tokens" in caplog.text) == (fault == "unfinished")


def test_what_was_not_asked_is_no_answer(endpoint: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Two of eight prompts ask for a text."""
    output = judge(endpoint, rubric="text")(prompts({3: 'a sign "!prose"', 5: 'a sign "OPEN"'}), images(8))
    assert output.values.isnan().tolist() == [row != 5 for row in range(8)]
    assert "1 of 2 answers could not be parsed" in caplog.text


def test_a_fault_loses_its_own_sample_only(endpoint: Running) -> None:
    output = judge(endpoint)(prompts({2: "!nochoice"}), images(8))
    assert output.values.isnan().tolist() == [row == 2 for row in range(8)]
    assert "the answer is not a chat completion" in output.failed[2]


def test_what_is_asked_has_the_rubric_the_model_and_the_scaled_image() -> None:
    with running() as server:
        judge(server, image_size=8, image_format="jpeg")(
            [PromptRecord(id="a", prompt="a {red} cat")], [torch.zeros(3, 32, 16, dtype=torch.uint8)]
        )
        sent = server.log[0]["sent"]
    assert {key: sent[key] for key in sent if key != "messages"} == {
        "model": "mean", "temperature": 0.0, "seed": 0, "max_tokens": 1, "logprobs": True, "top_logprobs": 20
    }  # fmt: skip
    (user,) = sent["messages"]
    assert user["content"][1]["text"].endswith("Description: a {red} cat\nAnswer with one word, Yes or No.")
    kind, _, data = user["content"][0]["image_url"]["url"].partition(",")
    assert kind == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (4, 8)


@pytest.mark.parametrize("mode", ["yes_probability", "score"])
def test_requests_and_answers_have_the_form_that_openais_own_client_gives_them(mode: str) -> None:
    # Imported here: its hundreds of modules would be read by each of xdist's processes.
    from openai import OpenAI
    from openai.types import Model
    from openai.types.chat import ChatCompletion, ChatCompletionContentPartParam
    from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

    with running() as server:
        ours = judge(server, mode=mode, score_range=[0, 10])(prompts({}, 1), images(2)[1:])
        sent = server.log[0]["sent"]
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as library:
            completion = library.chat.completions.create(**sent)  # A TypeError for an entry that it does not know.
            models = [Model.model_validate(model.to_dict()).id for model in library.models.list()]
        assert server.log[1]["sent"] == sent
    TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(sent, strict=True)
    TypeAdapter(list[ChatCompletionContentPartParam]).validate_python(sent["messages"][0]["content"])
    answer = ChatCompletion.model_validate(completion.to_dict())  # The client itself takes any answer.
    reply = reply_of(answer.model_dump())
    theirs = yes_probability(reply.top)[0] if mode == "yes_probability" else score_in(reply.text, 0, 10)
    assert ours.values.tolist() == pytest.approx([theirs])
    assert models == ["mean"]
    assert {source: sent.keys() - read for source, read in SERVERS.items()} == {source: set() for source in SERVERS}
    assert sent.get("top_logprobs", 0) <= 20
    urls = [part["image_url"]["url"] for part in sent["messages"][0]["content"] if part["type"] == "image_url"]
    assert [url.startswith(IMAGES) for url in urls] == [True]


@pytest.mark.parametrize(("rubric", "count"), [("instruction", 2), ("identity", 2), ("alignment", 1)])
def test_rubrics_about_an_edit_send_the_source_first(rubric: str, count: int, tmp_path: Path) -> None:
    record = tiny.record("a", folder=tmp_path, source=tiny.picture(0))
    with running() as server:
        reward = judge(server, rubric=rubric)
        assert reward.needs == Needs(source=count == 2)
        assert reward([record], [torch.zeros(3, 8, 8, dtype=torch.uint8)]).values.tolist() == [0.0]
        urls = [part for part in server.log[0]["sent"]["messages"][0]["content"] if part["type"] == "image_url"]
    assert len(urls) == count


@pytest.mark.parametrize("rubric", ["instruction", "identity"])
def test_an_edit_of_several_sources_sends_all_and_asks_about_the_last_image(rubric: str, tmp_path: Path) -> None:
    one, other = (tiny.record(name, folder=tmp_path, source=tiny.picture(0)) for name in "ab")
    record = replace(one, source_images=one.source_images + other.source_images)
    with running() as server:
        judge(server, rubric=rubric)([record], [torch.zeros(3, 8, 8, dtype=torch.uint8)])
        content = server.log[0]["sent"]["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url"] * 3 + ["text"]
    assert content[-1]["text"].startswith("The last image was made from the images before it")


def test_the_text_rubric_asks_for_the_quoted_text_and_skips_records_without() -> None:
    asked = [PromptRecord(id="a", prompt='a sign that says "open"'), PromptRecord(id="b", prompt="a cat")]
    with running() as server:
        output = judge(server, rubric="text")(asked, images(2))
        texts = [each["sent"]["messages"][0]["content"][-1]["text"] for each in server.log]
    assert len(texts) == 1
    assert '"open"' in texts[0]
    assert output.values.isnan().tolist() == [False, True]
    assert output.failed == {}


def test_answers_are_cached_by_content_and_the_same_is_asked_once(tmp_path: Path) -> None:
    options = {"cache": str(tmp_path), "model": "mean"}
    with running("prose,ok") as server:
        same = [PromptRecord(id=i, prompt="a") for i in "ab"]
        # The first answer cannot be parsed and is not kept.
        first, second, again = (judge(server, **options)(same, [images(8)[5]] * 2).values.tolist() for _ in range(3))
        assert math.isnan(first[0])
        assert second == again == pytest.approx([50 / 255] * 2, abs=1e-3)
        assert len(server.log) == 2
        others = {"model": "other", "rubric": "Is it {prompt}?", "image_size": 2, "extra": {"temperature": 1.0}}
        for changed in ({option: value} for option, value in others.items()):
            judge(server, **options | changed)(same, [images(8)[5]] * 2)
        judge(server, **options)(same, [images(8)[4]] * 2)
        assert len(server.log) == 7
    for file in tmp_path.rglob("*.json"):
        file.write_text(file.read_text()[:10])  # As a full disk leaves it.
    with running() as other:
        judge(other, **options)(same, [images(8)[5]] * 2)
        assert len(other.log) == 1


def test_the_machine_check_looks_for_the_model() -> None:
    with running() as server:
        VlmJudge(f"{server.url}/v1").check_machine()
        VlmJudge(f"{server.url}/v1", model="mean").check_machine()
        with pytest.raises(UserError, match=r"asks for 'qwen', and http://.* has 'mean'"):
            VlmJudge(f"{server.url}/v1", model="qwen").check_machine()
    with pytest.raises(UserError, match=r"no connection to .*/models.*Start a server there"):
        VlmJudge(f"{server.url}/v1").check_machine()
    with running("two") as server, pytest.raises(UserError, match=r"must name one of the models .* 'mean', 'other'"):
        VlmJudge(f"{server.url}/v1").check_machine()
