"""The history of hosts: scores, orders, who may return, and a file that survives."""

import contextlib
import dataclasses
import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mjax.health.history import store
from mjax.health.history.events import CAUSES, KINDS, NOT_OF_HOSTS, HostEvent, Kind
from mjax.health.history.reputation import Reputation
from mjax.health.history.store import History
from mjax.launch.policy import Cause

DAY_NS = 24 * 3600 * 10**9
NOW_NS = 20_000 * DAY_NS


def event(host: str = "gpu1", kind: Kind = Kind.FAULT, **changes) -> HostEvent:
    fields: dict[str, Any] = {"host": host, "kind": kind, "time_ns": NOW_NS}
    if kind is Kind.FAULT:
        fields["cause"] = "GPU fault"
    return HostEvent(**fields | changes)


@pytest.fixture
def reputation(tmp_path: Path) -> Iterator[Reputation]:
    with Reputation(tmp_path / "hosts.db") as made:
        yield made


# -------------------------------------------------------------------------------- score


def test_a_host_of_which_nothing_is_known_has_score_0(reputation: Reputation):
    assert reputation.score("gpu1", NOW_NS) == 0.0
    assert reputation.hosts() == []


def test_an_event_counts_half_after_a_half_life(reputation: Reputation):
    reputation.record(event())
    assert reputation.score("gpu1", NOW_NS) == 8.0
    assert reputation.score("gpu1", NOW_NS + 28 * DAY_NS) == 4.0
    assert reputation.score("gpu1", NOW_NS + 56 * DAY_NS) == 2.0
    assert reputation.score("gpu2", NOW_NS) == 0.0


def test_events_add_up_with_their_weights_and_shares(reputation: Reputation):
    events = [
        event(),
        event(kind=Kind.CHECK_FAILED),
        event(cause="hung", share=0.25),
        event(kind=Kind.CHECK_OK),
        event(kind=Kind.BURN_PASSED),
        event(cause="a cause of tomorrow"),
    ]
    assert reputation.record_all(events) == 6
    assert reputation.score("gpu1", NOW_NS) == 8.0 + 4.0 + 0.5 + 1.0


def test_an_event_of_the_future_counts_in_full_and_no_more(reputation: Reputation):
    """The clock of its host may be ahead."""
    reputation.record(event(time_ns=NOW_NS + 500 * DAY_NS))
    assert reputation.score("gpu1", NOW_NS) == 8.0


def test_every_cause_of_the_launcher_has_a_meaning():
    assert CAUSES.keys() & NOT_OF_HOSTS == set()
    known = {*CAUSES, *NOT_OF_HOSTS} - {"logged"}
    assert known == {cause.value for cause in Cause}
    assert KINDS.keys() == {*Kind}


# -------------------------------------------------------------------------------- order


def test_the_healthiest_come_first_and_ties_keep_their_order(reputation: Reputation):
    reputation.record(event("old", time_ns=NOW_NS - 90 * DAY_NS, cause="hung"))
    reputation.record(event("new", cause="hung"))
    reputation.record(event("golden", Kind.BURN_PASSED))
    reputation.record(event("bad"))
    hosts = ["bad", "new", "b", "old", "a", "golden"]
    expected = ["golden", "b", "a", "old", "new", "bad"]
    assert reputation.order(hosts, NOW_NS) == expected
    for shuffled in itertools.permutations(hosts):
        found = reputation.order(shuffled, NOW_NS)
        assert [h for h in found if h not in "ab"] == [
            h for h in expected if h not in "ab"
        ]
        clean = [host for host in shuffled if host in "ab"]
        assert [host for host in found if host in "ab"] == clean


def test_a_host_that_may_not_return_comes_last_whatever_its_score(
    reputation: Reputation,
):
    reputation.record(event("long ago".replace(" ", "-"), time_ns=0))
    for number in range(9):
        reputation.record(event("crashes", cause="crashed", time_ns=NOW_NS + number))
    found = reputation.order(["long-ago", "crashes"], NOW_NS)
    assert found == ["crashes", "long-ago"]


# --------------------------------------------------------------------------- may return

BURN = Kind.BURN_PASSED


@pytest.mark.parametrize(
    ("events", "may"),
    [
        ([], True),
        ([event(cause="failed"), event(cause="crashed"), event(cause="hung")], True),
        ([event()], False),
        ([event(), event(kind=Kind.CHECK_OK, time_ns=NOW_NS + 1)], False),
        ([event(), event(kind=Kind.RETURNED, time_ns=NOW_NS + 1)], False),
        ([event(), event(kind=BURN, time_ns=NOW_NS + 1)], True),
        ([event(), event(kind=BURN, time_ns=NOW_NS)], False),
        ([event(), event(kind=BURN, time_ns=NOW_NS - 1)], False),
        # It began before the fault, and ended after it.
        (
            [event(), event(kind=BURN, time_ns=NOW_NS + 9, started_ns=NOW_NS - 9)],
            False,
        ),
        (
            [event(), event(kind=BURN, time_ns=NOW_NS + 9, started_ns=NOW_NS + 1)],
            True,
        ),
        (
            [
                event(),
                event(kind=BURN, time_ns=NOW_NS + 1),
                event(kind=Kind.BURN_FAILED, time_ns=NOW_NS + 2),
            ],
            False,
        ),
        (
            [
                event(),
                event(kind=BURN, time_ns=NOW_NS + 1),
                event(time_ns=NOW_NS + 2),
            ],
            False,
        ),
        ([event(kind=Kind.EVICTED)], False),
        ([event(kind=Kind.CHECK_FAILED)], False),
        ([event(cause="a cause of tomorrow")], False),
        ([event("gpu2")], True),
        ([event(), event("gpu2", BURN, time_ns=NOW_NS + 1)], False),
    ],
)
def test_a_bad_host_may_return_after_a_burn_that_began_after_its_last_fault(
    reputation: Reputation, events: list[HostEvent], may: bool
):
    for order in itertools.permutations(events):
        reputation.record_all(order)
        assert reputation.may_return("gpu1") is may
        assert bool(reputation.why_not("gpu1")) is not may


def test_it_is_said_why_a_host_may_not_return(reputation: Reputation):
    reputation.record(event(time_ns=1_700_000_000 * 10**9))
    assert reputation.why_not("gpu1") == (
        "fault: GPU fault at 2023-11-14 22:13:20 UTC, and no passed burn that began "
        "after it"
    )


# ----------------------------------------------------------------------------- the file


def test_the_same_event_is_recorded_once(reputation: Reputation):
    assert reputation.record(event())
    assert not reputation.record(event())
    assert reputation.record_all([event(), event(time_ns=NOW_NS + 1)]) == 1
    others = [{"host": "gpu2"}, {"run": "b"}, {"generation": 2}, {"text": "b"}]
    assert reputation.record_all(event(**one) for one in others) == 4
    assert len(reputation.events()) == 6


def test_events_are_kept_as_they_were(tmp_path: Path):
    one = event(text="é\n" * 3, share=0.5, run="r", generation=3)
    burn = event(kind=BURN, time_ns=NOW_NS + 5, started_ns=NOW_NS + 1)
    with Reputation(tmp_path / "hosts.db") as first:
        first.record_all([burn, one])
    with Reputation(tmp_path / "hosts.db") as second:
        assert second.events("gpu1") == [one, burn]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"host": ""}, "a host needs a name"),
        ({"host": "a b"}, "a host needs a name"),
        ({"host": "a\ud800"}, "host must be UTF-8"),
        ({"text": "\udcff"}, "text must be UTF-8"),
        ({"share": 0.0}, "share must be above 0"),
        ({"share": 2.0}, "share must be above 0"),
        ({"share": float("nan")}, "share must be above 0"),
        ({"time_ns": -1}, "time_ns must be 0 to"),
        ({"time_ns": 2**63}, "time_ns must be 0 to"),
        ({"generation": 2**70}, "generation must be 0 to"),
        ({"started_ns": NOW_NS + 1}, "is after time_ns"),
    ],
)
def test_an_event_that_cannot_be_is_refused(fields: dict, told: str):
    with pytest.raises(ValueError, match=told):
        event(**fields)


def test_what_was_recorded_survives_a_kill_in_the_middle_of_writes(tmp_path: Path):
    path = tmp_path / "hosts.db"
    code = f"""
import itertools, sys
from pathlib import Path
from mjax.health.history.reputation import Reputation
from mjax.health.history.events import HostEvent, Kind
with Reputation(Path({str(path)!r})) as reputation:
    for number in itertools.count():
        reputation.record(HostEvent(host="gpu1", kind=Kind.FAULT, time_ns=number))
        print(number, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        for _ in range(40):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        told = [int(line) for line in child.stdout if line.endswith(b"\n")]
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    last = max(told, default=39)
    with Reputation(path) as reputation:
        times = [one.time_ns for one in reputation.events("gpu1")]
    # The last one may be recorded without having been reported.
    assert times in ([*range(last + 1)], [*range(last + 2)])


def test_an_import_that_is_killed_can_be_made_again(tmp_path: Path):
    """Batches are atomic; a repeated event is recorded once."""

    def failing() -> Iterator[HostEvent]:
        for number in range(store.BATCH + 10):
            yield event(time_ns=number)
        raise KeyboardInterrupt

    with Reputation(tmp_path / "hosts.db") as reputation:
        with pytest.raises(KeyboardInterrupt):
            reputation.record_all(failing())
        assert len(reputation.events()) == store.BATCH
        whole = (event(time_ns=number) for number in range(store.BATCH + 10))
        assert reputation.record_all(whole) == 10


def test_several_writers_lose_nothing(tmp_path: Path):
    """Even if they all create the file."""
    path, errors = tmp_path / "hosts.db", list[BaseException]()
    barrier = threading.Barrier(6)

    def write(number: int) -> None:
        try:
            barrier.wait()
            with Reputation(path) as reputation:
                for time_ns in range(20):
                    reputation.record(event(f"gpu{number}", time_ns=time_ns))
                    reputation.record(event("both", time_ns=time_ns))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with Reputation(path) as reputation:
        counts = {host: len(reputation.events(host)) for host in reputation.hosts()}
    assert counts == {"both": 20} | {f"gpu{number}": 20 for number in range(6)}
    assert [name for name in os.listdir(tmp_path) if name.endswith(".new")] == []


def test_a_file_that_is_held_for_too_long_is_told(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(store, "BUSY_S", 0.01)
    path = tmp_path / "hosts.db"
    with (
        Reputation(path) as reputation,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        other.execute("begin immediate")
        with pytest.raises(RuntimeError, match="is held by another process"):
            reputation.record(event())


# ------------------------------------------------------------------ damage and versions


def filled(path: Path) -> bytes:
    """Make a history of several pages and return its bytes."""
    with Reputation(path) as reputation:
        reputation.record_all(event(time_ns=n, text="x" * 500) for n in range(60))
    return path.read_bytes()


def refused(path: Path) -> str:
    """Return why a history is refused; it must not be changed."""
    before = path.read_bytes()
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Reputation(path)
    assert path.read_bytes() == before
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("place", [0, 20, 100, 4096])
def test_a_file_of_damaged_structure_is_refused_and_not_changed(
    tmp_path: Path, place: int
):
    path = tmp_path / "hosts.db"
    text = bytearray(filled(path))
    text[place : place + 60] = b"\xff" * 60
    path.write_bytes(text)
    assert "is damaged" in refused(path)


@pytest.mark.parametrize("new", [b"gpu2fault", b"gp\xff1fault"])
def test_an_event_of_another_host_by_damage_is_refused(tmp_path: Path, new: bytes):
    """The structure is intact, so SQLite itself notices nothing."""
    path = tmp_path / "hosts.db"
    text = filled(path)
    assert text.count(b"gpu1fault") == 60
    path.write_bytes(text.replace(b"gpu1fault", new, 1))
    with Reputation(path) as reputation:
        with pytest.raises(ValueError, match="is damaged"):
            reputation.events()
        assert reputation.score("gpu2", NOW_NS) == 0.0


@pytest.mark.parametrize("new", [b"GPU fau1t", b"failed   "])
def test_an_event_of_another_cause_by_damage_is_refused(tmp_path: Path, new: bytes):
    path = tmp_path / "hosts.db"
    text = filled(path)
    path.write_bytes(text.replace(b"GPU fault", new, 1))
    with (
        Reputation(path) as reputation,
        pytest.raises(ValueError, match="is damaged"),
    ):
        reputation.order(["gpu1", "gpu2"], NOW_NS)


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path):
    path = tmp_path / "hosts.db"
    text = filled(path)
    for size in (len(text) // 2, 4096, 100, 10):
        path.write_bytes(text[:size])
        assert "is damaged" in refused(path)
    path.write_bytes(b"")
    assert "is empty, but a history of hosts never is" in refused(path)


def test_what_is_no_history_is_refused(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("these are notes\n" * 400)
    assert "is damaged (file is not a database)" in refused(path)
    path = tmp_path / "journal.db"
    with contextlib.closing(sqlite3.connect(path)) as base:
        base.execute("create table events (number integer)")
    assert "is an SQLite file, but not a history of hosts" in refused(path)


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path):
    path = tmp_path / "hosts.db"
    filled(path)
    with contextlib.closing(sqlite3.connect(path)) as base:
        base.execute(f"pragma user_version = {store.VERSION + 1}")
    told = refused(path)
    assert f"has version {store.VERSION + 1}; this mjax writes {store.VERSION}" in told


def test_a_file_of_the_version_before_is_read(tmp_path: Path, monkeypatch):
    """A future version, with one more column."""
    path = tmp_path / "hosts.db"
    filled(path)
    old = store.VERSION
    monkeypatch.setattr(store, "VERSION", old + 1)
    change = "alter table events add column rack text not null default ''"
    monkeypatch.setattr(store, "MIGRATIONS", {old: change})
    with Reputation(path) as reputation:
        assert len(reputation.events("gpu1")) == 60
        assert reputation.record(event("gpu2"))
    with contextlib.closing(sqlite3.connect(path)) as base:
        assert base.execute("pragma user_version").fetchone() == (old + 1,)
        assert base.execute("select distinct rack from events").fetchall() == [("",)]
    monkeypatch.setattr(store, "VERSION", old + 3)
    assert "has version" in refused(path)


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch):
    path = tmp_path / "hosts.db"
    filled(path)
    old = store.VERSION
    with monkeypatch.context() as patch:
        patch.setattr(store, "VERSION", old + 1)
        change = "alter table events add column a text; alter table nothing add b text"
        patch.setattr(store, "MIGRATIONS", {old: change})
        with pytest.raises(ValueError, match="cannot be used"):
            Reputation(path)
    with Reputation(path) as reputation:
        assert len(reputation.events()) == 60


def test_an_event_of_an_unknown_kind_is_refused(tmp_path: Path):
    path = tmp_path / "hosts.db"
    filled(path)
    with contextlib.closing(sqlite3.connect(path)) as base:
        base.execute("update events set kind = 'blessed' where number = 3")
        row = base.execute(f"select {store._COLUMNS} from events where number = 3")
        right = store._checksum(row.fetchone())
        base.execute("update events set checksum = ? where number = 3", (right,))
        base.commit()
    with (
        Reputation(path) as reputation,
        pytest.raises(ValueError, match="has an invalid event"),
    ):
        reputation.score("gpu1", NOW_NS)


@pytest.mark.parametrize("days", [0.0, -1.0, float("inf"), float("nan")])
def test_a_half_life_must_be_positive(tmp_path: Path, days: float):
    with pytest.raises(ValueError, match="--half-life-days must be positive"):
        Reputation(tmp_path / "hosts.db", half_life_days=days)
    assert not (tmp_path / "hosts.db").exists()


def test_a_half_life_may_be_hours(tmp_path: Path):
    with Reputation(tmp_path / "hosts.db", half_life_days=0.5) as reputation:
        reputation.record(event())
        assert reputation.score("gpu1", NOW_NS + DAY_NS) == 2.0


def test_a_standing_counts_what_has_a_weight(reputation: Reputation):
    light = event(cause="failed", time_ns=NOW_NS - 5)
    reputation.record_all([light, event(kind=Kind.CHECK_OK), event("b", BURN)])
    a, b, c = reputation.standings(["gpu1", "b", "c"], NOW_NS)
    assert (a.num_faults, a.last_fault_ns, a.has_burned) == (1, NOW_NS - 5, False)
    assert (b.num_faults, b.last_fault_ns, b.has_burned) == (0, None, True)
    assert (c.num_faults, c.score, c.has_burned, c.why_not) == (0, 0.0, False, "")


def test_a_folder_that_is_not_there_is_told(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be used"):
        History(tmp_path / "none" / "hosts.db")


def test_the_identity_of_an_event_keeps_its_parts_apart():
    one = event(cause="a", text="bc")
    assert one.identity != dataclasses.replace(one, cause="ab", text="c").identity
    assert one.identity == dataclasses.replace(one).identity
