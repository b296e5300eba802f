"""The workers' shared server with the template in a process, asked by the reward; and the workers' arithmetic."""

from __future__ import annotations

import json
import math
import runpy
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.models import ResNet18_Weights

from tests.rewards.learned import tiny
from tests.rewards.remote.processes import WORKERS, module_of, served, started, told_at_its_end
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.remote.http_reward import HttpReward
from visual_grpo.rewards.reward import FunctionReward

soft_tifa, scores = module_of("geneval2", "soft_tifa"), module_of("unifiedreward", "scores")

FAILING = """
import sys
from serve import serve, unscored

def load():
    if sys.argv[0].endswith("broken.py"):
        raise FileNotFoundError("no weights")
    def score(request):
        if "crash" in request.prompts:
            raise RuntimeError("out of memory")
        if "none" in request.prompts:
            unscored("the prompt is 'none'")
        said = {"nan": float("nan"), "none": None, "text": "0.5"}
        return tuple(said.get(prompt, 0.5) for prompt in request.prompts)
    return score

serve("failing-1", load, "They are on the hub; WEIGHTS names a local folder.")
"""


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    script = tmp_path_factory.mktemp("worker") / "failing.py"
    script.write_text(FAILING)
    with started(script) as url:
        yield url


def post(url: str, body: bytes, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(f"{url}/score", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def records(*prompts: str) -> list[PromptRecord]:
    return [PromptRecord(id=f"r{row}", prompt=prompt) for row, prompt in enumerate(prompts)]


def grey(*values: int) -> list[torch.Tensor]:
    return [torch.full((3, 8, 8), value, dtype=torch.uint8) for value in values]


def test_the_template_scores_over_http() -> None:
    with started(WORKERS / "template" / "worker.py") as url:
        reward = HttpReward(url, model="brightness-1")
        reward.check_machine()
        output = FunctionReward("bright", reward)(records("a", "b", "c"), grey(0, 51, 255))
    assert output.values.tolist() == pytest.approx([0.0, 0.2, 1.0])
    assert output.parts["contrast"].tolist() == [0.0, 0.0, 0.0]


def test_null_is_unscored_and_a_crash_or_nan_loses_its_own_image(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    reward = FunctionReward("judge", HttpReward(failing, retries=0, stop_after=0), max_failed_share=0.5)
    output = reward(records("a", "none", "crash", "b", "nan", "text"), grey(0, 1, 2, 3, 4, 5))
    assert output.values.isnan().tolist() == [False, True, True, False, True, True]
    assert sorted(output.failed) == [2, 4, 5]
    assert "a score must be a number or None" in output.failed[5]
    assert 'answered 500: {"error":"RuntimeError: out of memory"}' in output.failed[2]
    assert "a score that is not finite" in output.failed[4]
    assert caplog.text.count("leaves images unscored: the prompt is 'none'") == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "JSON decode error"),
        (b"[]", "body: Input should be a valid dictionary"),
        (b'{"images": ["AA"]}', "body.prompts: Field required"),
        (b'{"images": [5], "prompts": ["a"]}', "body.images.0: Input should be a valid string"),
        (b'{"images": ["AA"], "prompts": []}', "as many as the images"),
        (b'{"images": ["AA"], "prompts": ["a"]}', "an image cannot be read"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(failing: str, body: bytes, reason: str) -> None:
    code, answer = post(failing, body, **{"Content-Type": "application/json"})
    assert code == 422
    assert reason in answer["error"]


def test_a_key_is_needed_if_there_is_one() -> None:
    with started(WORKERS / "template" / "worker.py", WORKER_API_KEY="swordfish") as url:
        assert post(url, b"{}")[0] == post(url, b"{}", Authorization="Bearer other")[0] == 401
        output = HttpReward(url, api_key="swordfish")(records("a"), grey(255))
        assert output.values.tolist() == [1.0]
        with pytest.raises(UserError, match=r"answered 401: .*set the option api_key"):
            HttpReward(url)(records("a"), grey(255))
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10) as stranger:
            stranger.sendall(b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n")
            assert b" 401 " in stranger.recv(100), "nothing of the body is waited for"


def test_ctrl_c_ends_a_worker_whose_client_stalls(tmp_path: Path) -> None:
    script = tmp_path / "brief.py"
    script.write_text("import serve\n\nserve.GRACE = 0.3\nserve.serve('brief-1', lambda: lambda request: [])\n")
    with served(script, "--port=0") as worker, socket.socket() as client:
        assert worker.stdout is not None
        port = int(worker.stdout.readline().split(":")[3].split(",")[0])
        assert worker.stdout.readline().endswith(": ready\n")
        client.connect(("127.0.0.1", port))
        client.sendall(b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{")
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        worker.send_signal(signal.SIGINT)
        assert worker.wait(20) in (0, -signal.SIGINT)


def test_a_worker_without_weights_ends(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(FAILING)
    told = "Error: failing-1 could not be loaded: FileNotFoundError: no weights\n"
    assert told_at_its_end(script).endswith(told + "They are on the hub; WEIGHTS names a local folder.\n")


def test_soft_tifa_by_hand() -> None:
    # Four questions: (0.9 * 0.8 * 0.5 * 0.1)^(1/4) and (0.9 + 0.8 + 0.5 + 0.1) / 4.
    found = [0.9, 0.8, 0.5, 0.1]
    assert soft_tifa.geometric_mean(found) == pytest.approx(0.036**0.25) == pytest.approx(0.43559, abs=1e-5)
    assert soft_tifa.arithmetic_mean(found) == pytest.approx(0.575)
    # sqrt(1 * 1e-10): one question that is lost is nearly nothing, but not the same as two.
    assert soft_tifa.geometric_mean([1.0, 0.0]) == pytest.approx(1e-5)
    assert soft_tifa.geometric_mean([0.0, 0.0]) == pytest.approx(1e-10)


def test_the_spellings_of_an_answer() -> None:
    assert soft_tifa.spellings("Yes") == ["yes", " yes", "Yes", " Yes"]
    assert soft_tifa.spellings("four") == ["four", " four", "Four", " Four", "4", " 4"]
    listed = [["How many cats are in the image?", "four"], ["Are the cats white?", "Yes"]]
    assert soft_tifa.questions_of({"vqa_list": listed}) == [tuple(pair) for pair in listed]
    assert soft_tifa.questions_of({}) == []
    for wrong in ("Yes", [["a question"]], [["a question", ""]], [["a question", 4]], {"a question": "Yes"}):
        with pytest.raises(ValueError, match="must be a list of"):
            soft_tifa.questions_of({"vqa_list": wrong})


def test_what_unifiedreward_says() -> None:
    said = "The cat is red.\nAlignment Score (1-5): 3.62\nCoherence Score (1-5): 4\nStyle Score (1-5): 2.5."
    assert scores.parse(said) == {"Alignment": 3.62, "Coherence": 4.0, "Style": 2.5}
    assert scores.mean(scores.parse(said)) == pytest.approx((3.62 + 4 + 2.5) / 3)
    changed = [said.replace(*pair) for pair in (("3.62", "6"), ("3.62", "3.6.2"), ("Style", "Tone"))]
    for other in (*changed, said + said, ""):
        assert scores.mean(scores.parse(other)) is None
    assert scores.parse(said.replace("4", "0"))["Coherence"] is None


@pytest.mark.slow
def test_soft_tifa_of_a_small_model_over_http(tmp_path: Path) -> None:
    """Qwen2.5-VL's real classes with drawn weights: what it says means nothing."""
    from examples.scenes.small_qwen2_5_vl import build_model, build_processor

    processor = build_processor(64, 64)
    build_model(processor, seed=1).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    images = [tiny.picture(row, 64, 64) for row in range(3)]
    listed = [["How many dogs are there?", "2"], ["How many cats are there?", "4"]]  # Its tokens are characters.
    tasks: list[dict[str, Any]] = [{"vqa_list": listed}, {}, {"vqa_list": listed}]
    asked = [PromptRecord(id=str(row), prompt="cats", metadata=task) for row, task in enumerate(tasks)]
    with started(WORKERS / "geneval2" / "worker.py", VLM=str(tmp_path)) as url:
        reward = FunctionReward("tifa", HttpReward(url, model=f"soft-tifa:{tmp_path}"))
        output = reward(asked, images)
        alone = reward(asked[2:], images[2:])
    assert output.values.isnan().tolist() == [False, True, False]
    assert 0 < float(output.values[0]) < float(output.parts["arithmetic"][0]) < 1
    assert output.values[0] != output.values[2]
    assert output.values[2] == alone.values[0]


def test_the_part_of_hpsv3_is_a_standard_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model gives the logarithm."""

    class Inferencer:
        def __init__(self, **_: Any) -> None: ...

        def reward(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> torch.Tensor:
            return torch.tensor([[2.5, math.log(0.5)]])

    monkeypatch.setitem(sys.modules, "hpsv3", SimpleNamespace(HPSv3RewardInferencer=Inferencer))
    monkeypatch.syspath_prepend(WORKERS)
    loaded = runpy.run_path(str(WORKERS / "hpsv3/worker.py"))
    scores, parts = loaded["load"]()(SimpleNamespace(images=[Image.new("RGB", (2, 2))], prompts=["a cat"]))
    assert (scores, parts["sigma"]) == ([2.5], [pytest.approx(0.5)])


def test_classes_that_are_an_object_are_all_of_it_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(WORKERS)
    classes_of = runpy.run_path(str(WORKERS / "efficientnet/worker.py"))["classes_of"]
    names = [name.casefold() for name in ResNet18_Weights.DEFAULT.meta["categories"]]

    def called(label: str) -> list[str]:
        return [names[number] for number in classes_of(label, names)]

    assert called("Daisy") == ["daisy"]
    assert called("cardigan") == ["cardigan"]
    assert called("cat") == ["tabby", "tiger cat", "persian cat", "siamese cat", "egyptian cat"]
    for label, first, last, count in (
        ("dog", "chihuahua", "mexican hairless", 118),
        ("bird", "cock", "albatross", 59),
        ("fish", "tench", "puffer", 16),
        ("snake", "thunder snake", "sidewinder", 17),
        ("spider", "black and gold garden spider", "wolf spider", 6),
        ("monkey", "guenon", "squirrel monkey", 13),
        ("car", "beach wagon", "sports car", 9),
    ):
        found = called(label)
        assert (found[0], found[-1], len(found)) == (first, last, count)
    for label in ("apple", "horse", "ball", "chair", "kite", "plane", "a word of no class"):
        assert not called(label)
