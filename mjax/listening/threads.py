"""HTTP servers with a thread for each connection, and limits on the connections.

Input: a listening socket, and a handler class. Output: answers until `close`. The token
of a request is compared before its body is read. What is refused here is answered with
`{"error": TEXT}`.
"""

import contextlib
import http
import http.client
import http.server
import io
import json
import logging
import re
import socket
import socketserver
import sys
import threading
from typing import Any

from mjax.listening import is_equal
from mjax.listening.admission import Admission, Peer

_HEAD_BYTES = 2**16
_LINGER_BYTES = 2**18
"""Bytes of a refused request that are read and discarded: the kernel drops the answer
of a connection that is closed with unread bytes."""
_PART_BYTES, _SEND_BYTES = 2**14, 2**20
_SIZE = re.compile("[0-9]{1,15}")
_log = logging.getLogger(__name__)


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Answers in threads until `close`."""

    daemon_threads = True

    def __init__(
        self, listening: socket.socket, handler: "type[Handler]", *, poll_s: float = 0.5
    ) -> None:
        """Start answering.

        Args:
          listening: the listening socket; closed with the server.
          handler: answers the requests of one connection.
          poll_s: seconds within which the server notices `close`.
        """
        name = listening.getsockname()
        super().__init__(name, handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self._admission = Admission()
        self.peers: dict[socket.socket, Peer] = {}
        """Peers of the open connections."""
        self._thread = threading.Thread(
            target=self.serve_forever, args=(poll_s,), name="http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening; answers in progress continue."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Admit a connection and start its thread."""
        self.peers[request] = self._admission.enter(
            request.fileno, lambda: _end(request)
        )
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.peers.pop(request).leave()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that have not authenticated in time."""
        self._admission.sweep()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log in one line that a client has left before its answer."""
        error = sys.exception()
        if isinstance(error, OSError):
            _log.debug("%s left before its answer (%s)", client_address, error)
        else:
            super().handle_error(request, client_address)


def _end(connection: socket.socket) -> None:
    """Let the thread of a connection read its end."""
    with contextlib.suppress(OSError):  # the client has closed it
        connection.shutdown(socket.SHUT_RDWR)


class Handler(http.server.BaseHTTPRequestHandler):
    """Reads requests, and refuses those without permission.

    Subclasses implement `do_GET` and so on, which run for permitted requests only.
    """

    token: str | None = None
    """Token that requests must have; None: every client is permitted."""
    denial: tuple[int, str] = (401, "the token is wrong")
    """Status and text of the answer to a wrong token."""
    most_bytes = 0
    """Maximum size of a body."""
    body = b""
    """Body of the current request."""
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup(self) -> None:
        """Find the peer of the connection."""
        super().setup()
        self._peer = self.server.peers[self.connection]

    def handle_one_request(self) -> None:
        """Answer one request."""
        super().handle_one_request()
        self._peer.rest()

    def parse_request(self) -> bool:
        """Read a request; return whether it is permitted."""
        whole, head = self.rfile, _Head(self.rfile)
        self.rfile = head  # pyright: ignore[reportAttributeAccessIssue]
        try:
            is_right = super().parse_request()
        finally:
            self.rfile = whole
        if not is_right:
            return False
        given = self.headers.get("Authorization", "")
        if self.token is not None and not is_equal(given, f"Bearer {self.token}"):
            self.send_error(*self.denial)
            return False
        self._peer.authenticate()
        return self._read_body()

    def _read_body(self) -> bool:
        sizes = self.headers.get_all("Content-Length", [])
        if self.headers.get("Transfer-Encoding") is not None:
            self.send_error(411, "Transfer-Encoding is not supported: send a length")
        elif len(sizes) > 1 or not all(map(_SIZE.fullmatch, sizes)):
            text = ", ".join(sizes)[:100]
            self.send_error(400, f"Content-Length must be one number, got {text!r}")
        elif int(*sizes) > self.most_bytes:
            self.send_error(413, f"Content-Length must be at most {self.most_bytes}")
        else:
            self.body = self.rfile.read(int(*sizes))
            self._peer.begin()
            self.close_connection |= len(self.body) < int(*sizes)
            return len(self.body) == int(*sizes)
        return False

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """Refuse a request and close the connection."""
        del explain
        self.close_connection = True
        text = message or http.HTTPStatus(code).phrase
        self.write(code, json.dumps({"error": text}).encode(), "application/json")
        self.connection.shutdown(socket.SHUT_WR)
        left = _LINGER_BYTES
        while left > 0 and (part := self.connection.recv(_PART_BYTES)):
            left -= len(part)

    def write(self, status: int, body: bytes, kind: str = "") -> None:
        """Write an answer, with its content type if there is one."""
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        view = memoryview(body)  # the connection's time limit is per write
        for start in range(0, len(view), _SEND_BYTES):
            self.wfile.write(view[start : start + _SEND_BYTES])

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: strangers would fill the log."""


class _Head:
    """The part of a request before its body, with a limit on its size."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file, self._left = file, _HEAD_BYTES

    def readline(self, size: int) -> bytes:
        line = self._file.readline(min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong(f"head of more than {_HEAD_BYTES} bytes")
        return line
