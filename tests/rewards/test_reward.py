import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Needs, PromptRecord, RewardOutput
from visual_grpo.rewards.reward import FunctionReward, load_function, make_reward

HERE = "tests.rewards.test_reward"
PROMPTS = [PromptRecord(id=i, prompt=f"prompt {i}") for i in ("a", "b", "c")]
SAMPLES = [torch.full((3, 4, 4), value, dtype=torch.uint8) for value in (0, 100, 200)]


def call(returned: object) -> RewardOutput:
    return FunctionReward("mine", lambda prompts, samples: returned)(PROMPTS, SAMPLES)


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.5, None],
        (score for score in (1.0, 0.5, None)),
        torch.tensor([1.0, 0.5, torch.nan], dtype=torch.float64),
        [torch.tensor(1), np.float64(0.5), torch.tensor(torch.nan)],
        np.array([1.0, 0.5, np.nan]),
        [np.bool_(True), 0.5, None],
        RewardOutput(values=torch.tensor([1.0, 0.5, torch.nan])),
    ],
)
def test_every_way_to_say_three_scores(returned: object) -> None:
    values = call(returned).values
    assert values.dtype == torch.float32
    assert values[:2].tolist() == [1.0, 0.5]
    assert values[2].isnan()


def with_ratio(ratio: Any) -> RewardOutput:
    return RewardOutput(values=torch.zeros(3), ratios={"share": ratio})


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ([1.0, 2.0], r"'mine'.*each of 3 samples, got shape \[2\].*'a', 'b', 'c'"),
        (0.5, "'mine' must return a sequence of numbers.*got 0.5"),
        ({1: 0.5, 2: 0.5, 3: 0.5}, "'mine' must return a sequence of numbers.*got dict$"),
        (RewardOutput(values={1: 0.5, 2: 0.5, 3: 0.5}), "'mine' must return a sequence.*got dict$"),  # type: ignore[arg-type]
        ([1.0, "0.5", 1.0], "'mine' gave '0.5' for record 'b'"),
        ([1.0, float("inf"), float("-inf")], "'mine' gave inf for record 'b'"),
        ([1.0, 2e299, 0.0], "'mine' gave 2e.299 for record 'b': scores are finite in float32; return None"),
        ([1, 10**400, 0], "'mine' gave 10000.* for record 'b'; expected a real number or None"),
        (torch.zeros(3, dtype=torch.complex64), r"'mine' gave complex numbers \(torch.complex64\)"),
        (np.ones(3, dtype=np.complex64), r"'mine' gave .*1\+0j.* for record 'a'; expected a real number"),
        ([1.0, 1 + 0j, 1.0], r"'mine' gave \(1\+0j\) for record 'b'; expected a real number"),
        ([1.0, torch.tensor(1 + 0j), 1.0], r"'mine' gave .* for record 'b'; expected a real number"),
        (RewardOutput(values=torch.zeros(3), parts={"fine": torch.zeros(2)}), "'mine/fine'.*each of 3"),
        *((RewardOutput(values=torch.ones(3), failed={row: "no"}), f"failed on row {row}, which") for row in (0, 3)),
        (with_ratio(torch.zeros(2, 3)), "'mine/share' must be a tuple"),
        (with_ratio((torch.zeros(2), torch.ones(3))), "'mine/share'.*each of 3"),
        (with_ratio((torch.zeros(3), torch.tensor([1.0, 1.0, torch.nan]))), "'mine/share' is 0.0 / nan for record 'c'"),
        (with_ratio((torch.ones(3), torch.tensor([1.0, -1.0, 1.0]))), "'mine/share' is 1.0 / -1.0 for record 'b'"),
    ],
)
def test_anything_else_is_refused_by_name(returned: object, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        call(returned)


class Painting:
    """Paints whatever a sample is."""

    def __call__(self, prompts, samples):
        return [None] * len(samples)

    def picture(self, record, sample):
        if isinstance(sample, Exception):
            raise sample
        return sample


@pytest.mark.parametrize(
    ("painted", "complaint"),
    [
        (torch.zeros(3, 4, 4), r"(?s)'mine' could not paint its picture of record 'b'.*got torch.float32 \[3, 4, 4\]"),
        (None, "(?s)'mine' could not paint its picture of record 'b'.*got NoneType"),
        (KeyError("left"), r"(?s)'mine' could not paint its picture of record 'b'.*in picture.*KeyError: 'left'"),
        (UserError("no image"), "^no image$"),
    ],
)
def test_a_picture_that_is_none_names_reward_and_record(painted: object, complaint: str) -> None:
    reward: Any = FunctionReward("mine", Painting())
    assert reward.picture(PROMPTS[0], SAMPLES[1]) is SAMPLES[1]
    with pytest.raises(UserError, match=complaint):
        reward.picture(PROMPTS[1], painted)


def dividing(prompts: object, samples: object) -> list[float]:
    return [1 / 0]


def yielding(prompts: object, samples: list[object]) -> Iterator[float]:
    for number, _ in enumerate(samples):
        yield 1 / number


def leaving(prompts: object, samples: object) -> list[float]:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("broken", "said"),
    [(dividing, "ZeroDivisionError"), (yielding, "ZeroDivisionError"), (leaving, "SystemExit: 3")],
)
def test_an_error_inside_names_reward_records_and_the_rewards_own_lines(broken: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        FunctionReward("mine", broken)(PROMPTS, SAMPLES)
    head, first, *_, kind = str(caught.value).splitlines()
    assert head == "reward 'mine' failed on the records 'a', 'b', 'c':"
    assert "test_reward.py" in first
    assert first.endswith(f"in {broken.__name__}")
    assert kind.startswith(said)


def mean(prompts, samples):
    return [float(sample.float().mean()) for sample in samples]


class Bright:
    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, prompts, samples):
        return [self.scale * value for value in mean(prompts, samples)]


bright = Bright()


def as_in_flow_grpo(images, prompts, add=0):
    return [float(image.float().mean()) + add + (prompts[i].id == "c") for i, image in enumerate(images)]


def with_metadata(images, prompts, metadata):
    return [0.0] * len(images)


def other_names(batch, texts):
    return [0.0] * len(batch)


def above(prompts, samples, level, *, gain=1.0):
    return [gain * (value > level) for value in mean(prompts, samples)]


above.needs = Needs(target=True)  # type: ignore[attr-defined]


def free(prompts, samples, **options):
    return [float(options["level"])] * len(samples)


class Uncallable:
    pass


class Broken:
    def __init__(self):
        raise RuntimeError("no weights")


class Picky:
    def __init__(self, size):
        raise UserError(f"size must be above 0, got {size + 0}")


@pytest.mark.parametrize(
    ("path", "options", "scores"),
    [
        ("mean", {}, [0, 100, 200]),
        ("Bright", {"scale": 2.0}, [0, 200, 400]),
        ("above", {"level": 150, "gain": 2.0}, [0, 0, 2]),
        ("free", {"level": 4}, [4, 4, 4]),
        ("Bright", {"scale": 2.0, "left_over": None}, [0, 200, 400]),
        ("bright", {}, [0, 100, 200]),
        ("as_in_flow_grpo", {}, [0, 100, 201]),
        ("as_in_flow_grpo", {"add": 1}, [1, 101, 202]),
    ],
)
def test_functions_and_classes_get_their_options(path: str, options: dict, scores: list[float]) -> None:
    reward = make_reward("mine", f"{HERE}:{path}", options)
    assert reward(PROMPTS, SAMPLES).values.tolist() == scores
    assert reward.needs.target == (path == "above"), "options hide nothing that a function says of itself"


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        (f"{HERE}.mean", "package.module:name, got 'tests.rewards.test_reward.mean'"),
        ("users_reward:mean", "no module 'users_reward'.*put the file into the project's root"),
        (f"{HERE}:maen", "has no 'maen'.*Did you mean 'mean'"),
        (f"{HERE}:PROMPTS", "must be a function or class, it is of type list"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(path: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        load_function(path)


@pytest.mark.parametrize(
    ("path", "options", "complaint"),
    [
        ("Bright", {"scales": 2}, r"has no option 'scales'; it takes: scale\. Did you mean 'scale'\?"),
        ("above", {"level": 2, "gian": 2}, r"has no option 'gian'; it takes: level, gain\. Did you mean 'gain'\?"),
        ("above", {"gain": 2}, "needs the option 'level', got gain"),
        ("Uncallable", {}, "^reward 'mine' must be callable with prompts and images .*, got Uncallable$"),
        (
            "with_metadata",
            {},
            r"'metadata', got none\. Every parameter but prompts and images .* prompts\[i\].metadata",
        ),
        ("other_names", {}, r"is called with prompts and images \(or samples, videos\).*It takes batch, texts"),
        ("mean", {"samples": 2}, r"has no option 'samples'; it takes: none"),
        ("free", {"prompts": 2}, r"has no option 'prompts'"),
        ("Broken", {}, r"could not be made:\n(?s:.*)RuntimeError: no weights"),
        ("Picky", {"size": "4"}, r"refused the options .*can only concatenate"),
        ("Picky", {"size": 0}, r"^reward 'mine': size must be above 0, got 0$"),
    ],
)
def test_wrong_options_are_named(path: str, options: dict, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        make_reward("mine", f"{HERE}:{path}", options)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def red(:", "SyntaxError"),
        ("raise SystemExit", "SystemExit"),
        ("import not_installed_anywhere", "not_installed_anywhere"),
    ],
)
def test_the_error_of_a_modules_own_code_is_shown(tmp_path, monkeypatch, text: str, said: str) -> None:
    (tmp_path / "users_failing.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    told = rf"(?s)users_failing.*cannot be imported.*users_failing.py\", line 1.*{said}"
    with pytest.raises(UserError, match=told):
        load_function("users_failing:red")


def flaky(broken: Iterator[bool], share: float) -> FunctionReward:
    """A reward that raises where ``broken`` says so, once for each of its calls."""

    def score(prompts, samples):
        if next(broken):
            raise ConnectionError(f"no answer for {prompts[0].id}")
        ones = torch.ones(len(samples))
        values = torch.tensor(mean(prompts, samples))
        return RewardOutput(values=values, parts={"fine": ones}, ratios={"share": (ones, 2 * ones.double())})

    return FunctionReward("mine", score, max_failed_share=share)


def test_a_sample_that_fails_alone_is_unscored_and_too_many_stop_the_run(caplog) -> None:
    # A whole call that succeeds, one that fails, then each sample alone: the second fails again. And so once more.
    reward = flaky(iter([False, True, False, True, False, True, False, True]), share=0.2)
    before = reward(PROMPTS, SAMPLES)
    output = reward(PROMPTS, SAMPLES)
    assert output.values.isnan().tolist() == [False, True, False]
    assert output.values[[0, 2]].tolist() == before.values[[0, 2]].tolist() == [0.0, 200.0]
    assert output.parts["fine"].isnan().tolist() == [False, True, False]
    above, below = output.ratios["share"]
    assert above.isnan().tolist() == below.isnan().tolist() == [False, True, False]
    assert below.dtype == torch.float32
    assert below[0] == 2
    assert "'mine' failed on 'b', left unscored: ConnectionError: no answer for b" in caplog.text
    with pytest.raises(UserError, match=r"failed on 2 of 8 samples, .*share 0.2 that rewards.mine.max_failed_share"):
        reward(PROMPTS, SAMPLES)


def giving_up(rows: Iterator[list[int]], share: float) -> FunctionReward:
    """A reward that asks for each sample itself and gives up ``rows``, one list for each of its calls."""

    def score(prompts, samples):
        lost = next(rows)
        values = torch.tensor([torch.nan if row in lost else 1.0 for row in range(len(samples))])
        return RewardOutput(values=values, failed={row: f"no answer for {prompts[row].id}" for row in lost})

    return FunctionReward("mine", score, max_failed_share=share)


def test_samples_that_a_reward_gives_up_count_as_failed_and_are_not_asked_again(caplog) -> None:
    reward = giving_up(iter([[1], [0]]), share=0.2)
    assert reward(PROMPTS, SAMPLES).values.isnan().tolist() == [False, True, False]
    assert "'mine' failed on 'b', left unscored: no answer for b" in caplog.text
    # 2 of 6 > 0.2.
    with pytest.raises(UserError, match=r"failed on 2 of 6 samples, more than the share 0.2 .*no answer for a"):
        reward(PROMPTS, SAMPLES)


@pytest.mark.parametrize(("reason", "said"), [(ConnectionError("gone"), "gone"), ("\n", "no reason given")])
def test_any_reason_will_do(reason: Any, said: str, caplog) -> None:
    outputs = iter([{}, {1: reason}])
    values = torch.tensor([1.0, torch.nan, 1.0])

    def mine(prompts: Any, images: Any) -> RewardOutput:
        return RewardOutput(values=values, failed=next(outputs))

    reward = FunctionReward("mine", mine, max_failed_share=0.05)
    for _ in range(2):
        reward(PROMPTS, SAMPLES)
    assert f"'mine' failed on 'b', left unscored: {said}" in caplog.text


def test_failing_in_the_first_call_or_without_a_share_stops_at_once() -> None:
    for lost, share in (([0, 1, 2], 0.9), ([1], 0.0)):
        with pytest.raises(UserError, match=rf"failed on {len(lost)} of 3 samples: no answer for"):
            giving_up(iter([lost]), share)(PROMPTS, SAMPLES)
    with pytest.raises(UserError, match="ConnectionError"):
        flaky(iter([True]), 0.5)(PROMPTS, SAMPLES)
    reward = flaky(iter([False, True]), 0.0)
    reward(PROMPTS, SAMPLES)
    with pytest.raises(UserError, match="ConnectionError"):
        reward(PROMPTS, SAMPLES)


def test_a_reward_that_paints_sorts_edits_or_switches_gradients_off_changes_nothing_outside() -> None:
    def careless(prompts, samples):
        torch.set_grad_enabled(False)
        prompts.sort(key=lambda prompt: prompt.id, reverse=True)
        for prompt in prompts:
            prompt.metadata["objects"].pop()
        for sample in samples:
            sample.fill_(255)
        return torch.ones(len(samples), requires_grad=True)

    given = [replace(prompt, metadata={"objects": [prompt.id]}) for prompt in PROMPTS[:-1]]
    given.append(given[-1])  # As in a group, whose samples share their record.
    prompts, before = list(given), [sample.clone() for sample in SAMPLES]
    assert not FunctionReward("mine", careless)(prompts, SAMPLES).values.requires_grad
    assert torch.is_grad_enabled()
    assert prompts == given
    assert [prompt.metadata for prompt in prompts] == [{"objects": [prompt.id]} for prompt in given]
    assert all(torch.equal(*pair) for pair in zip(before, SAMPLES, strict=True))


class Wandering:
    """Goes into another folder and to another precision, as scripts of research code do."""

    def __init__(self, folder: str) -> None:
        os.chdir(folder)

    def __call__(self, prompts: Any, samples: Any) -> list[float]:
        torch.set_default_dtype(torch.float64)
        return [0.0] * len(samples)


def test_what_a_reward_changes_for_the_process_is_put_back_and_said_once(tmp_path, caplog) -> None:
    before = Path.cwd()
    reward = make_reward("wandering", f"{__name__}:Wandering", {"folder": str(tmp_path)})
    for _ in range(2):
        reward(PROMPTS, SAMPLES)
    assert (Path.cwd(), torch.get_default_dtype()) == (before, torch.float32)
    assert [line.split(" again")[0] for line in caplog.messages] == [
        f"reward 'wandering' changed the working directory to {tmp_path}; it is {before}",
        "reward 'wandering' changed torch's default dtype to torch.float64; it is torch.float32",
    ]


def test_a_reward_that_compares_samples_is_asked_again_group_by_group() -> None:
    sizes: list[int] = []

    class Ranking:
        needs = Needs(whole_groups=True)

        def __call__(self, prompts, samples):
            sizes.append(len(samples))
            if sizes != [4] and any(float(sample.max()) == 200 for sample in samples):
                raise RuntimeError("too bright")
            return mean(prompts, samples)

    prompts = [PromptRecord(id=i, prompt="") for i in ("a", "a", "b", "b")]
    images = [*SAMPLES[::2], *SAMPLES[:2]]
    reward = FunctionReward("mine", Ranking(), max_failed_share=0.5)
    reward(prompts, images)
    values = reward(prompts, images).values
    assert sizes == [4, 4, 2, 2]
    assert values[:2].isnan().all()
    assert values[2:].tolist() == [0, 100]
