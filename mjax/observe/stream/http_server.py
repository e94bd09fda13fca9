"""The HTTP side of the ingester: batches, marks, metrics.

Input: requests on a port or a Unix socket. Output: answers. Batches are answered after
their commit. `answer` does not depend on sockets.

| request | answer |
|---|---|
| POST /batches | the result of each batch |
| POST /marks | the stored size of each file |
| GET /metrics | gauges for Prometheus |

On a port every request needs `Authorization: Bearer TOKEN`; a Unix socket has mode 0600
instead. An error is answered with `{"error": TEXT}`.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable
from pathlib import Path

from mjax.cli import listening
from mjax.cli.listening import threads
from mjax.observe.store.base import ConflictError, StoreGoneError
from mjax.observe.store.ingester import Ingester
from mjax.observe.stream import wire

_MAX_REQUEST = 64 * 2**20
"""Maximum size of a request in bytes. 64 batches have 58 MB before compression."""
_COMMIT_S = 60
_IDLE_S = 300
"""Seconds of silence after which a connection is closed; collectors reconnect."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer to an HTTP request."""

    status: int
    body: bytes
    content_type: str = "application/json"


def answer(
    ingester: Ingester,
    metrics: Callable[[], bytes],
    method: str,
    path: str,
    body: bytes,
) -> Answer:
    """Answer one request.

    Args:
      ingester: ingester for batches.
      metrics: function that renders the gauges.
      method: HTTP method.
      path: path of the request.
      body: body of the request.
    """
    match method, path:
        case "POST", "/batches":
            return _guarded(lambda: _take(ingester, body))
        case "POST", "/marks":
            return _guarded(lambda: _marks(ingester, body))
        case "GET", "/metrics":
            kind = "text/plain; version=0.0.4; charset=utf-8"
            return _guarded(
                lambda: Answer(status=200, body=metrics(), content_type=kind)
            )
    return _said(404, f"there is no {method} {path}")


class Server:
    """Answers requests in threads until `close`."""

    def __init__(
        self,
        ingester: Ingester,
        metrics: Callable[[], bytes],
        *,
        listen: str,
        token: str = "",
    ) -> None:
        """Listen.

        Args:
          ingester: ingester for batches.
          metrics: function that renders the gauges.
          listen: HOST:PORT, port 0 for a free one, or unix:PATH.
          token: token that requests must have; empty only for a Unix socket.
        Raises:
          ValueError: the address is invalid, or in use.
        """
        handler = type("Handler", (_Handler,), {"token": token or None})
        handler.respond = staticmethod(
            lambda method, path, body: answer(ingester, metrics, method, path, body)
        )
        if listen.startswith("unix:"):
            bound = _bind_unix(listen.removeprefix("unix:"))
            self.address = listen
        else:
            bound = _bind_port(listen, token)
            host = listen.rpartition(":")[0]
            self.address = f"http://{host}:{bound.getsockname()[1]}"
        self._server = threads.Server(bound, handler)

    def close(self) -> None:
        """Stop listening."""
        self._server.close()


def _bind_port(listen: str, token: str) -> socket.socket:
    host, port = listening.address_of(listen)
    if not token:
        raise ValueError(f"--listen {listen} needs --token-file")
    return listening.bind(
        host,
        port,
        named=f"--listen {listen}",
        instead=lambda other: f"--listen {host}:{other}",
        default="--listen 127.0.0.1:0",
    )


def _bind_unix(path: str) -> socket.socket:
    """Listen on a Unix socket; replace one that a killed process left."""
    if len(path.encode()) > 107:  # sun_path of Linux, unix(7)
        raise ValueError(
            f"--listen unix:{path} is too long, a socket path has at most 107 bytes; "
            "use a shorter one"
        )
    before = os.umask(0o177)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise ValueError(
                        f"--listen unix:{path} is in use by another ingester; stop it "
                        "first"
                    )
            Path(path).unlink()
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as stack:
            stack.callback(made.close)
            made.bind(path)
            made.listen(listening.BACKLOG)
            stack.pop_all()
        return made
    except OSError as error:
        raise ValueError(
            f"--listen unix:{path} cannot be used: {error.strerror}; give another path"
        ) from error
    finally:
        os.umask(before)


class _Handler(threads.Handler):
    """Writes the answers of `answer`."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    denial = (401, "the token is wrong; give --token-file")
    most_bytes = _MAX_REQUEST
    respond: Callable[[str, str, bytes], Answer]

    def do_GET(self) -> None:
        """Answer a GET."""
        self._answer()

    def do_POST(self) -> None:
        """Answer a POST."""
        self._answer()

    def _answer(self) -> None:
        made = self.respond(self.command, self.path, self.body)
        self.write(made.status, made.body, made.content_type)


def _take(ingester: Ingester, body: bytes) -> Answer:
    batches = wire.decode_batches(body)
    outcomes = ingester.submit(batches).result(timeout=_COMMIT_S)
    return Answer(status=200, body=wire.encode(wire.SendAnswer(outcomes=outcomes)))


def _marks(ingester: Ingester, body: bytes) -> Answer:
    request = wire.decode(body, wire.MarksRequest)
    return Answer(status=200, body=wire.encode(marks_answer(ingester, request, 0)))


def marks_answer(
    ingester: Ingester, request: wire.MarksRequest, pending: int
) -> wire.MarksAnswer:
    """Answer a collector; `pending` messages were queued before its request."""
    if request.collector:
        ingester.note_behind(request.collector, request.behind_bytes)
    return wire.MarksAnswer(
        marks=ingester.marks(request.run, request.sources),
        pending=pending,
        refused=ingester.refused(request.run, request.sources),
    )


def _guarded(action: Callable[[], Answer]) -> Answer:
    try:
        return action()
    except ValueError as error:
        return _said(400, str(error))
    except concurrent.futures.TimeoutError:
        return _said(503, f"the database took more than {_COMMIT_S} s")
    except (StoreGoneError, ConflictError) as error:
        return _said(503, str(error))


def _said(status: int, text: str) -> Answer:
    return Answer(status=status, body=wire.encode(wire.ErrorAnswer(error=text)))
