"""What a launch's events.jsonl says about its hosts."""

import json
from pathlib import Path
from typing import Any

import pytest

from mjax.health.history import run_events
from mjax.health.history.events import HostEvent, Kind
from mjax.health.history.reputation import Reputation
from mjax.health.history.run_events import HARDWARE_RULES, Counts
from mjax.launch import log_rules
from mjax.launch.events import teller
from mjax.launch.failures import Failure
from mjax.launch.hosts import Fleet, Host, HostState
from mjax.launch.journal import Journal
from mjax.launch.messages import VERSION, Hello
from mjax.launch.policy import Cause


def line(kind: str, text: str = "", **fields: Any) -> bytes:
    row = {"time_ns": 100, "source": "driver", "generation": 1, "kind": kind}
    row |= {"severity": "info", "host": None, "rank": None, "text": text, "data": {}}
    return json.dumps(row | fields).encode() + b"\n"


def events(*lines: bytes, counts: Counts | None = None) -> list[HostEvent]:
    return [*run_events.parse(lines, "events.jsonl", counts or Counts())]


def brief(found: list[HostEvent]) -> list[tuple[str, str, str]]:
    return [(one.host, one.kind.value, one.cause) for one in found]


def failure(cause: str, hosts: list[str], **fields: Any) -> bytes:
    data = {"cause": cause, "ranks": [0], "hosts": hosts}
    return line("failure", f"{cause}: it ended", data=data, **fields)


CASES = {
    "a line of another source, which knows no generation": (
        line("check", "ok", host="gpu1", source="health.ports", generation=None),
        [],
    ),
    "a failure blames its host": (
        failure("GPU fault", ["gpu1"]),
        [("gpu1", "fault", "GPU fault")],
    ),
    "a failure of no host blames nobody": (failure("hung", []), []),
    "bad flags blame no host": (failure("bad input", ["gpu1"]), []),
    "an eviction after a fault": (
        line("evict", host="gpu1", data={"state": "evicted", "why": "Xid 79"}),
        [("gpu1", "evicted", "")],
    ),
    "an eviction after a check": (
        line("evict", host="gpu1", data={"state": "sick", "why": "gpu.count: 7"}),
        [("gpu1", "check_failed", "")],
    ),
    "a host that was lost is told by the failure": (
        line("evict", host="gpu1", data={"state": "lost", "why": "no heartbeat"}),
        [],
    ),
    "a passed check": (
        line("check", "gpu1 has passed its check", host="gpu1"),
        [("gpu1", "check_ok", "")],
    ),
    "the order of a check": (line("check", "check the host: gpu1"), []),
    "a host that is back": (
        line("host", "gpu1 is back as a spare", host="gpu1"),
        [("gpu1", "returned", "")],
    ),
    "a host that joined": (line("host", "gpu1 joined", host="gpu1"), []),
    "a line of a log that names hardware": (
        line("log", host="gpu1", data={"rule": "Xid"}),
        [("gpu1", "fault", "logged")],
    ),
    "a line of a log of a program": (
        line("log", host="gpu1", data={"rule": "Xid of a program"}),
        [],
    ),
    "the end of a rank": (
        line("rank_end", host="gpu1", rank=3, data={"code": 1}),
        [],
    ),
    "a kind of tomorrow": (line("blessing", host="gpu1"), []),
}


@pytest.mark.parametrize("name", CASES)
def test_a_line_says_of_hosts(name: str):
    text, expected = CASES[name]
    counts = Counts()
    assert brief(events(text, counts=counts)) == expected
    assert counts.num_unreadable == 0


def test_hosts_that_are_blamed_together_share_the_blame():
    found = events(failure("network error", ["gpu1", "gpu2", "gpu1", "gpu3"]))
    assert brief(found) == [
        (f"gpu{number}", "fault", "network error") for number in (1, 2, 3)
    ]
    assert {one.share for one in found} == {1 / 3}


def test_suspects_that_are_put_aside_have_not_failed_a_check():
    """All of them are checked; the launcher gives the failure as the reason."""
    why = "rank 3 on gpu1 hangs, step 7"
    first = line("failure", f"hung: {why}", data={"cause": "hung", "hosts": []})
    aside = line("evict", host="gpu1", data={"state": "sick", "why": why})
    other = line("evict", host="gpu1", data={"state": "sick", "why": "gpu.count: 7"})
    assert brief(events(first, aside)) == []
    assert brief(events(first, other)) == [("gpu1", "check_failed", "")]
    assert brief(events(aside)) == [("gpu1", "check_failed", "")]


def test_a_broken_host_that_says_the_same_many_times_counts_once_a_generation(
    tmp_path: Path,
):
    def said(time_ns: int, generation: int) -> bytes:
        data = {"rule": "Xid"}
        return line(
            "log",
            f"Xid: {time_ns}",
            host="gpu1",
            data=data,
            time_ns=time_ns,
            generation=generation,
        )

    found = events(*(said(n, 1) for n in range(9)), said(10, 2))
    assert len(found) == 10
    with Reputation(tmp_path / "hosts.db") as reputation:
        assert reputation.record_all(found) == 2


def test_a_line_that_is_being_written_is_left_for_the_next_time():
    counts = Counts()
    lines = [failure("hung", ["gpu1"]), failure("hung", ["gpu2"])[:-1]]
    assert brief(events(*lines, counts=counts)) == [("gpu1", "fault", "hung")]
    assert (counts.num_lines, counts.num_unreadable, counts.is_cut) == (1, 0, True)


@pytest.mark.parametrize(
    "bad",
    [
        b"\n",
        b"{\n",
        b"[1]\n",
        b'{"kind": "evict"}\n',
        b"\xff\xfe\n",
        line("failure", data={"cause": "hung", "hosts": "gpu1"}),
        line("failure", data={"hosts": ["gpu1"]}),
        line("evict", host=3),
        line("check", host="a b"),
        line("check", host="a", time_ns=2**80),
        line("check", host="a", time_ns=True),
        line("failure", data={"cause": "hung", "hosts": ["\ud800"]}),
    ],
)
def test_a_line_that_cannot_be_read_is_counted_and_the_others_are_taken(bad: bytes):
    counts = Counts()
    good = failure("hung", ["gpu1"])
    found = events(good, bad, good.replace(b"100", b"101"), counts=counts)
    assert counts.num_unreadable == 1
    assert counts.first_unreadable.startswith("events.jsonl:2: ")
    assert [one.time_ns for one in found] == [100, 101]


def test_a_text_that_utf_8_cannot_hold_stops_no_import(tmp_path: Path):
    data = {"cause": "hung", "hosts": ["gpu1"]}
    found = events(line("failure", "hung: \udcff", data=data))
    with Reputation(tmp_path / "hosts.db") as reputation:
        assert reputation.record_all(found) == 1
        assert reputation.events("gpu1")[0].text == "hung: \\udcff"


def test_a_line_that_is_too_long_is_counted_once(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(run_events, "MAX_LINE_BYTES", 400)
    path, counts = tmp_path / "events.jsonl", Counts()
    good = failure("hung", ["gpu1"])
    path.write_bytes(good + b"x" * 2000 + b"\n" + good.replace(b"100", b"101"))
    found = [*run_events.read(path, counts)]
    assert [one.time_ns for one in found] == [100, 101]
    assert (counts.num_unreadable, counts.is_cut) == (1, False)


# ----------------------------------------------------------------------- the same twice


def test_the_same_file_twice_adds_nothing_wherever_it_lies(tmp_path: Path):
    text = b"".join(text for text, _ in CASES.values())
    here, there = tmp_path / "events.jsonl", tmp_path / "copy" / "events.jsonl"
    there.parent.mkdir()
    here.write_bytes(text)
    there.write_bytes(text)
    with Reputation(tmp_path / "hosts.db") as reputation:
        num = reputation.record_all(run_events.read(here, Counts()))
        assert num == 6
        assert reputation.record_all(run_events.read(here, Counts())) == 0
        assert reputation.record_all(run_events.read(there, Counts())) == 0
        # The run goes on, and the file grows.
        here.write_bytes(text + failure("hung", ["gpu1"], time_ns=200))
        assert reputation.record_all(run_events.read(here, Counts())) == 1


def test_runs_that_look_alike_are_kept_apart(tmp_path: Path):
    """The same failure in the same generation, at another first line."""
    first = [line("host", time_ns=1), failure("hung", ["gpu1"])]
    second = [line("host", time_ns=2), failure("hung", ["gpu1"])]
    with Reputation(tmp_path / "hosts.db") as reputation:
        assert reputation.record_all(events(*first)) == 1
        assert reputation.record_all(events(*second)) == 1


# ------------------------------------------------------------------------ the launcher


def test_what_the_launcher_writes_is_understood(tmp_path: Path):
    journal = Journal(tmp_path)
    tell = teller(lambda one: journal.record(one, 1))
    fleet = Fleet(1, 10.0, lambda *_: None, tell)
    hello = Hello(
        version=VERSION, token="", host="gpu1", address="10.0.0.1", pid=1, facts={}
    )
    host = fleet.join(hello, 0.0)
    assert isinstance(host, Host)
    blamed = Failure(cause=Cause.GPU_FAULT, text="Xid 79", hosts=("gpu1",))
    tell("failure", f"{blamed.cause}: {blamed.text}", "error", **blamed.fields())
    fleet.evict(host, blamed.text)
    fleet.evict(host, "gpu.count: 7 GPUs", HostState.SICK)
    fleet.come_back(host, 1)
    journal.close()
    counts = Counts()
    found = [*run_events.read(tmp_path / "events.jsonl", counts)]
    assert brief(found) == [
        ("gpu1", "fault", "GPU fault"),
        ("gpu1", "evicted", ""),
        ("gpu1", "check_failed", ""),
        ("gpu1", "returned", ""),
    ]
    assert (counts.num_unreadable, counts.is_cut) == (0, False)
    assert {one.generation for one in found} == {1}


def test_rules_that_name_hardware_are_rules_of_the_launcher():
    hardware = {Cause.GPU_FAULT, Cause.HOST_FAULT}
    named = {name for name, cause in log_rules.CAUSES.items() if cause in hardware}
    assert named == HARDWARE_RULES


def test_kinds_of_the_history_are_words():
    assert all(kind.value == kind.value.lower() for kind in Kind)
