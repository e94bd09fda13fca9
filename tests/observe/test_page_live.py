"""Updates of a run are pushed to viewers through a real server."""

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mjax.cli.listening import address_of, is_loopback
from mjax.observe import spans
from mjax.observe.page import answers, file_feed, live
from mjax.observe.page.answers import Page
from mjax.observe.page.file_feed import FileFeed
from mjax.observe.page.server import PageServer
from tests.observe import page_runs
from tests.observe.page_runs import Rank

TOKEN = "0123456789abcdef"
PATIENCE_S = 20.0


class Told(NamedTuple):
    """An event of the stream."""

    kind: str
    data: Any
    id: int | None


class Stream:
    """A viewer of /live."""

    def __init__(self, server: PageServer, last_id: int | None = None) -> None:
        host, port = server.url.removeprefix("http://").strip("/").split(":")
        self.connection = http.client.HTTPConnection(
            host, int(port), timeout=PATIENCE_S
        )
        headers = {"authorization": f"Bearer {TOKEN}"}
        if last_id is not None:
            headers["last-event-id"] = str(last_id)
        self.connection.request("GET", "/live", headers=headers)
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200
        assert self.answer.getheader("content-type", "").startswith("text/event-stream")

    def events(self) -> Iterator[Told]:
        """Yield events until the server ends the stream."""
        fields: dict[str, str] = {}
        while line := self.answer.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "event" in fields:
                number = fields.get("id")
                yield Told(
                    fields["event"],
                    json.loads(fields["data"]),
                    None if number is None else int(number),
                )
                fields = {}

    def until(self, kind: str, holds=lambda data: True) -> Told:
        """Return the next event of a kind that satisfies a condition."""
        begin = time.monotonic()
        for event in self.events():
            if event.kind == kind and holds(event.data):
                return event
            assert time.monotonic() - begin < PATIENCE_S, f"no event {kind}"
        raise AssertionError(f"the stream has ended before an event {kind}")

    def close(self) -> None:
        """Disconnect."""
        self.answer.close()
        self.connection.close()


@pytest.fixture
def served(tmp_path, monkeypatch) -> Iterator[PageServer]:
    """A server for the run in tmp_path that polls often."""
    monkeypatch.setattr(file_feed, "_FIND_S", 0.0)
    monkeypatch.setattr(file_feed, "_FIND_SHARE", 0.0)
    monkeypatch.setattr(answers, "_STATE_S", 0.05)
    monkeypatch.setattr(live, "_LOOK_S", 0.01)
    monkeypatch.setattr(live, "STATE_EVERY_S", 0.05)
    with serving(tmp_path) as server:
        yield server


@contextlib.contextmanager
def serving(work_dir: Path) -> Iterator[PageServer]:
    page = Page(FileFeed(work_dir), name="run", work_dir=work_dir, poll_s=0.01)
    try:
        server = PageServer(page, listen="127.0.0.1:0", token=TOKEN)
        try:
            yield server
        finally:
            server.close()
    finally:
        page.close()


def test_rows_that_are_appended_reach_a_viewer(tmp_path, served):
    Rank(tmp_path).steps(1, 1)
    page_runs.write_rows(tmp_path, 1, 5)
    stream = Stream(served)
    stream.until("metrics", lambda data: data["steps"][-1:] == [5])
    for step in (6, 7):
        page_runs.write_rows(tmp_path, step, step)
        found = stream.until("metrics")
        assert found.data["steps"] == [step]
        assert found.data["columns"]["loss"] == [5.0 - step / 100]
        assert found.id == step
    stream.close()


def test_the_mark_of_an_evaluation_reaches_a_viewer_after_its_row(tmp_path, served):
    rank = Rank(tmp_path)
    rank.steps(1, 1)
    page_runs.write_rows(tmp_path, 1, 500)
    stream = Stream(served)
    stream.until("metrics", lambda data: data["steps"][-1:] == [500])
    for step in (499, 500):
        span = spans.Span("eval", "eval", "host", rank.now_ns, rank.now_ns + 10**7)
        rank.line(step=step, spans=(span,))
        found = stream.until("marks", lambda data: data["marks"]).data
        assert found["marks"][-1] == {
            "step": step,
            "kind": "eval",
            "text": "eval, 0.01 s",
        }
    assert (found["from"], found["num_marks"]) == (201, {"eval": 2})
    page_runs.write_rows(tmp_path, 501, 799)
    found = stream.until("marks", lambda data: data["from"] == 500).data
    assert [mark["step"] for mark in found["marks"]] == [500]
    assert found["num_marks"] == {"eval": 2}
    stream.close()


def test_a_viewer_that_comes_back_gets_what_it_has_missed(tmp_path, served):
    Rank(tmp_path).steps(1, 1)
    page_runs.write_rows(tmp_path, 1, 9)
    stream = Stream(served)
    stream.until("metrics", lambda data: data["steps"][-1:] == [9])
    stream.close()
    page_runs.write_rows(tmp_path, 10, 12)
    again = Stream(served, last_id=9)
    assert again.until("metrics").data["steps"][0] == 10
    again.close()


def test_a_viewer_of_rows_that_a_restart_took_out_gets_them_again(tmp_path, served):
    Rank(tmp_path).steps(1, 1)
    page_runs.write_rows(tmp_path, 1, 9)
    stream = Stream(served)
    stream.until("metrics", lambda data: data["steps"][-1:] == [9])
    path = tmp_path / "metrics.jsonl"
    kept = path.read_bytes().splitlines(keepends=True)[:4]
    path.with_suffix(".tmp").write_bytes(b"".join(kept))
    path.with_suffix(".tmp").replace(path)
    found = stream.until("metrics")
    assert found.data["steps"] == [1, 2, 3, 4]
    stream.close()


def test_a_state_an_event_and_a_new_start_reach_a_viewer(tmp_path, served):
    rank = Rank(tmp_path)
    rank.steps(1, 1)
    stream = Stream(served)
    stream.until("state", lambda data: data["ranks"][:1] and data["newest_step"] == 1)
    rank.steps(2, 2)
    found = stream.until("state", lambda data: data["newest_step"] == 2)
    assert found.data["ranks"][0]["step"] == 2
    page_runs.write_event(tmp_path, kind="loss_spike", text="<b>a\nb</b>")
    (event,) = stream.until("events").data
    assert (event["kind"], event["text"]) == ("loss_spike", "<b>a\nb</b>")
    Rank(tmp_path, generation=2).steps(3, 3)
    assert stream.until("run").data["generation"] == 2
    stream.close()


def test_a_rank_that_dies_is_shown_as_ended(tmp_path, served):
    rank = Rank(tmp_path)
    rank.steps(1, 1)
    stream = Stream(served)
    stream.until("state", lambda data: data["live"])
    rank.line(end=1)
    found = stream.until("state", lambda data: not data["live"])
    assert found.data["ranks"][0]["ended"] == 1
    stream.close()


def test_the_server_ends_while_viewers_are_there(tmp_path):
    Rank(tmp_path).steps(1, 1)
    with serving(tmp_path) as server:
        streams = [Stream(server) for _ in range(5)]
        for stream in streams:
            stream.until("state")
        begin = time.monotonic()
    assert time.monotonic() - begin < 10
    for stream in streams:
        assert list(stream.events()) is not None  # it ends, and does not hang
        stream.close()


def test_nothing_is_left_of_viewers_that_went_away(tmp_path, served):
    Rank(tmp_path).steps(1, 1)
    for _ in range(3):
        stream = Stream(served)
        stream.until("state")
        stream.close()
    until = time.monotonic() + PATIENCE_S
    while served._server.server_state.tasks:
        assert time.monotonic() < until, "a stream goes on without its viewer"
        time.sleep(0.01)


def test_a_viewer_that_reads_nothing_holds_up_nobody(tmp_path, served):
    Rank(tmp_path).steps(1, 1)
    address = address_of(served.url.removeprefix("http://").strip("/"))
    with socket.create_connection(address) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        slow.sendall(
            f"GET /live HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
        )
        stream = Stream(served)
        for step in range(1, 20):
            page_runs.write_rows(tmp_path, step, step)
            stream.until("metrics", lambda data, s=step: data["steps"][-1] == s)
        stream.close()


def test_lines_that_begin_with_another_id_are_none():
    assert live.rows_seen(None) is None
    assert live.rows_seen("12") == 12
    assert live.rows_seen("-1") is None
    assert live.rows_seen("x" * 5) is None
    assert live.rows_seen("9" * 30) is None


def test_an_event_is_one_line_of_data():
    found = live.encode("events", [{"text": "a\nb\r\n\u2028"}], 3)
    assert found.startswith(b"event: events\nid: 3\ndata: ")
    assert found.count(b"\n") == 4


def test_addresses_are_read():
    assert address_of("127.0.0.1:7450") == ("127.0.0.1", 7450)
    assert address_of("[::1]:80") == ("::1", 80)
    assert address_of("head-1.x:0") == ("head-1.x", 0)
    for wrong in ("", "7450", "a:b", "a:99999", "http://a:1", "::1:80", "a:1 "):
        with pytest.raises(ValueError, match="--listen must be HOST:PORT"):
            address_of(wrong)


def test_loopback_addresses_are_known():
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("head")


def test_an_address_that_others_can_reach_is_told(tmp_path):
    Rank(tmp_path).steps(1, 1)
    page = Page(FileFeed(tmp_path), name="run", work_dir=tmp_path)
    server = PageServer(page, listen="0.0.0.0:0", token=TOKEN)
    server.close()
    page.close()
    assert "without encryption" in server.problems[0]


def test_the_page_of_a_run_is_behind_its_token(tmp_path, served):
    rank = Rank(tmp_path)
    rank.steps(1, 1)
    host, port = address_of(served.url.removeprefix("http://").strip("/"))
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)

    def status(path: str, **headers: str) -> int:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status

    assert status("/api/run") == 401
    assert status("/live") == 401
    assert status(f"/?token={TOKEN}") == 303
    assert status("/api/run", authorization=f"Bearer {TOKEN}") == 200
    assert status("/api/run", authorization=f"Bearer {TOKEN}", host="evil") == 421
    connection.close()
    assert served.address == f"{served.url}?token={TOKEN}"
    assert spans.FOLDER == "spans"
