"""A server with a fake engine on a real port, and a client of plain sockets."""

import contextlib
import dataclasses
import http.client
import json
import queue
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from mjax.cli import listening
from mjax.data.tokenizers import BytesTokenizer
from mjax.generate.server.limits import Limits
from mjax.generate.server.prompts import Served
from mjax.generate.server.serving import ModelServer
from tests.generate.server.fake_engine import FakeEngine

NAME = "tiny"
CHAT = [{"role": "user", "content": "hi"}]


def encode_chat(messages: Any) -> list[int]:
    """Stand in for a chat template: refuse messages that a template may refuse."""
    if messages[0]["content"] == "refuse me":
        raise ValueError("conversation roles must alternate, line 3")
    text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
    return list(text.encode())


def served(engine: FakeEngine, limits: Limits, **changes: Any) -> Served:
    """Describe what a fake engine serves."""
    fields: dict[str, Any] = {
        "name": NAME,
        "created_s": 1_700_000_000,
        "tokenizer": BytesTokenizer(),
        "vocab_size": 257,
        "max_len": engine.max_len,
        "num_slots": engine.slots,
        "limits": limits,
        "encode_text": str.encode,
        "encode_chat": encode_chat,
    }
    return Served(**(fields | changes))


@dataclasses.dataclass(kw_only=True)
class Answer:
    """An answer of the server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON, without NaN."""
        return json.loads(self.body, parse_constant=_refuse)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the answer, which must have every field."""
        (error,) = self.json.values()
        assert set(error) == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The chunks of a stream, with the end mark as text."""
        return events(self.body.decode())


def events(text: str) -> list[Any]:
    """Read server-sent events."""
    parts = text.split("\n\n")
    assert parts.pop() == "", "the last event is not complete"
    found = []
    for part in parts:
        assert part.startswith("data: "), part
        data = part.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@dataclasses.dataclass(kw_only=True)
class Running:
    """A running server and its clients."""

    server: ModelServer
    engine: FakeEngine
    port: int
    news: "queue.SimpleQueue[str]"
    _sent: list[socket.socket] = dataclasses.field(default_factory=list)

    def close(self) -> None:
        """Close all connections of clients."""
        for sent in self._sent:
            sent.close()

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        method: str | None = None,
    ) -> Answer:
        """Send one request; a body other than bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(
                method or ("GET" if body is None else "POST"),
                path,
                None if body is None else data,
                {"content-type": "application/json"} | (headers or {}),
            )
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(status=answer.status, headers=found, body=answer.read())

    def complete(self, **fields: Any) -> Answer:
        """Request a completion."""
        return self.ask("/v1/completions", {"model": NAME, "prompt": "ab"} | fields)

    def chat(self, **fields: Any) -> Answer:
        """Request a chat answer."""
        return self.ask(
            "/v1/chat/completions", {"model": NAME, "messages": CHAT} | fields
        )

    def send(self, *, buffer_bytes: int | None = None, **fields: Any) -> socket.socket:
        """Send a request for a completion without waiting for the answer."""
        body = json.dumps({"model": NAME, "prompt": "ab"} | fields).encode()
        sent = socket.socket()
        sent.settimeout(20)
        self._sent.append(sent)
        if buffer_bytes is not None:
            sent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        sent.connect(("127.0.0.1", self.port))
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        sent.sendall(head.encode() + body)
        return sent

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        until = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < until, "it never came to be"
            time.sleep(0.002)


@contextlib.contextmanager
def running(
    engine: FakeEngine | None = None,
    limits: Limits | None = None,
    *,
    tokens: frozenset[str] = frozenset(),
    **changes: Any,
) -> Iterator[Running]:
    """Run a server during a test."""
    engine = engine or FakeEngine()
    made = listening.bind(
        "127.0.0.1", 0, named="--serve 0", instead=str, default="--serve 0"
    )
    news: queue.SimpleQueue[str] = queue.SimpleQueue()
    server = ModelServer(
        made,
        served(engine, limits or Limits(), **changes),
        engine,
        tokens=tokens,
        on_news=lambda: news.put("ended"),
    )
    found = Running(server=server, engine=engine, port=made.getsockname()[1], news=news)
    try:
        yield found
    finally:
        found.close()
        engine.may_step.set()
        server.close()
