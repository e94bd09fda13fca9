"""Every HTTP server of mjax answers its clients while strangers hold connections."""

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from mjax.cli.listening import address_of, admission
from mjax.data.mirror.server import Blocks
from mjax.data.mirror.server import Server as MirrorServer
from mjax.observe.page.answers import Page
from mjax.observe.page.file_feed import FileFeed
from mjax.observe.page.server import PageServer
from mjax.observe.stream import wire
from mjax.observe.stream.service import IngestService
from tests.generate.server.running import running

TOKEN = "0123456789abcdef"
PATIENCE_S = 20.0
MOST = 8


class Served(NamedTuple):
    """A server."""

    connect: Callable[[], socket.socket]
    target: str
    """Method and path of a request that is answered with 200."""
    body: bytes = b""
    token: str = TOKEN

    def request(self, *extra: str, body: bytes | None = None, token: str = "") -> bytes:
        """Return a request; `extra` are lines that replace Content-Length."""
        body = self.body if body is None else body
        lines = [f"{self.target} HTTP/1.1", "Host: 127.0.0.1", *extra]
        if token:
            lines.append(f"Authorization: Bearer {token}")
        if body:
            lines.append("Content-Type: application/json")
        if body and not extra:
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode() + body

    def is_answered(self) -> bool:
        """Return whether an honest request on a new connection is answered."""
        return status(self, self.request(token=self.token))[0] == 200


def status(served: Served, data: bytes) -> tuple[int, bytes]:
    """Send a request; return status and body of the answer."""
    with served.connect() as made:
        made.sendall(data)
        answer = http.client.HTTPResponse(made)
        answer.begin()
        return answer.status, answer.read()


def _to(address: tuple[str, int]) -> Callable[[], socket.socket]:
    return lambda: socket.create_connection(address, timeout=PATIENCE_S)


@contextlib.contextmanager
def generate(folder: Path) -> Iterator[Served]:
    with running(tokens=frozenset({TOKEN})) as server:
        body = json.dumps({"prompt": "ab", "max_tokens": 2}).encode()
        address = ("127.0.0.1", server.port)
        yield Served(_to(address), "POST /v1/completions", body)


@contextlib.contextmanager
def page(folder: Path) -> Iterator[Served]:
    made = Page(FileFeed(folder), name="run", work_dir=folder)
    server = PageServer(made, listen="127.0.0.1:0", token=TOKEN)
    address = address_of(server.url.removeprefix("http://").strip("/"))
    yield Served(_to(address), "GET /api/run")
    server.close()
    made.close()


@contextlib.contextmanager
def ingest(folder: Path, *, is_unix: bool = False) -> Iterator[Served]:
    listen = f"unix:{folder}/socket" if is_unix else "127.0.0.1:0"
    token = "" if is_unix else TOKEN
    store = str(folder / "store.duckdb")
    service = IngestService(store=store, listen=listen, token=token, say=print)

    def connect() -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(PATIENCE_S)
        made.connect(listen.removeprefix("unix:"))
        return made

    if not is_unix:
        connect = _to(address_of(service.address.removeprefix("http://")))
    body = wire.encode(wire.MarksRequest(run="r", sources=["a"]))
    yield Served(connect, "POST /marks", body, token)
    service.close()


@contextlib.contextmanager
def ingest_unix(folder: Path) -> Iterator[Served]:
    with ingest(folder, is_unix=True) as served:
        yield served


@contextlib.contextmanager
def mirror(folder: Path) -> Iterator[Served]:
    del folder
    bound = socket.create_server(("127.0.0.1", 0))
    blocks = Blocks({"b"}, lambda name: b"x", lambda name: b"x", print, 1)
    server = MirrorServer(blocks, TOKEN, PATIENCE_S, bound.getsockname(), bound)
    yield Served(_to(bound.getsockname()), "GET /b")
    server.close()


WITH_TOKEN = [generate, page, ingest, mirror]


def _name(server: Callable[[Path], object]) -> str:
    return server.__name__


@pytest.fixture(params=[*WITH_TOKEN, ingest_unix], ids=_name)
def served(request, tmp_path: Path, monkeypatch) -> Iterator[Served]:
    monkeypatch.setattr(admission, "MOST_UNAUTHENTICATED", MOST)
    with request.param(tmp_path) as made:
        yield made


def is_closed(made: socket.socket) -> bool:
    """Return whether the server has closed a connection; drop what it has sent."""
    made.settimeout(0.01)
    try:
        while made.recv(2**16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_silent_connections_make_room_for_clients(served: Served):
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(served.connect()) for _ in range(10 * MOST)]
        assert served.is_answered()
        until(lambda: sum(map(is_closed, strangers)) >= 9 * MOST)
        assert served.is_answered()


def test_a_head_that_comes_byte_by_byte_is_given_up(served: Served, monkeypatch):
    monkeypatch.setattr(admission, "LIMIT_S", 0.3)
    with served.connect() as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")

        def feed() -> bool:
            with contextlib.suppress(OSError):
                slow.sendall(b"x")
            return is_closed(slow)

        until(feed)
    assert served.is_answered()


@pytest.mark.parametrize("piece", [b"x" * 2**10, b"X-More: 1\r\n" * 100])
def test_a_head_without_end_is_given_up(served: Served, piece: bytes):
    with served.connect() as endless:

        def feed() -> bool:
            with contextlib.suppress(OSError):
                endless.sendall(piece)
            return is_closed(endless)

        endless.sendall(b"GET / HTTP/1.1\r\n")
        until(feed)
    assert served.is_answered()


@pytest.mark.parametrize("served", WITH_TOKEN, indirect=True, ids=_name)
def test_without_a_token_a_body_is_not_read(served: Served):
    with served.connect() as made:
        made.sendall(served.request("Content-Length: 60000000", body=b"x"))
        answer = http.client.HTTPResponse(made)
        answer.begin()
        assert answer.status in (401, 403)
        assert "error" in json.loads(answer.read())
        until(lambda: is_closed(made) or not _sends(made, 2**14))
    assert served.is_answered()


def _sends(made: socket.socket, num_bytes: int) -> bool:
    try:
        made.sendall(b"x" * num_bytes)
    except OSError:
        return False
    return True


NO_LENGTHS = [
    ["Content-Length: ²"],
    ["Content-Length: \u0661"],  # a digit one, in Arabic
    ["Content-Length: -1"],
    ["Content-Length: +1"],
    ["Content-Length: 1_0"],
    ["Content-Length: 0x1"],
    ["Content-Length: 1 1"],
    ["Content-Length: 1", "Content-Length: 2"],
    ["Content-Length: " + "9" * 5000],
]


def test_a_length_that_is_none_is_refused_in_json(served: Served):
    for lines in NO_LENGTHS:
        data = served.request(*lines, token=served.token, body=served.body or b"x")
        code, body = status(served, data)
        assert code in (400, 413), lines
        assert "error" in json.loads(body)
    assert served.is_answered()


def test_other_protocols_get_an_error_in_json_or_nothing(served: Served):
    tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n"
    for data in (tls, b"\r\n", b"GET\r\n\r\n", b"GET /"):
        with served.connect() as made:
            made.sendall(data)
            made.shutdown(socket.SHUT_WR)
            answer = b""
            while part := made.recv(2**16):
                answer += part
        assert not answer or "error" in json.loads(answer.split(b"\r\n\r\n")[-1])
    assert served.is_answered()


def test_an_idle_client_outlasts_strangers(served: Served, monkeypatch):
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(served.connect())
        kept.sendall(served.request(token=served.token))
        answer = http.client.HTTPResponse(kept)
        answer.begin()
        assert answer.status == 200
        answer.read()
        if answer.will_close:
            return  # a mirror answers once
        strangers = [stack.enter_context(served.connect()) for _ in range(10 * MOST)]
        until(lambda: sum(map(is_closed, strangers)) >= 9 * MOST)
        kept.sendall(served.request(token=served.token))
        answer = http.client.HTTPResponse(kept)
        answer.begin()
        assert answer.status == 200
