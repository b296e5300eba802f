from __future__ import annotations

import pytest

from visual_grpo.common.types import TextSample
from visual_grpo.rewards.segmentation import PointPrompt
from visual_grpo.rewards.segmentation.answer import Answer, AnswerError, parse_answer

SIZE = (64, 64)


def said(text: str, *, finished: bool = True, frame: tuple[int, int] = SIZE) -> TextSample:
    return TextSample(text=text, finished=finished, frame=frame)


def answer(bbox: str = "[1,2,30,40]", points: str = "[[5,6]]", negatives: str = "[[50,60]]") -> str:
    return f'<answer>{{"bbox":{bbox},"points":{points},"negative_points":{negatives}}}</answer>'


def test_an_answer_is_parsed() -> None:
    got = parse_answer(said("<think>left of it</think>\n" + answer(negatives="[[50,60],[0,63.5]]")), SIZE)
    assert got == Answer(box=(1, 2, 30, 40), points=((5, 6),), negatives=((50, 60), (0, 63.5)), thought=True)
    assert got.prompt == PointPrompt(positives=((5, 6),), negatives=((50, 60), (0, 63.5)), box=(1, 2, 30, 40))


@pytest.mark.parametrize("before", ["", "<think></think>", "I think", "<think>a</think> so"])
def test_only_reasoning_in_its_tags_is_a_thought(before: str) -> None:
    got = parse_answer(said(before + answer(negatives="[]")), SIZE)
    assert (got.thought, got.negatives) == (False, ())


def test_pixel_centres_are_mapped_to_pixel_centres() -> None:
    """A frame of 32 x 128 (h x w) shown as 64 x 64: the first pixel's centre lies at 0.5, the last one's at 62.75."""
    got = parse_answer(said(answer("[0,0,127,31]", "[[0,0]]", "[[127,31]]"), frame=(32, 128)), SIZE)
    assert got.points == ((-0.25, 0.5),)
    assert got.negatives == ((63.25, 62.5),)
    assert got.box == (-0.25, 0.5, 63.25, 62.5)


@pytest.mark.parametrize(
    ("frame", "bbox", "points", "box", "point"),
    [
        (SIZE, "[32,0,64,63.5]", "[[63.5,0]]", (32, 0, 63, 63), (63.5, 0)),
        (SIZE, "[64,64,64,64]", "[[0,0]]", (63, 63, 63, 63), (0, 0)),
        ((1001, 1001), "[500,500,1000,1000]", "[[1000,500]]", (31.5, 31.5, 63.4680, 63.4680), (63.4680, 31.5)),
    ],
)
def test_corners_may_lie_at_the_right_and_bottom_edge(
    frame: tuple[int, int], bbox: str, points: str, box: tuple[float, ...], point: tuple[float, ...]
) -> None:
    got = parse_answer(said(answer(bbox, points, "[]"), frame=frame), SIZE)
    assert got.box == pytest.approx(box, abs=1e-4)
    assert got.points[0] == pytest.approx(point, abs=1e-4)


FAULTS = {
    "no_answer": ["", "a box", answer() + answer()],
    "not_json": ["<answer>{</answer>", f"<answer>{'[' * 100_000}</answer>"],
    "wrong_keys": ["<answer>[1,2]</answer>", '<answer>{"bbox":[1,2,3,4],"points":[[1,2]]}</answer>'],
    "wrong_numbers": [
        *(answer(bbox=box) for box in ("[1,2,3]", '["1",2,3,4]', "[30,2,1,40]", "[1,40,30,2]")),
        *(answer(points=points) for points in ("[]", "[5,6]", "[[5,6,7]]", "[[true,6]]", "[[NaN,6]]")),
        answer(points=f"[[{'9' * 400},6]]"),
        answer(negatives="null"),
    ],
    "outside": [answer(negatives="[[64,0]]"), answer(points="[[0,-1]]"), answer(bbox="[0,0,64.1,63]")],
}


@pytest.mark.parametrize(("fault", "text"), [(fault, text) for fault, texts in FAULTS.items() for text in texts])
def test_faults_of_unusable_answers(fault: str, text: str) -> None:
    with pytest.raises(AnswerError) as caught:
        parse_answer(said(text), SIZE)
    assert caught.value.fault == fault


def test_an_unfinished_answer_is_truncated_even_if_it_could_be_parsed() -> None:
    with pytest.raises(AnswerError, match="cut off after"):
        parse_answer(said(answer(), finished=False), SIZE)
