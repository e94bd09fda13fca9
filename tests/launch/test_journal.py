"""The journal of a driver: what it keeps, and reports after the driver is gone."""

import contextlib
import json
import os
import re
import shutil
import sqlite3
import threading

import pytest

from mjax.launch import __main__ as command
from mjax.launch.client import write_private
from mjax.launch.events import Event
from mjax.launch.journal import Journal, read_events


def write(work_dir, *events):
    """Write a journal and the files that a driver has left; nothing listens."""
    journal = Journal(work_dir)
    for generation, (kind, text, data) in enumerate(events):
        journal.record(Event(kind=kind, text=text, data=data), generation)
    journal.close()
    write_private(work_dir / "launch" / "address.json", '["127.0.0.1", 1]')
    write_private(work_dir / "launch" / "token", "secret")


BEGIN = ("launch", "a driver has begun", {})
FAILURE = ("failure", "rank 0 ended with 2; the last lines of its log:\nerror: x", {})


def end(code):
    return ("end", f"the run ended with {code}", {"code": code})


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([BEGIN, ("state", "running", {}), end(0)], "0, in generation 2"),
        (
            [BEGIN, ("stop", "asked to stop", {}), FAILURE, end(42)],
            "42 (asked to stop), in generation 3",
        ),
        (
            [BEGIN, FAILURE, ("gave_up", "gave up: 3 in a row", {}), end(93)],
            "93 (gave up: 3 in a row), in generation 3",
        ),
        ([BEGIN, FAILURE, end(2)], "2 (rank 0 ended with 2), in generation 2"),
        ([BEGIN, FAILURE, end(1), BEGIN, end(42)], "42, in generation 4"),
    ],
)
def test_the_status_of_an_ended_run_says_how_and_when(tmp_path, capsys, events, said):
    write(tmp_path, *events)
    assert command.main(["status", "--work-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    start = f"{re.escape(str(tmp_path))}: the run ended at {time} with exit code "
    assert re.match(start + re.escape(said), out), out


def test_a_command_for_an_ended_run_is_answered_with_its_end(tmp_path, capsys):
    """No matter who listens where its driver did."""
    write(tmp_path, BEGIN, FAILURE, end(93))
    assert command.main(["stop", "--work-dir", str(tmp_path)]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith(f"error: {tmp_path}: the run ended at ")
    assert "93 (rank 0 ended with 2)" in refused


def test_a_run_whose_driver_was_killed_has_not_ended(tmp_path, capsys):
    write(tmp_path, BEGIN, end(42), BEGIN, ("state", "running", {}))
    assert command.main(["status", "--work-dir", str(tmp_path)]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith("error: no driver answers at 127.0.0.1:1 (")
    assert "the journal records no end of the run" in refused
    assert "repeat the command that started the launch" in refused


def event(text):
    return Event(kind="log", text=text, host="a", data={"rule": "Xid"})


def texts(work_dir):
    """Return the texts of all events, which both files must have."""
    lines = (work_dir / "events.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    assert [one["number"] for one in told] == [*range(1, len(told) + 1)]
    in_base = [one["text"] for one in read_events(work_dir)]
    assert [one["text"] for one in told] == in_base
    return in_base


class Opened:
    """An open journal that records what it reports."""

    def __init__(self, work_dir):
        self.journal = Journal(work_dir)
        self.problems, self.changed = [], threading.Event()
        self.journal.on_problem = self.take

    def take(self, problem):
        self.problems.append(problem)
        self.changed.set()

    def wait_for_report(self):
        assert self.changed.wait(30)
        self.changed.clear()
        return self.problems[-1]


def test_a_locked_journal_keeps_nobody_waiting_and_loses_nothing(tmp_path):
    opened = Opened(tmp_path)
    assert opened.journal.flush()
    sent = []
    with contextlib.closing(
        sqlite3.connect(opened.journal.path, isolation_level=None)
    ) as other:
        other.execute("begin immediate")
        for number in range(3):
            opened.journal.record(event(f"event {number}"), 1)
            opened.journal.set_fact("snapshot", number)
            opened.journal.when_saved(lambda number=number: sent.append(number))
        opened.journal.when_saved(lambda: sent.append("in vain"), 0.0)
        assert "database is locked" in opened.wait_for_report()
        opened.journal.deliver()
        assert sent == []
        assert opened.journal.holds
        other.execute("rollback")
    assert opened.wait_for_report() == ""
    assert opened.journal.flush()
    opened.journal.deliver()
    assert sent == [0, 1, 2, "in vain"]  # nothing overtakes
    opened.journal.when_saved(lambda: sent.append(3))
    assert sent[-1] == 3
    assert opened.journal.close()
    assert texts(tmp_path) == ["event 0", "event 1", "event 2"]
    assert Journal(tmp_path).fact("snapshot") == 2


def test_an_order_that_need_not_be_saved_waits_only_a_little(tmp_path):
    opened, sent = Opened(tmp_path), []
    assert opened.journal.flush()
    with contextlib.closing(
        sqlite3.connect(opened.journal.path, isolation_level=None)
    ) as other:
        other.execute("begin immediate")
        opened.journal.record(event("stop"), 1)
        opened.journal.when_saved(lambda: sent.append("stop"), 0.0)
        opened.journal.when_saved(lambda: sent.append("start"))
        opened.journal.deliver()
        assert sent == ["stop"]
        assert not opened.journal.close(timeout_s=0.1)
        opened.journal.deliver(is_last=True)
    assert sent == ["stop", "start"]


def spoil(path, how):
    match how:
        case "deleted":
            path.unlink(missing_ok=True)
        case "folder":
            path.unlink(missing_ok=True)
            path.mkdir()
        case "pipe":
            path.unlink()
            os.mkfifo(path)
        case "work dir":
            shutil.rmtree(path.parent)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("launch/journal.db", "deleted"),
        ("launch/journal.db-journal", "deleted"),
        ("launch/journal.db", "folder"),
        ("launch/journal.db", "work dir"),
        ("events.jsonl", "deleted"),
        ("events.jsonl", "folder"),
        ("events.jsonl", "pipe"),
    ],
)
def test_a_journal_that_is_taken_away_is_written_again(tmp_path, name, how):
    opened = Opened(tmp_path)
    opened.journal.record(event("before"), 1)
    assert opened.journal.flush()
    spoil(tmp_path / name, how)
    opened.journal.record(event("after"), 1)
    is_in_the_way = how in ("folder", "pipe")
    if is_in_the_way:
        said = opened.wait_for_report()
        assert ("directory" if how == "folder" else "is not a file") in said
        (tmp_path / name).rmdir() if how == "folder" else (tmp_path / name).unlink()
        opened.journal.record(event("later"), 1)
        assert opened.wait_for_report() == ""
    assert opened.journal.close()
    expected = ["before", "after"] + ["later"] * is_in_the_way
    assert texts(tmp_path) == expected
    again = Journal(tmp_path)
    assert again.name == opened.journal.name
    assert [one["text"] for one in again.log_events(1)] == expected


def test_a_line_that_a_killed_driver_has_begun_is_removed(tmp_path):
    write(tmp_path, BEGIN, FAILURE)
    path = tmp_path / "events.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"time_ns": 17')
    journal = Journal(tmp_path)
    assert path.read_bytes() == whole
    journal.record(event("next"), 2)
    journal.close()
    assert texts(tmp_path)[2:] == ["next"]


def test_a_journal_that_cannot_be_opened_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("mjax.launch.journal._OPEN_S", 0.1)
    journal = Journal(tmp_path)
    journal.close()
    with contextlib.closing(
        sqlite3.connect(journal.path, isolation_level=None)
    ) as other:
        other.execute("pragma locking_mode=exclusive")
        other.execute("begin exclusive")
        with pytest.raises(ValueError, match=r"locked it for 0\.1 s; end that"):
            Journal(tmp_path)
    journal.path.write_bytes(b"no database" * 1000)
    with pytest.raises(ValueError, match="move it away to begin anew"):
        Journal(tmp_path)
