"""Read lines from thousands of connections to a driver.

Input: bytes. Output: calls with complete lines. A connection passes an `Admission`, and
may send long lines once it is authenticated. The streams of `asyncio` wake a task
for each message and read it into a new buffer of 256 KiB, which takes 37 us per
heartbeat on the core that watches all hosts. Here all connections of a driver share one
buffer, and data is passed on immediately, which takes 8 us.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from mjax.cli.listening.admission import Admission, Peer
from mjax.launch import messages
from mjax.launch.messages import Message

_BUFFER_BYTES = 2**16


class Buffer:
    """Read buffer of all connections of an event loop, emptied after each read."""

    def __init__(self) -> None:
        """Allocate the buffer."""
        self.view = memoryview(bytearray(_BUFFER_BYTES))


class Connection(asyncio.BufferedProtocol):
    """A connection that a peer has opened."""

    def __init__(
        self,
        buffer: Buffer,
        admission: Admission,
        take: Callable[["Connection", bytes], None],
        ended: Callable[["Connection"], None],
    ) -> None:
        """Store the callbacks.

        Args:
          buffer: buffer that all connections share.
          admission: limits of all connections.
          take: called with each line, without its line end.
          ended: called once, after the last line.
        """
        self._buffer, self._take, self._ended = buffer, take, ended
        self._admission, self._peer = admission, cast(Peer, None)
        self._is_authenticated = False
        self._rest = bytearray()
        self._transport: asyncio.Transport | None = None
        self.host = ""
        """Name of the host of the agent; "" until it is known."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport, for answers."""
        self._transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        self._peer = self._admission.enter(connection.fileno, self._transport.abort)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the shared buffer to read into."""
        del sizehint
        return self._buffer.view

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on complete lines, and keep the rest."""
        if not self._is_authenticated:
            self._peer.count(nbytes)
        *lines, rest = bytes(self._buffer.view[:nbytes]).split(b"\n")
        for line in lines:
            if self.is_closing:
                return
            if self._rest:
                line, self._rest = bytes(self._rest) + line, bytearray()
            self._take(self, line)
        self._rest += rest
        if len(self._rest) > messages.MAX_LINE_BYTES:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report that the connection has ended."""
        del exc
        self._peer.leave()
        self._ended(self)

    def authenticate(self) -> None:
        """Note that the peer may stay silent and send long lines."""
        self._is_authenticated = True
        self._peer.authenticate()
        self._peer.begin()

    def send(self, message: Message) -> None:
        """Write a message, without waiting."""
        if self._transport is not None and not self.is_closing:
            self._transport.write(messages.encode(message))

    @property
    def is_closing(self) -> bool:
        """Whether reading and writing have ended."""
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection after the written data is sent."""
        if self._transport is not None:
            self._transport.close()
