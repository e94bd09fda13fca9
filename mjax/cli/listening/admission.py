"""Limits on the connections of a server, so that strangers cannot use it up.

Input: connections as they open, and their progress. Output: calls that close some of
them. Every server of mjax passes its connections through an `Admission`. It does no
input or output, and may be used by several threads.

A peer is authenticated once a request of it was permitted. It is busy while the server
works on its request, and otherwise waits for bytes of its client. Only waiting peers
are closed:

- one that does not authenticate within `LIMIT_S`, however slowly it sends, or that
  sends more than `first_bytes` before;
- the one that waits for longest, if more than `MOST_UNAUTHENTICATED` are not
  authenticated, or more connections are open than the process may open files;
- the one that has sent most, if the unfinished requests exceed `MOST_WAITING_BYTES`.
"""

import heapq
import resource
import select
import threading
import time
from collections.abc import Callable, Iterable

MOST_UNAUTHENTICATED = 512
"""Chosen: on a server with threads each takes 0.1 MiB, and a burst of connections may
precede the bytes of an honest client."""
LIMIT_S = 10.0
"""Chosen: a client sends its request when it connects, so it needs a few round trips
and two losses of a packet."""
MOST_WAITING_BYTES = 128 * 2**20
_CHECKED_BYTES = 2**18
"""The sum of all requests is compared with `MOST_WAITING_BYTES` whenever a request has
grown by this much: `MOST_UNAUTHENTICATED` smaller ones do not exceed it."""
_FILES = 256
"""Files that a process may open for other purposes than connections."""
_LEAST = 64
_TRIED = 16


class Admission:
    """The open connections of one server."""

    def __init__(self, *, first_bytes: int = 2**16) -> None:
        """Begin without connections.

        Args:
          first_bytes: maximum number of bytes that a peer may send before it is
            authenticated.
        """
        self._first_bytes = first_bytes
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = 2**20 if soft == resource.RLIM_INFINITY else soft - _FILES
        self._most = max(self._most, _LEAST)
        self._lock = threading.Lock()
        self._peers: set[Peer] = set()
        self._unauthenticated: set[Peer] = set()

    def enter(self, fileno: Callable[[], int], close: Callable[[], None]) -> "Peer":
        """Admit a new connection, and close others if there are too many.

        Args:
          fileno: returns the descriptor of the connection; -1 once it is closed.
          close: closes it without waiting; may be called by another thread.
        """
        peer = Peer(self, fileno, close)
        with self._lock:
            if len(self._unauthenticated) >= MOST_UNAUTHENTICATED:
                self._close_oldest(self._unauthenticated)
            self._peers.add(peer)
            if len(self._peers) > self._most and not (
                self._close_oldest(self._unauthenticated)
                or self._close_oldest(self._peers - {peer})
            ):
                self._close(peer)
            else:
                self._unauthenticated.add(peer)
        return peer

    def sweep(self) -> None:
        """Close peers that have not authenticated in time; call it every second.

        After a pause of the process, the bytes of its clients may still be unread.
        """
        until_s = time.monotonic() - LIMIT_S
        with self._lock:
            for peer in _waiting(self._unauthenticated):
                if peer.since_s < until_s and not peer.has_unread():
                    self._close(peer)

    def _close_oldest(self, peers: Iterable["Peer"]) -> bool:
        """Close the peer that waits for longest; return whether there is one.

        A peer whose bytes have arrived is spared: they are about to be read. If this
        holds for the oldest ones, it holds for a moment, and nothing is closed.
        """
        oldest = heapq.nsmallest(_TRIED, _waiting(peers), key=lambda one: one.since_s)
        for peer in oldest:
            if not peer.has_unread():
                self._close(peer)
                return True
        return False

    def _close(self, peer: "Peer") -> None:
        self._forget(peer)
        peer.is_closed = True
        peer.close()

    def _forget(self, peer: "Peer") -> None:
        self._peers.discard(peer)
        self._unauthenticated.discard(peer)

    # The methods below are for `Peer`.

    def count(self, peer: "Peer", num_bytes: int) -> None:
        """Add received bytes; close the peer, or the largest, if they are too many."""
        before, peer.num_bytes = peer.num_bytes, peer.num_bytes + num_bytes
        with self._lock:
            is_stranger = peer in self._unauthenticated
            if is_stranger and peer.num_bytes > self._first_bytes:
                self._close(peer)
            elif peer.num_bytes // _CHECKED_BYTES > before // _CHECKED_BYTES:
                # An agent of a launch is busy for ever, and there are thousands.
                waiting = _waiting(
                    self._unauthenticated if is_stranger else self._peers
                )
                if sum(peer.num_bytes for peer in waiting) > MOST_WAITING_BYTES:
                    self._close(max(waiting, key=lambda peer: peer.num_bytes))

    def authenticate(self, peer: "Peer") -> None:
        """Move a peer to the authenticated ones."""
        with self._lock:
            self._unauthenticated.discard(peer)

    def leave(self, peer: "Peer") -> None:
        """Remove a peer whose connection has ended."""
        with self._lock:
            self._forget(peer)


class Peer:
    """One connection of an `Admission`."""

    def __init__(
        self,
        admission: Admission,
        fileno: Callable[[], int],
        close: Callable[[], None],
    ) -> None:
        """Store the arguments; `Admission.enter` makes peers."""
        self._admission, self._fileno, self.close = admission, fileno, close
        self.is_busy = self.is_closed = False
        self.num_bytes = 0
        """Bytes of the current request."""
        self.since_s = time.monotonic()
        """When it connected, or its last answer ended."""

    def count(self, num_bytes: int) -> None:
        """Note received bytes."""
        self._admission.count(self, num_bytes)

    def authenticate(self) -> None:
        """Note that its client may use the server."""
        self._admission.authenticate(self)

    def begin(self) -> None:
        """Note that the server works on its request."""
        self.is_busy = True

    def wait(self) -> None:
        """Note that the server waits for the rest of its request."""
        self.is_busy = False

    def rest(self) -> None:
        """Note that its request is answered."""
        self.is_busy, self.num_bytes, self.since_s = False, 0, time.monotonic()

    def leave(self) -> None:
        """Note that its connection has ended."""
        self._admission.leave(self)

    def has_unread(self) -> bool:
        """Return whether bytes, or the end of the connection, wait to be read."""
        descriptor = self._fileno()
        if descriptor < 0:  # another thread has closed it
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))


def _waiting(peers: Iterable[Peer]) -> list[Peer]:
    return [peer for peer in peers if not peer.is_busy]
