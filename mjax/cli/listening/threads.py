"""HTTP servers with a thread for each client, and limits on the connections.

Input: a listening socket, and a handler class. Output: answers until `close`. One
thread accepts connections and reads the head of the first request; a connection gets a
thread of its own when its head is complete. The token is compared before a body is
read. What is refused here is answered with `{"error": TEXT}`.
"""

import contextlib
import dataclasses
import http
import http.client
import http.server
import io
import json
import logging
import re
import selectors
import socket
import sys
import threading
import time
import traceback
from typing import Any, cast

from mjax.cli.listening import AT_ONCE, is_equal
from mjax.cli.listening.admission import Admission, Peer

_HEAD_BYTES = 2**16
_LINGER_BYTES = 2**18
"""Bytes of a refused request that are read and discarded: the kernel drops the answer
of a connection that is closed with unread bytes."""
_PART_BYTES, _SEND_BYTES = 2**14, 2**20
_SWEEP_S = 1.0
_PAUSE_S = 0.05
"""Pause if the process has no file descriptor for a connection."""
_SIZE = re.compile("[0-9]{1,15}")
_HEAD_ENDS = (b"\n\r\n", b"\n\n")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accepted:
    """A connection."""

    connection: socket.socket
    address: Any
    peer: Peer
    begun: bytearray = dataclasses.field(default_factory=bytearray)
    """Bytes that were read before the connection got a thread."""


class Server:
    """Answers in threads until `close`."""

    def __init__(self, listening: socket.socket, handler: "type[Handler]") -> None:
        """Start answering.

        Args:
          listening: the listening socket; closed with the server.
          handler: answers the requests of one connection.
        """
        self._listening, self._handler = listening, handler
        listening.setblocking(False)
        self._admission = Admission(first_bytes=_HEAD_BYTES)
        self._selector = selectors.DefaultSelector()
        self._ending, self._end = socket.socketpair()
        for made in (listening, self._ending):
            self._selector.register(made, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; answers in progress continue."""
        self._end.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select(_SWEEP_S):
                    if key.fileobj is self._ending:
                        return
                    if key.data is None:
                        self._accept()
                    else:
                        self._read(key.data)
                self._admission.sweep()
        finally:
            for key in [*self._selector.get_map().values()]:
                cast(socket.socket, key.fileobj).close()
            self._selector.close()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                _log.debug("cannot accept a connection: %s", error)
                time.sleep(_PAUSE_S)
                return
            connection.setblocking(False)
            peer = self._admission.enter(
                connection.fileno, lambda made=connection: _shut(made)
            )
            accepted = Accepted(connection=connection, address=address, peer=peer)
            self._selector.register(connection, selectors.EVENT_READ, accepted)

    def _read(self, accepted: Accepted) -> None:
        """Read a part of a head; start a thread when it is complete."""
        try:
            data = accepted.connection.recv(_PART_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        begin = max(0, len(accepted.begun) - 2)
        accepted.begun.extend(data)
        accepted.peer.count(len(data))
        is_over = not data or accepted.peer.is_closed
        if not is_over and all(accepted.begun.find(x, begin) < 0 for x in _HEAD_ENDS):
            return
        self._selector.unregister(accepted.connection)
        if is_over:
            _close(accepted)
            return
        thread = threading.Thread(target=self._answer, args=[accepted], daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads
            _log.debug("cannot start a thread: %s", error)
            _close(accepted)

    def _answer(self, accepted: Accepted) -> None:
        try:
            self._handler(accepted)
        except OSError as error:
            _log.debug("%s left before its answer (%s)", accepted.address, error)
        except Exception as error:  # a bug must not end more than its connection
            traceback.print_exception(error, file=sys.stderr)
        finally:
            _close(accepted)


def _shut(connection: socket.socket) -> None:
    """Let the thread that reads from a connection find its end."""
    with contextlib.suppress(OSError):  # the client has closed it
        connection.shutdown(socket.SHUT_RDWR)


def _close(accepted: Accepted) -> None:
    accepted.peer.leave()
    with contextlib.suppress(OSError):
        accepted.connection.shutdown(socket.SHUT_WR)
    accepted.connection.close()


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

    def __init__(self, accepted: Accepted) -> None:
        """Answer the requests of a connection."""
        self._accepted, self._peer = accepted, accepted.peer
        super().__init__(accepted.connection, accepted.address, cast(Any, None))

    def setup(self) -> None:
        """Put the bytes that were read already before the others."""
        super().setup()
        self.rfile = io.BufferedReader(_Stream(self._accepted))

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


class _Stream(io.RawIOBase):
    """The bytes of a connection, from its beginning."""

    def __init__(self, accepted: Accepted) -> None:
        super().__init__()
        self._begun, self._connection = accepted.begun, accepted.connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._begun:
            return self._connection.recv_into(buffer)
        num = min(len(buffer), len(self._begun))
        buffer[:num] = self._begun[:num]
        del self._begun[:num]
        return num
