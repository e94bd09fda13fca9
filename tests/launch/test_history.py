"""The next run knows the faults of a host in earlier runs."""

import sqlite3

import pytest

from mjax.launch.config import RunConfig
from mjax.launch.driver import Driver
from mjax.launch.events import Event, teller
from mjax.launch.history import HostHistory
from mjax.launch.journal import Journal


def write(work_dir, *hosts):
    """Let a run record that hosts have failed."""
    work_dir.mkdir()
    journal = Journal(work_dir)
    for host in hosts:
        data = {"cause": "GPU failed", "ranks": [0], "hosts": [host]}
        text = f"GPU failed: rank 0 on {host}"
        event = Event(kind="failure", text=text, host=host, rank=0, data=data)
        journal.record(event, 1)
    journal.close()
    return work_dir / "events.jsonl"


def opened(path, events, told):
    return HostHistory(path, events, teller(told.append))


def test_a_host_that_has_failed_in_one_run_comes_after_others_in_the_next(tmp_path):
    path = tmp_path / "hosts.db"
    first = opened(path, write(tmp_path / "a", "host-1", "host-1", "host-2"), [])
    first.close()
    second = opened(path, write(tmp_path / "b"), [])
    scores = [second.score(f"host-{i}") for i in range(3)]
    assert scores[0] == 0.0 < scores[2] < scores[1]
    second.close()


def test_what_happens_in_this_run_counts_at_once_and_only_once(tmp_path):
    events, told = write(tmp_path / "a", "host-1"), []
    history = opened(tmp_path / "hosts.db", events, told)
    assert history.score("host-1") == pytest.approx(1.0, rel=1e-3)
    journal = Journal(tmp_path / "a")
    data = {"cause": "GPU failed", "ranks": [0], "hosts": ["host-1"]}
    event = Event(kind="failure", text="once more", host="host-1", data=data)
    journal.record(event, 2)
    journal.close()
    assert history.score("host-1") == pytest.approx(1.0, rel=1e-3)
    for _ in range(2):
        history.note(event)
        assert not history.is_current
        history.read()
        assert history.score("host-1") == pytest.approx(2.0, rel=1e-3)
    history.close()
    assert told == []


def test_a_history_that_fails_is_said_once_and_the_run_goes_on(tmp_path):
    told = []
    history = opened(tmp_path / "hosts.db", write(tmp_path / "a", "host-1"), told)
    known = history.score("host-1")
    assert known > 0
    with sqlite3.connect(tmp_path / "hosts.db") as base:
        base.execute("drop table events")
    for _ in range(2):
        history.note(Event(kind="failure", text=""))
        history.read()
        assert history.score("host-1") == known
    history.close()
    (event,) = told
    assert (event.kind, event.severity) == ("history", "warning")


def test_a_damaged_history_is_refused_before_anything_starts(tmp_path):
    path = tmp_path / "hosts.db"
    path.write_bytes(b"no database" * 100)
    config = RunConfig(history=str(path))
    with pytest.raises(ValueError, match=r"--history: .*hosts\.db"):
        Driver(config, [], work_dir=tmp_path, token="t", bind=("127.0.0.1", 0))
    assert path.read_bytes() == b"no database" * 100
