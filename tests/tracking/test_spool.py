"""The spool on disk: what a kill or a full disk leaves of it."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from visual_grpo.tracking.outbox import Outbox, lock, outboxes
from visual_grpo.tracking.spool import JOURNAL, Head, Spool
from visual_grpo.tracking.store import shown_server

HEAD = Head(run="a" * 32, name="n", experiment="e", artifacts=None, server="s", began=1)


def values(outbox: Outbox) -> list[int]:
    return [event["step"] for _, event in outbox.waiting()]


def test_a_line_that_a_kill_cut_off_is_none_and_those_before_it_count(tmp_path: Path) -> None:
    spool = Spool(tmp_path, HEAD)
    for step in (1, 2, 3):
        spool.append("curves", values={"a": 0.1 + 0.2}, step=step)
    whole = (spool.folder / JOURNAL).read_bytes()
    for size in range(len(whole) + 1):
        (spool.folder / JOURNAL).write_bytes(whole[:size])
        found = list(Outbox(spool.folder).waiting())
        assert len(found) == whole[:size].count(b"\n")
        assert all(event["values"] == {"a": 0.1 + 0.2} for _, event in found)
    spool.close()


def test_a_damaged_line_is_left_out_and_the_others_arrive(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spool = Spool(tmp_path, HEAD)
    for step in (1, 2, 3):
        spool.append("curves", step=step)
    lines = (spool.folder / JOURNAL).read_bytes().splitlines(keepends=True)
    (spool.folder / JOURNAL).write_bytes(lines[0] + b"\x00" + lines[1][1:] + lines[2])
    outbox = Outbox(spool.folder)
    assert values(outbox) == [1, 3]
    assert "A damaged line" in caplog.text
    outbox.delivered(next(iter(outbox.waiting()))[0])
    assert values(Outbox(spool.folder)) == [3]
    spool.close()


def test_a_damaged_spool_is_named_and_does_not_stop_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = Spool(tmp_path, HEAD), Spool(tmp_path, HEAD)
    (broken.folder / "run.json").write_text('{"run": ')
    assert [outbox.folder for outbox in outboxes(tmp_path)] == [whole.folder]
    assert f"{broken.folder} is damaged" in caplog.text
    broken.close()
    whole.close()


def test_a_spool_is_locked_while_its_process_lives(tmp_path: Path) -> None:
    spool = Spool(tmp_path, HEAD)
    outbox = Outbox(spool.folder)
    assert lock(outbox) is None
    spool.close()
    journal = lock(outbox)
    assert journal is not None
    assert lock(outbox) is None
    journal.close()


def test_events_of_several_threads_are_whole_lines(tmp_path: Path) -> None:
    spool = Spool(tmp_path, HEAD)

    def write(first: int) -> None:
        for step in range(first, first + 200):
            spool.append("curves", values={"x" * 500: 1.0}, step=step)

    threads = [threading.Thread(target=write, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [1000 * number + step for number in range(4) for step in range(200)]
    assert sorted(values(Outbox(spool.folder))) == expected
    spool.close()


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can grow beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_what_does_not_fit_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spool = Spool(tmp_path / "spools", HEAD)
    (tmp_path / "source").mkdir()
    spool.append("curves", step=1)
    size = (spool.folder / JOURNAL).stat().st_size
    with full_disk(size + 20):
        spool.append("curves", step=2)
        spool.append("curves", step=3)
        assert spool.attach_bytes(b"x" * 1000, "images/a.png") is None
    spool.append("curves", step=4)
    assert values(Outbox(spool.folder)) == [1, 4]
    assert len(caplog.records) == 1
    assert "The run goes on" in caplog.text
    assert not list((spool.folder / "files").iterdir())
    spool.close()


def test_a_folder_is_linked_and_a_later_replacement_does_not_change_it(tmp_path: Path) -> None:
    source = tmp_path / "adapters"
    (source / "ar").mkdir(parents=True)
    (source / "ar/weights").write_bytes(b"first")
    spool = Spool(tmp_path / "spools", HEAD)
    place = spool.attach(source)
    assert place is not None
    kept = spool.folder / place / "ar/weights"
    assert kept.samefile(source / "ar/weights")
    source.rename(tmp_path / "previous")
    source.mkdir()
    assert kept.read_bytes() == b"first"
    spool.close()


def test_no_password_is_shown_and_a_database_in_the_project_moves_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_server("https://user:secret@host:1/path?token=secret") == "https://host:1/path"
    assert shown_server(f"sqlite:///{tmp_path / 'mlflow.db'}") == "sqlite:///mlflow.db"
    assert shown_server("sqlite:////elsewhere/mlflow.db") == "sqlite:////elsewhere/mlflow.db"


def test_what_waits_is_told_in_words(tmp_path: Path) -> None:
    spool = Spool(tmp_path, HEAD)
    assert str(Outbox(spool.folder)) == "nothing"
    spool.append("curves", values={"a": 1.0, "b": 2.0}, step=1)
    spool.append("artifacts", files="files/1", to="")
    spool.append("end", status="FINISHED")
    assert str(Outbox(spool.folder)) == "2 metric values, 1 artifact, 1 note"
    assert json.loads((spool.folder / "run.json").read_text())["run"] == "a" * 32
    spool.close()
