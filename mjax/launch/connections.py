"""Lines that a driver reads from thousands of connections.

Enters: bytes. Leaves: calls with whole lines. `asyncio`'s streams wake a task for each
message, and read it into a new buffer of 256 KiB: 37 us a heartbeat, on the core that
watches all hosts. Here all connections of a driver are read into one buffer, and what
comes is handed on at once: 8 us.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from mjax.launch import messages
from mjax.launch.messages import Message

_BUFFER_BYTES = 2**16


class Buffer:
    """Where the connections of one event loop read; each has emptied it at once."""

    def __init__(self) -> None:
        """Begin with nothing in it."""
        self.view = memoryview(bytearray(_BUFFER_BYTES))


class Connection(asyncio.BufferedProtocol):
    """One that has called."""

    def __init__(
        self,
        buffer: Buffer,
        take: Callable[["Connection", bytes], None],
        ended: Callable[["Connection"], None],
    ) -> None:
        """Wait for what it says.

        Args:
          buffer: of all connections.
          take: is given each line, without its end.
          ended: is called once, when nothing more comes.
        """
        self._buffer, self._take, self._ended = buffer, take, ended
        self._rest = bytearray()
        self._transport: asyncio.Transport | None = None
        self.host = ""
        """Whose agent it is, once that is known."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to read."""
        del sizehint
        return self._buffer.view

    def buffer_updated(self, nbytes: int) -> None:
        """Hand on the lines that are whole."""
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
        """Say that it has ended."""
        del exc
        self._ended(self)

    def send(self, message: Message) -> None:
        """Write a message; never wait."""
        if self._transport is not None and not self.is_closing:
            self._transport.write(messages.encode(message))

    @property
    def is_closing(self) -> bool:
        """Whether nothing more is read or written."""
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        """End it, when what was written is sent."""
        if self._transport is not None:
            self._transport.close()
