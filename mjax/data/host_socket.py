"""How the processes of a host meet: one listens, the others bring a wish.

Enters: a wish (JSON) of each process that connects. Leaves: an answer (JSON) with open
file descriptors, and a connection that ends when the process at its other end does.

The socket is a Unix socket of the abstract kind (Linux): its name is no file, and is
gone with the process that listens. Such names can be seen by every user of the machine,
so both sides ask the kernel who is at the other end, and refuse another user.
"""

import json
import os
import secrets
import socket
import struct
import time
from typing import Any

MEET_S = 300
"""Seconds to wait for each other; the processes come here from the same barrier."""

_MESSAGE_BYTES = 1 << 16


def listen() -> socket.socket:
    """Open the socket at which the first process of a host is met."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0mjax-{secrets.token_hex(16)}")
    listener.listen(128)
    return listener


def address(listener: socket.socket) -> str:
    """Return what `connect` needs to find a listener."""
    return listener.getsockname()[1:].decode()


def accept(
    listener: socket.socket, num_guests: int, timeout_s: float = MEET_S
) -> list[tuple[socket.socket, Any]]:
    """Let the other processes in; return the connection and the wish of each.

    Raises:
      RuntimeError: they did not come within timeout_s.
    """
    guests: list[tuple[socket.socket, Any]] = []
    end_s = time.monotonic() + timeout_s
    while len(guests) < num_guests:
        listener.settimeout(max(end_s - time.monotonic(), 0.001))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise RuntimeError(
                f"{num_guests - len(guests)} of the {num_guests} other processes of "
                f"this host did not come for their rows within {timeout_s} s"
            ) from None
        message = connection.recv(_MESSAGE_BYTES) if _is_same_user(connection) else b""
        if message:
            guests.append((connection, json.loads(message)))
        else:
            connection.close()
    return guests


def answer(connection: socket.socket, message: Any, descriptors: list[int]) -> None:
    """Send what a guest came for."""
    socket.send_fds(connection, [json.dumps(message).encode()], descriptors)


def connect(at: str, wish: Any) -> tuple[socket.socket, Any, list[int]]:
    """Bring a wish; return the connection, the answer and its three descriptors.

    Args:
      at: `address` of the listener.
      wish: JSON.
    Raises:
      RuntimeError: nobody is there, or it ended before it answered.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(MEET_S)
    try:
        connection.connect(f"\0{at}")
        if not _is_same_user(connection):
            raise ConnectionRefusedError("another user listens there")
        connection.send(json.dumps(wish).encode())
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
        if len(descriptors) != 3:
            raise ConnectionResetError("it ended without an answer")
    except OSError as error:
        connection.close()
        raise RuntimeError(
            f"the first process of this host does not share its reader: {error}"
        ) from error
    return connection, json.loads(message), descriptors


def _is_same_user(connection: socket.socket) -> bool:
    """Say whether the process at the other end is one of ours."""
    format_ = "3i"  # struct ucred: process, user, group
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(format_)
    )
    return struct.unpack(format_, credentials)[1] == os.getuid()
