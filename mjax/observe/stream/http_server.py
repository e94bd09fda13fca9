"""The HTTP side of the ingester: batches, marks, metrics.

Input: requests on a port or a Unix socket. Output: answers. Batches are answered after
their commit. `answer` does not depend on sockets.

| request | answer |
|---|---|
| POST /batches | the result of each batch |
| POST /marks | the stored size of each file |
| GET /metrics | gauges for Prometheus |

On a port every request needs `Authorization: Bearer TOKEN`; a Unix socket has mode 0600
instead.
"""

import concurrent.futures
import dataclasses
import hmac
import http.server
import os
import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mjax.observe.store.base import ConflictError, StoreGoneError
from mjax.observe.store.ingester import Ingester
from mjax.observe.stream import wire

_MAX_REQUEST = 64 * 2**20
"""Maximum size of a request in bytes. The value was picked by judgement: 64 batches
have 58 MB before compression."""
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
        handler = type("Handler", (_Handler,), {"token": token})
        handler.respond = staticmethod(
            lambda method, path, body: answer(ingester, metrics, method, path, body)
        )
        try:
            if listen.startswith("unix:"):
                self._server = _unix_server(listen.removeprefix("unix:"), handler)
                self.address = listen
            else:
                host, _, port = listen.rpartition(":")
                if not host or not port.isdigit():
                    raise ValueError(
                        f"--listen must be HOST:PORT or unix:PATH, got {listen}"
                    )
                if not token:
                    raise ValueError(f"--listen {listen} needs --token-file")
                self._server = _PortServer((host, int(port)), handler)
                self.address = f"http://{host}:{self._server.server_address[1]}"
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"--listen {listen} cannot be used ({error}); use another one"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="ingest-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _PortServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024


class _UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 1024


def _unix_server(path: str, handler: Any) -> _UnixServer:
    """Listen on a Unix socket; replace one that a killed process left."""
    if len(path.encode()) > 107:  # sun_path of Linux, unix(7)
        raise ValueError(
            f"--listen unix:{path} is too long, a socket path has at most 107 bytes; "
            "use a shorter one"
        )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if Path(path).is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(path) == 0:
                raise ValueError(
                    f"--listen unix:{path} is in use by another ingester; stop it first"
                )
        Path(path).unlink()
    before = os.umask(0o177)
    try:
        return _UnixServer(path, handler)
    finally:
        os.umask(before)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Reads a request, checks the token, and writes the answer."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    disable_nagle_algorithm = False
    token = ""
    respond: Callable[[str, str, bytes], Answer]

    def do_GET(self) -> None:
        """Answer a GET."""
        self._answer(b"")

    def do_POST(self) -> None:
        """Answer a POST."""
        size = self.headers.get("Content-Length", "")
        if not size.isdigit() or int(size) > _MAX_REQUEST:
            self.close_connection = True
            self._write(_said(413, f"Content-Length must be at most {_MAX_REQUEST}"))
            return
        body = self.rfile.read(int(size))
        if len(body) != int(size):
            self.close_connection = True
            return
        self._answer(body)

    def address_string(self) -> str:
        """Return the client's address; a Unix socket has none."""
        return "local"

    def log_message(self, format: str, *values: Any) -> None:
        """Log nothing, because collectors send a request every second."""

    def _answer(self, body: bytes) -> None:
        given = self.headers.get("Authorization", "")
        expected = f"Bearer {self.token}"
        if self.token and not hmac.compare_digest(given.encode(), expected.encode()):
            self._write(_said(401, "the token is wrong; give --token-file"))
            return
        self._write(self.respond(self.command, self.path, body))

    def _write(self, found: Answer) -> None:
        self.send_response(found.status)
        self.send_header("Content-Type", found.content_type)
        self.send_header("Content-Length", str(len(found.body)))
        self.end_headers()
        self.wfile.write(found.body)


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
    return Answer(status=status, body=text.encode(), content_type="text/plain")
