"""The vote pipeline with a painter in the place of a model, and voters at its page."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pandas as pd
import pytest
import torch

from tests.evaluation.defaults import parameters
from tests.evaluation.painter import Painter
from tests.pipelines.painted import BRIGHTNESS, STARTER_REPORT, Project
from tests.rewards.votes.voters import Browser, picture
from visual_grpo.common import console
from visual_grpo.common.digests import content_digest
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.common.images import read_image, to_pil, to_tensor
from visual_grpo.data.manifest import RecordTable
from visual_grpo.evaluation.pictures import GAP, WIDTH
from visual_grpo.evaluation.samples import image_seed
from visual_grpo.models.run_spec import resolve
from visual_grpo.operations.vote_pairs import find_pairs
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.pipelines.generate import generate_for_prompts
from visual_grpo.pipelines.score import score_folder
from visual_grpo.rewards.votes.choices import read_choices
from visual_grpo.rewards.votes.head import pixel_features
from visual_grpo.rewards.votes.votes_reward import read_head


class Voter(threading.Thread):
    """Prefers the brighter picture; ends with ``last``."""

    def __init__(self, choices: int, last: Callable[[Browser], Any] | None = None) -> None:
        super().__init__()
        self.choices, self.last = choices, last
        self.browser = Browser("http://127.0.0.1:1/")  # Until the page is there.
        self.errors: list[BaseException] = []

    def run(self) -> None:
        try:
            for _ in range(self.choices):
                state = self.browser.get("state")
                light = [self._light(state[side]) for side in ("left", "right")]
                said = "left" if light[0] > light[1] else "right"
                self.browser.post("choice", voter="me", pair=state["pair"], choice=said)
            if self.last is not None:
                self.last(self.browser)
        except BaseException as error:  # Of a thread: shown by the test, and the pipeline must not wait for it.
            self.errors.append(error)
            self.browser.post("finish")

    def _light(self, name: str) -> float:
        response, content = self.browser.send("GET", f"picture/{name}")
        assert response.status == 200
        return float(to_tensor(read_image(io.BytesIO(content))).float().mean())


def finish(browser: Browser) -> None:
    browser.post("finish")


@contextmanager
def voting(voter: Voter, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lets ``voter`` begin when the page's address is printed; gives what was printed."""
    said: list[str] = []
    note = console.note

    def hear(text: str) -> None:
        said.append(text)
        note(text)
        if re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", text):
            voter.browser = Browser(text)
            voter.start()

    with monkeypatch.context() as patch:
        patch.setattr(console, "note", hear)
        yield said
    if voter.ident is not None:
        voter.join()
    assert not voter.errors


def vote(
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
    voter: Voter | None = None,
    **settings: Any,
) -> tuple[Path, list[str]]:
    settings = {"choices": str(project.folder / "raw/choices.jsonl"), "open_browser": False, **settings}
    (project.folder / "model").mkdir(exist_ok=True)
    with voting(voter or Voter(0, finish), monkeypatch) as said:
        catalog = project.run(
            register_pipelines()["vote"],
            vote=settings,
            base_model=STARTER_REPORT,
            model={"device": "cpu", "path": str(project.folder / "model")},
        )
    return catalog.load("votes"), said


def test_choices_between_the_models_samples_become_a_reward(painted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    painted.prepare(train=8)
    folder, said = vote(painted, monkeypatch, Voter(50), pairs=50)
    file = painted.folder / "raw/choices.jsonl"
    standing = read_choices(file).standing
    assert len(standing) == 50
    assert len({own.of.record for own in standing}) == 8
    assert all(own.of.record.startswith("train") for own in standing)
    assert {own.shown_left for own in standing} == {"first", "second"}
    head = read_head(file.with_name("head.json")).head
    assert head.accuracy > 0.8
    light = to_tensor(to_pil(torch.full((3, 32, 32), 200, dtype=torch.uint8)))
    pair = pixel_features([], [light // 2, light]).numpy()
    assert head.utility(pair)[1] > head.utility(pair)[0]
    assert any("of 50 choices that were held out are predicted" in line for line in said)
    assert len(pd.read_csv(folder / "choices.csv")) == 50
    scores = pd.read_csv(folder / "scores.csv")
    assert scores.groupby("family")["score"].sum().abs().max() < 1e-6


def test_the_browsers_arguments_do_not_tell_the_secret_address(
    painted: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    painted.prepare(train=1)
    opened: list[tuple[Path, str, int]] = []

    def note(address: str) -> None:
        door = Path(urlsplit(address).path)
        opened.append((door, door.read_text(encoding="utf-8"), door.stat().st_mode & 0o777))

    monkeypatch.setattr(webbrowser, "open", note)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("DISPLAY", ":0")
    _, said = vote(painted, monkeypatch, pairs=1, open_browser=True)
    [(door, content, mode)] = opened
    [address] = [line for line in said if line.startswith("http://")]
    assert address in content
    assert mode == 0o600
    assert not door.exists()


def test_an_interrupted_vote_goes_on(painted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    painted.prepare(train=3)
    batches: list[int] = []
    generate = Painter.generate

    def counted(self: Painter, prompts: Any, *rest: Any) -> Any:
        batches.append(len(prompts))
        return generate(self, prompts, *rest)

    monkeypatch.setattr(Painter, "generate", counted)
    _, said = vote(painted, monkeypatch, Voter(2, lambda _: os.kill(os.getpid(), signal.SIGINT)), pairs=5)
    assert "Stopping; every choice is stored." in said
    assert sum(batches) == 10
    file = painted.folder / "raw/choices.jsonl"
    first = [own.of.pair for own in read_choices(file).standing]
    with file.open("ab") as stream:
        stream.write(b'{"voter": "me", "cho')
    _, said = vote(painted, monkeypatch, Voter(3), pairs=5)
    assert any("a line cannot be read and is ignored" in line for line in said)
    assert any("3 pairs to judge" in line for line in said)
    assert sum(batches) == 10
    standing = [own.of.pair for own in read_choices(file).standing]
    assert standing[:2] == first
    assert len(set(standing)) == 5
    _, said = vote(painted, monkeypatch, pairs=5)
    assert any("All 5 pairs are judged (voter: me)" in line for line in said)
    vote(painted, monkeypatch, Voter(1, finish), pairs=7)
    assert sum(batches) == 14
    vote(painted, monkeypatch, pairs=5, seed=1)
    assert sum(batches) == 24


def test_pairs_of_earlier_versions_keep_their_names_where_they_are_sampled_alike(painted: Project) -> None:
    painted.prepare(train=1)
    base = parameters(sampling={"rollout": {"temperature": 1.0, "top_p": 1.0, "top_k": 0}}, vote={"pairs": 1})
    spec, file = resolve(base), painted.folder / "raw/choices.jsonl"
    records = RecordTable(painted.folder / "records.parquet")
    [pair] = find_pairs(spec, records, file, painted.folder, (painted.folder, painted.folder))
    [record] = records.split("train")
    named = {
        "model": [spec.config.model.path, content_digest(spec.config.model.path)],
        "adapters": None,
        "sampler": base.sampling.rollout.model_dump(mode="json"),
        "size": [base.data.height, base.data.width],
        "record": record.id,
        "prompt": record.prompt,
        "seeds": [image_seed(base.vote.seed, record.id, side) for side in (0, 1)],
    }
    assert pair.pair == hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]


def test_a_folder_of_generate_can_be_judged(painted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = painted.folder / "generated"
    folder.mkdir()
    rows, cat = [], "cat\u2028on a mat"  # A line of a text, and none of a file.
    for number in range(9):
        to_pil(picture(min(number, 7))).save(folder / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "text": cat if number < 4 else "dog" if number < 7 else "twin"})
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "metadata.jsonl").write_text(lines, encoding="utf-8")
    _, said = vote(painted, monkeypatch, Voter(3), source=str(folder))
    assert "The two pictures are identical in 1 of 4 pairs, left out: they teach nothing." in said
    standing = read_choices(painted.folder / "raw/choices.jsonl").standing
    assert sorted(own.of.prompt for own in standing) == [cat, cat, "dog"]
    with pytest.raises(UserError, match=r"and .*none has no metadata\.jsonl") as missing:
        vote(painted, monkeypatch, source=str(painted.folder / "none"))
    assert missing.value.remedy == Remedy("vote", {"vote.source": "draw"})
    with pytest.raises(UserError, match="keep choices with the data"):
        vote(painted, monkeypatch, choices=str(painted.folder / "votes/choices.jsonl"))
    shutil.copy(folder / "0.png", painted.folder / "private.png")
    (folder / "link.png").symlink_to(painted.folder / "private.png")
    for name in ("../private.png", "link.png"):
        (folder / "metadata.jsonl").write_text(f'{{"file_name": "{name}", "text": "cat"}}\n' * 2)
        with pytest.raises(UserError, match="Expected an ordinary file in this folder"):
            vote(painted, monkeypatch, source=str(folder))
    (folder / "metadata.jsonl").write_text('{"file_name": "0.png", "text": "cat"}\n')
    with pytest.raises(UserError, match="no prompt with two pictures"):
        vote(painted, monkeypatch, source=str(folder))


def test_edits_of_generate_are_paired_by_record_and_shown_with_their_sources(
    painted: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One instruction for two pictures, whose samples are neither paired with each other nor held out together."""
    lines = []
    (painted.folder / "edits").mkdir()
    for number, name in enumerate(("car", "dog")):
        to_pil(picture(number, side=64)).save(painted.folder / f"edits/{name}.png")
        lines.append(json.dumps({"id": name, "prompt": "make it red", "source_image": f"{name}.png"}))
    (painted.folder / "edits/records.jsonl").write_text("\n".join(lines))
    config = parameters(
        data={"task": "i2i", "path": str(painted.folder / "edits"), "height": 64, "width": 64},
        generate={"prompts": str(painted.folder / "edits"), "samples": 3},
        model={"path": "saved"},
        adapter="none",
    )
    folder = painted.folder / "generated"
    folder.mkdir()
    generate_for_prompts(replace(resolve(parameters()), config=config), painted.folder, painted.folder / "none", folder)
    pictures: dict[str, list[bytes]] = {}
    for line in (folder / "metadata.jsonl").read_text().splitlines():
        row = json.loads(line)
        pictures.setdefault(row["record"], []).append(read_image(folder / row["file_name"]).tobytes())
    vote(painted, monkeypatch, Voter(2), source=str(folder))
    file = painted.folder / "raw/choices.jsonl"
    pairs = {choice.of.record: choice.of for choice in read_choices(file).standing}
    assert len({pair.unit for pair in pairs.values()}) == 2
    for number, name in enumerate(("car", "dog")):
        first, second, source = (
            read_image(file.parent / each).tobytes()
            for each in (pairs[name].first, pairs[name].second, *pairs[name].sources)
        )
        assert [first, second] == pictures[name][:2]
        assert source == to_pil(picture(number, side=64)).tobytes()
    # score reads the folder, too: an edit without its source is rejected.
    scored = parameters(data=config.data.model_dump(), score={"path": str(folder)}, rewards=BRIGHTNESS)
    scores = score_folder(scored, painted.folder)
    assert len(pd.read_csv(scores / "scores.csv")) == 6
    contacts, best = (read_image(file).width - GAP for file in (folder / "contact_sheet.png", scores / "sheet.png"))
    assert contacts == 4 * (WIDTH + GAP), "three edits beside their source"
    assert best > 5 * (WIDTH + GAP), "five edits, and sources beside them"
    (folder / "metadata.jsonl").write_text('{"file_name": "1.png", "text": "make it red", "source_images": ["a.png"]}')
    with pytest.raises(UserError, match=r"metadata.jsonl as .*; line 1 cannot be read \(without record\)"):
        vote(painted, monkeypatch, source=str(folder))


def test_the_trained_model_is_judged_blind(painted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"vote\.source=ab compares .*baseline"):
        vote(painted, monkeypatch, source="ab")
    painted.run(register_pipelines()["baseline"])
    painted.train()
    painted.run(register_pipelines()["evaluate"])
    folder, said = vote(painted, monkeypatch, Voter(6), source="ab")
    found = json.loads((folder / "ab.json").read_text())
    # The trained painter's pictures are the brighter ones, of three held-out prompts with two samples each.
    assert (found["mean_share"], found["choices"], found["prompts"], found["verdict"]) == (1.0, 6, 3, "not shown")
    assert found["ci_low"] == pytest.approx(0.025 ** (1 / 3))
    [line] = [line for line in said if "is preferred in 100% (mean over 3 held-out prompts; 6 choices by" in line]
    assert line.endswith("not shown. Fewer than 10 independent prompts are too few to rely on the interval.")
    table = pd.read_csv(folder / "ab.csv")
    assert (table["trained"] == 1).all()
    # They stay when the samples are drawn again, and teach no reward.
    standing = read_choices(painted.folder / "raw/choices.jsonl").standing
    assert {own.choice for own in standing} == {"second"}
    assert all((painted.folder / "raw" / own.of.first).is_file() for own in standing)
    assert any("0 decided pairs" in line for line in vote(painted, monkeypatch, Voter(0, finish))[1])
    assert table["record"].str.startswith("held_out").all()
    # A catalog may keep them elsewhere.
    trained = (painted.folder / "trained").rename(painted.folder / "on a larger disk")
    spec = replace(resolve(parameters()), config=parameters(vote={"source": "ab"}))
    records, sides = RecordTable(painted.folder / "records.parquet"), (painted.folder / "baseline", trained)
    moved = find_pairs(spec, records, painted.folder / "raw/choices.jsonl", painted.folder, sides)
    assert {pair.pair for pair in moved} == set(table["pair"])


def test_identical_pictures_are_ties_that_nobody_is_asked_about(
    painted: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    painted.run(register_pipelines()["baseline"])
    painted.train()
    painted.run(register_pipelines()["evaluate"])
    for file in sorted((painted.folder / "trained/eval").glob("held_out-00*.png")):
        shutil.copy(painted.folder / "baseline/eval" / file.name, file)
    folder, said = vote(painted, monkeypatch, Voter(4), source="ab")
    assert "The two pictures are identical in 2 of 6 pairs, counted as ties, without asking." in said
    found = json.loads((folder / "ab.json").read_text())
    assert (found["choices"], found["ties"], found["mean_share"]) == (6, 2, pytest.approx(5 / 6))
    assert len(read_choices(painted.folder / "raw/choices.jsonl").standing) == 4
