"""The page's server over real HTTP."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.rewards.votes.voters import Browser, ballot, save_pictures
from visual_grpo.common.errors import UserError
from visual_grpo.rewards.votes.choices import Ballot, read_choices
from visual_grpo.rewards.votes.server import served

JSON = {"Content-Type": "application/json"}
CHOICE = b'{"voter": "ann", "pair": "pair0", "choice": "left"}'


@pytest.fixture
def votes(tmp_path: Path) -> Ballot:
    return ballot(tmp_path, 12)


@pytest.fixture
def browser(votes: Ballot) -> Iterator[Browser]:
    with served(votes, "ann") as url:
        yield Browser(url)


def stored(votes: Ballot) -> list[tuple[str, str, str]]:
    return [(own.voter, own.of.pair, own.choice) for own in read_choices(votes.file).standing]


def test_the_page_needs_nothing_else_and_lets_only_its_own_script_run(browser: Browser) -> None:
    response, content = browser.send("GET", "")
    page, policy = content.decode(), response.headers["Content-Security-Policy"]
    assert re.findall(r"(?:src|href)=\"(.*?)\"", page) == ["data:,", "vote.css", "vote.js"]
    assert "://" not in page
    assert "default-src 'none'; script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["Referrer-Policy"] == "no-referrer"
    assert response.headers["Cache-Control"] == "no-store"


def test_a_choice_is_stored_at_once_with_the_picture_that_was_meant(votes: Ballot, browser: Browser) -> None:
    sides = set()
    for said in ("left", "right", "tie", *["left"] * 4, *["right"] * 4):
        state = browser.get("state")
        own = votes.pairs[state["pair"]]
        first_is_left = state["left"] == Path(own.first).name
        assert state["right" if first_is_left else "left"] == Path(own.second).name
        after = browser.post("choice", voter="ann", pair=state["pair"], choice=said)
        assert after["pair"] != state["pair"]
        meant = "tie" if said == "tie" else "first" if first_is_left == (said == "left") else "second"
        assert stored(votes)[-1] == ("ann", own.pair, meant)
        sides.add((said, first_is_left))
    assert after["judged"] == 11
    assert sides >= {(said, side) for said in ("left", "right") for side in (True, False)}


def test_pictures_are_those_of_the_pairs_and_no_other_file(browser: Browser, tmp_path: Path) -> None:
    state = browser.get("state")
    response, content = browser.send("GET", f"picture/{state['left']}")
    assert response.headers["Content-Type"] == "image/png"
    assert content == (tmp_path / "pictures" / state["left"]).read_bytes()
    (tmp_path / "secret.png").write_bytes(b"x")
    (tmp_path / "pictures/other.png").write_bytes(b"x")
    for path in ("picture/../secret.png", "picture/other.png", "picture/", "picture/..%2f..%2fsecret.png", "x"):
        assert browser.send("GET", path)[0].status == 404


def test_a_second_click_on_a_pair_is_refused_and_stored_once(votes: Ballot, browser: Browser) -> None:
    pair = browser.get("state")["pair"]

    def click(said: str) -> int:
        body = f'{{"voter": "ann", "pair": "{pair}", "choice": "{said}"}}'.encode()
        return browser.send("POST", "choice", body, JSON)[0].status

    with ThreadPoolExecutor(6) as pool:
        statuses = list(pool.map(click, ["left", "right"] * 3))
    assert sorted(statuses) == [200, 409, 409, 409, 409, 409]
    assert len(votes.file.read_text().splitlines()) == 1


def test_without_the_secret_path_nothing_is_shown_or_stored(votes: Ballot, browser: Browser) -> None:
    for base in ("/", "/wrong/", f"{browser.base[:-2]}/"):
        assert browser.send("GET", f"{base}state")[0].status == 404
        assert browser.send("POST", f"{base}choice", CHOICE, JSON)[0].status == 404
    elsewhere = {"Host": "evil.example", **JSON}
    assert browser.send("GET", "state", headers=elsewhere)[0].status == 400
    assert browser.send("POST", "choice", CHOICE, elsewhere)[0].status == 400
    assert not votes.file.exists()


def test_a_malformed_choice_is_refused(votes: Ballot, browser: Browser) -> None:
    malformed = [b"{", b"[]", b"{}", CHOICE.replace(b'"ann"', b"1")]
    impossible = [CHOICE.replace(b"left", b"best"), CHOICE.replace(b"pair0", b"pair99")]
    impossible += [CHOICE.replace(b"ann", name) for name in (b"", b"a\\u001b[2J", b"a" * 61)]
    for status, bodies in ((422, malformed), (409, impossible)):
        assert [browser.send("POST", "choice", body, JSON)[0].status for body in bodies] == [status] * len(bodies)
    assert not votes.file.exists()
    assert browser.get("state")["judged"] == 0


def test_who_goes_on_later_sees_the_same_order_and_sides(tmp_path: Path) -> None:
    once, states = ballot(tmp_path / "once", 8), []
    for _ in range(8):
        again = ballot(tmp_path / "again", 8)
        state = again.state("ann")
        assert state == once.state("ann")
        for running in (once, again):
            running.choose("ann", state["pair"], "skip")
        states.append(state)
    assert once.pending("ann") == []
    sides = [state["left"] == f"{2 * int(state['pair'][4:])}.png" for state in states]
    assert 0 < sum(sides) < 8
    assert [state["pair"] for state in states] != [f"pair{number}" for number in range(8)]
    other = ballot(tmp_path / "seed", 8, seed=1)
    assert other.state("ann") != states[0] or other.state("bo") != states[0]


def test_several_voters_at_once_lose_nothing(votes: Ballot, browser: Browser) -> None:
    names = ["ann", "bo", "Zoë", "dee"]

    def vote(name: str) -> None:
        for _ in range(9):
            pair = browser.get(f"state?voter={quote(name)}")["pair"]
            browser.post("choice", voter=name, pair=pair, choice="tie")
        browser.post("undo", voter=name)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(vote, names))
    assert not votes.finished.is_set()
    assert {name: votes.state(name)["judged"] for name in names} == dict.fromkeys(names, 8)
    found = read_choices(votes.file)
    assert (len(found.standing), found.damaged) == (32, ())


def test_it_is_over_when_everybody_who_chose_has_judged_all(tmp_path: Path) -> None:
    running = ballot(tmp_path, 2)
    for voter, pair in (("bo", "pair0"), ("ann", "pair0"), ("ann", "pair1")):
        running.choose(voter, pair, "left")
    assert not running.finished.is_set()
    assert running.choose("bo", "pair1", "skip")["pair"] is None
    assert running.finished.is_set()


def test_the_button_finishes_and_the_server_leaves_no_thread(votes: Ballot) -> None:
    before = threading.active_count()
    with served(votes, "ann") as url:
        browser = Browser(url)
        assert browser.post("finish") == {"finished": True}
        assert votes.finished.is_set()
    assert threading.active_count() <= before
    with pytest.raises(ConnectionError):
        browser.send("GET", "")


def test_a_client_that_stalls_does_not_keep_the_page(votes: Ballot, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as client, served(votes, "ann") as url:
        browser = Browser(url)
        client.connect(("127.0.0.1", browser.port))
        client.sendall(f"POST {browser.base}choice HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{{".encode())
        browser.get("state")
        gives_up = threading.Timer(10, client.shutdown, [socket.SHUT_RDWR])
        gives_up.start()
        ended = time.monotonic()
    gives_up.cancel()
    assert time.monotonic() - ended < 8
    assert capfd.readouterr() == ("", "")


def test_a_full_disk_is_told(votes: Ballot, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = browser.get("state")["pair"]

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        error = browser.post("choice", 507, voter="ann", pair=pair, choice="left")["error"]
    assert error == "the choice was not stored: No space left on device"
    assert stored(votes) == []
    assert browser.get("state")["pair"] == pair
    browser.post("choice", voter="ann", pair=pair, choice="left")
    assert len(stored(votes)) == 1


def test_a_port_that_is_taken_is_named(votes: Ballot, browser: Browser) -> None:
    taken = served(votes, "ann", browser.port or 0)
    with pytest.raises(UserError, match=rf"vote\.port {browser.port} cannot be used"), taken:
        pass


def test_identical_pairs_are_ties_as_soon_as_their_turn_has_passed(tmp_path: Path) -> None:
    pairs = [save_pictures(tmp_path, number) for number in range(40)]
    pairs[::2] = [replace(own, second=own.first) for own in pairs[::2]]
    votes, ties = Ballot(pairs, tmp_path / "choices.jsonl", 0), []
    for _ in range(20):
        ties.append(len([own for own in votes.standing() if own.of.is_identical]))
        votes.choose("ann", votes.state("ann")["pair"], "left")
    assert ties == sorted(ties)
    assert ties[0] == 0
    assert 5 < ties[10] < 15
    assert len(votes.standing()) == 40
