"""Start and stop an ingester as one unit: store, HTTP, NATS.

Input: addresses. Output: an open store that receives batches, as `python -m
mjax.observe ingest` runs it.
"""

import contextlib
import os
import queue
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mjax.observe.store.base import open_store
from mjax.observe.store.ingester import Ingester
from mjax.observe.store.retention import Keep, Sweeper
from mjax.observe.stream import gauges
from mjax.observe.stream.http_server import Server

FOLDER = "observe"
"""Folder in the work dir with the database, the socket and the token."""


class Stop:
    """Whether a signal has requested the end; for use by the main thread.

    A handler may run while the main thread is inside `wait`. Setting a
    `threading.Event` there waits for a lock that the main thread holds; putting into a
    SimpleQueue does not.
    """

    def __init__(self) -> None:
        """Start without a signal."""
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_set = False

    def note(self, number: int, _: object) -> None:
        """Handle a signal."""
        self._signals.put(number)

    def is_set(self) -> bool:
        """Return whether a signal has arrived."""
        return self._is_set or not self._signals.empty()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a signal or for some seconds; return whether one has arrived."""
        if not self._is_set:
            with contextlib.suppress(queue.Empty):
                self._signals.get(timeout=timeout_s)
                self._is_set = True
        return self._is_set


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[Stop]:
    """Yield a flag that is set by SIGTERM and Ctrl-C."""
    stop = Stop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, stop.note) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class IngestService:
    """Owns a store, and writes incoming batches, until `close`."""

    def __init__(
        self,
        *,
        store: str,
        listen: str,
        token: str = "",
        nats: str | None = None,
        threads: int = 2,
        keep: Keep | None = None,
        compact: bool = False,
        say: Callable[[str], None],
    ) -> None:
        """Open the store and begin to listen.

        Args:
          store: path of a DuckDB file, or postgresql://...
          listen: unix:PATH or HOST:PORT.
          token: token that requests on a port must have.
          nats: NATS server from which to take batches as well, nats://HOST:PORT.
          threads: number of DuckDB threads.
          keep: time for which rows are kept; None: for ever.
          compact: whether to return the space of deleted rows to the disk first.
          say: function that prints a message.
        Raises:
          ValueError: an address cannot be used.
          StoreGoneError: the database is unreachable.
        """
        self.store = open_store(store, threads=threads)
        if compact:
            self._compact(say)
        self.ingester = Ingester(self.store)
        self._source = self._sweeper = None
        try:
            self._server = Server(
                self.ingester, self.metrics, listen=listen, token=token
            )
            if nats is not None:
                self._source = _nats_source(nats, self.ingester, say)
            if keep is not None:
                self._sweeper = Sweeper(self.store, keep, say)
        except BaseException:
            self.ingester.close()
            self.store.close()
            raise
        self.address = self._server.address

    def metrics(self) -> bytes:
        """Render the current gauges."""
        behind = self.ingester.behind()
        return gauges.render(gauges.read(self.store, behind, time.time_ns()))

    def close(self) -> None:
        """Commit the received batches, and release all resources."""
        if self._sweeper is not None:
            self._sweeper.close()
        if self._source is not None:
            self._source.close()
        self._server.close()
        self.ingester.close()
        self.store.close()

    def _compact(self, say: Callable[[str], None]) -> None:
        try:
            before = self.store.size()
            self.store.compact()
            after = self.store.size()
        except BaseException:
            self.store.close()
            raise
        say(f"the database had {before / 1e6:.1f} MB, and has {after / 1e6:.1f} MB")


def make_token(path: Path) -> str:
    """Return the token in a file; create an absent file that only its owner can read.

    Raises:
      ValueError: it cannot be created or read, or other users may read it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            pass
        else:
            with os.fdopen(file, "w") as text:
                text.write(secrets.token_hex(32) + "\n")
        mode = path.stat().st_mode & 0o777
        token = path.read_text().strip()
    except OSError as error:
        raise ValueError(f"--token-file {path} cannot be used: {error}") from error
    if mode & 0o077:
        raise ValueError(
            f"--token-file {path} has mode {mode:04o}, so other users may read it; "
            "chmod 600"
        )
    if not token:
        raise ValueError(
            f"--token-file {path} is empty; remove it to have a new token made"
        )
    return token


def _nats_source(address: str, ingester: Ingester, say: Callable[[str], None]):
    if not address.startswith("nats://"):
        raise ValueError(f"--nats must be nats://HOST:PORT, got {address}")
    try:
        from mjax.observe.stream.nats_source import NatsSource
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed; pip install 'mjax[observe-scale]'"
        ) from error
    return NatsSource(address, ingester, say)
