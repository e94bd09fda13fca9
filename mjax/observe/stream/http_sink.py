"""Send batches to an ingester over HTTP, on a port or a Unix socket.

Input: batches. Output: the ingester's answer, which comes after the commit.
"""

import http.client
import socket
import urllib.parse
from collections.abc import Sequence
from typing import Any

from mjax.observe.store.batches import Batch, Outcome
from mjax.observe.stream import wire
from mjax.observe.stream.sinks import SinkGoneError

_TIMEOUT_S = 90
"""Timeout of a request. It is longer than the ingester waits for a commit."""


class HttpSink:
    """An ingester that is reached over HTTP; for use by one thread."""

    is_queue = False

    def __init__(self, address: str, token: str) -> None:
        """Set the address; connections are made when needed.

        Raises:
          ValueError: the address has no host or port.
        """
        self._address = address
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._connection = _connection(address)

    def marks(self, request: wire.MarksRequest) -> wire.MarksAnswer:
        """Request the stored size of the files; raises SinkGoneError."""
        return self._post("/marks", wire.encode(request), wire.MarksAnswer)

    def send(self, batches: Sequence[Batch], again: int) -> list[Outcome]:
        """Send batches; raises SinkGoneError."""
        body = wire.encode_batches(batches)
        answer = self._post("/batches", body, wire.SendAnswer)
        if len(answer.outcomes) != len(batches):
            raise SinkGoneError(f"{self._address} answered for other batches")
        return [*answer.outcomes]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _post(self, path: str, body: bytes, kind: Any) -> Any:
        try:
            self._connection.request("POST", path, body, self._headers)
            answer = self._connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise SinkGoneError(
                f"{self._address} does not answer: {error!r}"
            ) from error
        if answer.status != 200:
            self._connection.close()
            text = " ".join(_error(data).split())[:300]
            raise SinkGoneError(f"{self._address} answered {answer.status}: {text}")
        try:
            return wire.decode(data, kind)
        except ValueError as error:
            raise SinkGoneError(
                f"{self._address} is not an ingester: {error}"
            ) from error


def _error(data: bytes) -> str:
    """Return the text of an error; servers other than ingesters do not send JSON."""
    try:
        return wire.decode(data, wire.ErrorAnswer).error
    except ValueError:
        return data.decode(errors="replace")


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._path)


def _connection(address: str) -> http.client.HTTPConnection:
    if address.startswith("unix:"):
        return _UnixConnection(address.removeprefix("unix:"))
    try:
        parts = urllib.parse.urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise ValueError(f"--to must be http://HOST:PORT, got {address}")
    return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
