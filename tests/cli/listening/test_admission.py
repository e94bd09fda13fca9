"""Strangers cannot use up a server, and its clients keep their connections."""

import socket
from collections.abc import Iterator

import pytest

from mjax.cli.listening import admission
from mjax.cli.listening.admission import Admission, Peer


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Small limits, and a clock that the test sets."""
    now = [0.0]
    monkeypatch.setattr(admission, "MOST_UNAUTHENTICATED", 4)
    monkeypatch.setattr(admission.time, "monotonic", lambda: now[0])
    yield now
    monkeypatch.undo()


class Door:
    """An admission, and the connections that it has closed."""

    def __init__(self, now: list[float]) -> None:
        self._now = now
        self.admission, self.closed = Admission(first_bytes=100), list[str]()
        self._sockets: dict[str, tuple[socket.socket, socket.socket]] = {}

    def enter(self, name: str, *, sends: bytes = b"") -> Peer:
        self._now[0] += 1.0
        near, far = self._sockets[name] = socket.socketpair()
        far.sendall(sends)
        return self.admission.enter(near.fileno, lambda: self.closed.append(name))

    def end(self) -> None:
        for pair in self._sockets.values():
            for one in pair:
                one.close()


@pytest.fixture
def door(limits: list[float]) -> Iterator[Door]:
    made = Door(limits)
    yield made
    made.end()


def test_of_too_many_strangers_the_one_that_is_silent_for_longest_is_closed(door):
    for number in range(7):
        door.enter(str(number))
    assert door.closed == ["0", "1", "2"]


def test_a_client_whose_request_has_arrived_outlasts_the_silent(door):
    door.enter("client", sends=b"GET / HTTP/1.1")
    for number in range(5):
        door.enter(str(number))
    assert door.closed == ["0", "1"]


def test_authenticated_and_busy_peers_are_not_closed_for_strangers(door):
    known, busy = door.enter("known"), door.enter("busy")
    known.authenticate()
    busy.begin()
    for number in range(100):
        door.enter(str(number))
    assert not {"known", "busy"} & {*door.closed}
    assert len(door.closed) == 97  # one of the four places is the busy peer's


def test_a_stranger_that_sends_slowly_is_closed_at_its_time_limit(door, limits):
    slow, known, busy = door.enter("slow"), door.enter("known"), door.enter("busy")
    known.authenticate()
    busy.begin()
    for _ in range(30):
        limits[0] += 0.4
        slow.count(1)
        door.admission.sweep()
    assert door.closed == ["slow"]


def test_after_a_pause_of_the_server_requests_are_read_before_it_judges(door, limits):
    door.enter("client", sends=b"GET / HTTP/1.1")
    door.enter("silent")
    limits[0] += 100.0
    door.admission.sweep()
    assert door.closed == ["silent"]


def test_an_answer_gives_a_stranger_more_time(door, limits):
    peer = door.enter("balancer")
    for _ in range(5):
        limits[0] += admission.LIMIT_S - 1.0
        peer.begin()
        peer.rest()
        door.admission.sweep()
    assert door.closed == []
    limits[0] += admission.LIMIT_S + 1.0
    door.admission.sweep()
    assert door.closed == ["balancer"]


def test_a_stranger_may_send_little_and_a_client_much(door):
    stranger, known = door.enter("stranger"), door.enter("known")
    known.authenticate()
    for peer in (stranger, known):
        peer.count(100)
    assert door.closed == []
    for peer in (stranger, known):
        peer.count(1)
    assert door.closed == ["stranger"]


def test_the_largest_unfinished_request_goes_if_all_are_too_large(door, monkeypatch):
    monkeypatch.setattr(admission, "MOST_WAITING_BYTES", 2**20)
    peers = {name: door.enter(name) for name in ("a", "b", "c", "busy")}
    for peer in peers.values():
        peer.authenticate()
    peers["busy"].count(2**21)
    assert door.closed == ["busy"]  # it still sends
    peers["a"].count(2**19)
    peers["b"].count(2**19)
    peers["c"].begin()
    peers["c"].count(2**21)
    assert door.closed == ["busy"]  # the server works on c, and cannot stop
    peers["b"].count(2**18)
    assert door.closed == ["busy", "b"]


def test_with_more_connections_than_files_idle_clients_go_after_strangers(
    limits, monkeypatch
):
    monkeypatch.setattr(admission, "_LEAST", 3)
    monkeypatch.setattr(admission.resource, "getrlimit", lambda which: (10, 10))
    door = Door(limits)
    first, second = door.enter("first"), door.enter("second")
    for peer in (first, second):
        peer.authenticate()
    door.enter("stranger")
    door.enter("third").authenticate()
    assert door.closed == ["stranger"]
    limits[0] += 1.0
    first.begin()
    first.rest()  # it is used, and second is not
    door.enter("fourth").begin()
    assert door.closed == ["stranger", "second"]
    for name in ("fifth", "sixth"):
        door.enter(name).begin()
    assert door.closed == ["stranger", "second", "third", "first"]
    door.enter("seventh")  # all others are busy
    assert door.closed[4:] == ["seventh"]
    door.end()
