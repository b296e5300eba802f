"""The reward votes: from a file of choices to scores, and that file."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.rewards.votes.voters import AT, choice, pair, picture, redness, save_pictures, voted
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import read_image, to_tensor
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.votes.choices import FIRST, SECOND, SKIP, TIE, UNDO, append_line, read_choices
from visual_grpo.rewards.votes.head import family_scores, load_features, pixel_features
from visual_grpo.rewards.votes.votes_reward import VotesReward, choices_digest, decided_pairs, fitted_head, read_head

PROMPTS = [PromptRecord(id=f"r{number}", prompt="x") for number in range(40)]
NEW = [picture(10_000 + number) for number in range(40)]


def mean_colours(prompts: list[PromptRecord], samples: list[Tensor]) -> Tensor:
    return torch.stack([sample.double().mean((1, 2)) for sample in samples])


def no_numbers(prompts: list[PromptRecord], samples: list[Tensor]) -> Tensor:
    return torch.full((len(samples), 2), torch.nan)


@pytest.fixture(scope="module")
def choices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return voted(tmp_path_factory.mktemp("votes"), 200, noise=0.2)


def test_the_reward_has_the_taste_of_the_voters(choices: Path) -> None:
    reward = VotesReward(choices=str(choices))
    found = reward(PROMPTS, NEW).values.numpy()
    truth = np.array([redness(sample) for sample in NEW])
    assert np.corrcoef(found, truth)[0, 1] > 0.8
    utility = reward._fitted.head.utility(pixel_features(PROMPTS, NEW).numpy())
    assert found == pytest.approx(1 / (1 + np.exp(-utility)), rel=1e-6)
    # A fifth of the choices was turned round.
    assert 0.7 < reward._fitted.head.accuracy < 0.9


def test_the_head_is_kept_beside_the_choices_and_used_again(choices: Path) -> None:
    first = VotesReward(choices=str(choices))(PROMPTS, NEW).values
    kept = choices.with_name("head.json")
    facts = json.loads(kept.read_text())
    assert facts["digest"] == choices_digest(read_choices(choices).standing)
    assert facts["head"]["decided"] == 200
    assert facts["head"]["accuracy"] == fitted_head(choices, "pixels").head.accuracy
    assert (VotesReward(head=str(kept))(PROMPTS, NEW).values == first).all()
    written = kept.stat().st_mtime_ns
    assert (VotesReward(choices=str(choices))(PROMPTS, NEW).values == first).all()
    assert kept.stat().st_mtime_ns == written


def test_another_choice_or_other_features_make_another_head(tmp_path: Path) -> None:
    file = voted(tmp_path, 20)
    before = fitted_head(file, "pixels")
    append_line(file, choice(save_pictures(tmp_path, 21), FIRST).line())
    after = fitted_head(file, "pixels")
    assert after.digest != before.digest
    assert after.head.choices == 21
    other = fitted_head(file, "tests.rewards.votes.test_votes_reward:mean_colours")
    assert len(other.head.weights) == 3
    assert read_head(tmp_path / "head.json").features == other.features
    with pytest.raises(
        UserError, match=r"was fitted to the features tests\..*, not to pixels\. Name those, if you know the code"
    ):
        VotesReward(head=str(tmp_path / "head.json")).check_machine()
    VotesReward(head=str(tmp_path / "head.json"), features=other.features, least=20, least_accuracy=0).check_machine()


def test_choices_on_edits_of_one_photo_are_held_out_together(tmp_path: Path) -> None:
    """Six pairs of the same pictures have votes that agree for no reason that a picture shows: only others tell."""
    generator = torch.Generator().manual_seed(3)
    for number in range(20):
        own, first = save_pictures(tmp_path, number), bool(torch.rand(1, generator=generator) < 0.5)
        for voter in range(6):
            of = replace(own, pair=f"{own.pair}, {voter}", prompt=f"edit {voter} of {own.prompt}")
            append_line(tmp_path / "choices.jsonl", choice(of, FIRST if first else SECOND, f"voter {voter}").line())
    assert fitted_head(tmp_path / "choices.jsonl", "pixels").head.accuracy < 0.75


def test_pictures_unlike_the_voted_ones_are_told(choices: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward = VotesReward(choices=str(choices))
    names = {name for own in read_choices(choices).standing for name in (own.of.first, own.of.second)}
    every = [to_tensor(read_image(choices.parent / name)) for name in sorted(names)]
    assert not reward(PROMPTS, every[:40]).parts["far"].any(), "none is further than the furthest of them"
    head = reward._fitted.head
    features = pixel_features([], every).numpy()
    assert head.reach == pytest.approx(np.sqrt((((features - head.mean) / head.scale) ** 2).mean(1)).max())
    noise = torch.randint(0, 256, (3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    checks = (torch.arange(32)[:, None] + torch.arange(32)) % 2 * 255
    unlike = [noise, checks.expand(3, 32, 32).to(torch.uint8)]
    caplog.clear()
    for _ in range(2):
        found = reward(PROMPTS[:2], unlike)
        assert found.parts["far"].tolist() == [1.0, 1.0]
    (said,) = caplog.messages
    assert "2 of 2 pictures are unlike every picture that was voted on" in said


def test_the_features_see_what_they_say() -> None:
    flat = torch.tensor([255, 0, 51], dtype=torch.uint8)[:, None, None].expand(3, 20, 30)
    found = pixel_features([PROMPTS[0]], [flat])[0]
    luma = 0.299 + 0.114 * 0.2
    assert len(found) == 61
    assert found[:16] == pytest.approx(1.0)
    assert found[32:48] == pytest.approx(0.2)
    assert found[48:].tolist() == pytest.approx([luma, 1, *[0] * 5, luma, luma, 1, 1, 0, 0], abs=1e-12)
    striped = torch.zeros(3, 4, 4, dtype=torch.uint8)
    striped[:, :, ::2] = 255
    # 12 of 24 neighbours differ by 1, in luma and not in chroma.
    assert pixel_features([PROMPTS[0]], [striped])[0][-2:].tolist() == pytest.approx([0.5, 0.0])


def test_too_few_choices_are_refused_with_their_number(tmp_path: Path) -> None:
    reward = VotesReward(choices=str(voted(tmp_path, 30)), least=50)
    for act in (reward.check_machine, lambda: reward(PROMPTS, NEW)):
        with pytest.raises(UserError, match=r"30 choices, with 30 decided pairs .*at least 50"):
            act()
    held_out = VotesReward(choices=str(voted(tmp_path / "other", 60, source="ab")))
    with pytest.raises(UserError, match="60 choices, with 0 decided pairs for training"):
        held_out.check_machine()
    file = voted(tmp_path / "agreed", 10)
    for own in read_choices(file).standing:
        for voter in range(5):
            append_line(file, choice(own.of, own.choice, f"voter {voter}").line())
    with pytest.raises(UserError, match="60 choices, with 10 decided pairs"):
        VotesReward(choices=str(file)).check_machine()
    fitted_head(file, "pixels")
    with pytest.raises(UserError, match="was fitted to 10 decided pairs; at least 50"):
        VotesReward(head=str(file.with_name("head.json"))).check_machine()


def test_choices_that_cannot_be_predicted_are_refused_with_the_accuracy(tmp_path: Path) -> None:
    file = voted(tmp_path, 50, noise=0.5)
    with pytest.raises(UserError, match=r"of 50 choices that were held out only \d+% are predicted"):
        VotesReward(choices=str(file), least_accuracy=0.8)(PROMPTS, NEW)
    with pytest.raises(UserError, match="are predicted"):
        VotesReward(head=str(tmp_path / "head.json"), least_accuracy=0.8).check_machine()


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    damaged = tmp_path / "head.json"
    damaged.write_text('{"format": 1, "head": {}}')
    missing = str(tmp_path / "none")
    for reward, message in (
        (VotesReward(choices=missing), r"the file of choices .* does not exist. Choose first"),
        (VotesReward(head=missing), "the head .* does not exist"),
        (VotesReward(head=str(damaged)), r"cannot be read .*Delete it"),
    ):
        with pytest.raises(UserError, match=message):
            reward.check_machine()
    for name, message in (("no_numbers", "not finite"), ("PROMPTS", "must be callable"), ("nothing", "has no")):
        with pytest.raises(UserError, match=message):
            load_features(f"tests.rewards.votes.test_votes_reward:{name}")(PROMPTS[:1], NEW[:1])


def test_scores_within_families() -> None:
    said = [choice(pair(0, "a dog", family="dogs"), FIRST) for _ in range(3)]
    said += [choice(pair(1, "a cat", family="cats"), "tie"), choice(pair(2, "a cow", family="cows"), "skip")]
    table = family_scores(said)
    assert table["family"].tolist() == ["dogs", "dogs", "cats", "cats"]
    assert table["picture"].tolist()[:2] == ["pictures/0.png", "pictures/1.png"]
    assert table["choices"].tolist() == [3, 3, 1, 1]
    assert table["score"][0] == -table["score"][1] > 0
    assert table["score"][2] == pytest.approx(0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "votes" / "choices.jsonl"


def test_what_is_appended_is_read(file: Path) -> None:
    said = [choice(pair(1), FIRST), choice(pair(2, prompt='a "犬"\n'), TIE), choice(pair(1), SECOND, voter="bo")]
    assert read_choices(file).standing == ()
    for own in said:
        append_line(file, own.line())
    assert list(read_choices(file).standing) == said
    assert [own.preference for own in said] == [1.0, 0.5, 0.0]
    assert choice(pair(1), SKIP).preference is None


def test_a_choice_between_identical_pictures_teaches_nothing() -> None:
    same = replace(pair(1), second=pair(1).first)
    assert decided_pairs([choice(pair(2), FIRST), choice(same, FIRST)]) == 1


def test_the_last_word_of_each_voter_counts_and_can_be_taken_back(file: Path) -> None:
    lines = [choice(pair(1), FIRST).line(), choice(pair(1), SECOND, voter="bo").line()]
    lines += [{"voter": "ann", "choice": UNDO, "pair": name, "at": AT} for name in ("pair1", "pair9")]
    lines += [choice(pair(2), said).line() for said in (FIRST, SKIP)]
    for line in lines:
        append_line(file, line)
    found = [(own.voter, own.of.pair, own.choice) for own in read_choices(file).standing]
    assert found == [("bo", "pair1", SECOND), ("ann", "pair2", SKIP)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"voter": "ann", "cho', "Unterminated string"),
        (b"\xff\xfe", "Expecting value"),
        (b"[1, 2]", "no JSON object"),
        (b'{"voter": "ann", "choice": "first"}', "without pair"),
        (b'{"voter": "ann", "choice": "left", "pair": "pair1"}', "choice is none of"),
        (b'{"voter": 3, "choice": "first", "pair": "pair1"}', "must be texts"),
        (json.dumps(choice(pair(1), FIRST).line() | {"first": 7}).encode(), "first must be a text"),
    ],
)
@pytest.mark.parametrize("end", [b"\n", b""], ids=["whole", "cut off"])
def test_a_damaged_line_is_named_and_the_others_count(file: Path, text: bytes, why: str, end: bytes) -> None:
    append_line(file, choice(pair(1), FIRST).line())
    with file.open("ab") as stream:
        stream.write(text + end)
    append_line(file, choice(pair(2), FIRST).line())
    found = read_choices(file)
    assert [own.of.pair for own in found.standing] == ["pair1", "pair2"]
    (damaged,) = found.damaged
    assert damaged.startswith("line 2 (")
    assert why in damaged
