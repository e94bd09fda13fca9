"""Send batches to NATS JetStream, from which an ingester takes them.

Input: batches. Output: messages in a stream on disk. The ingester deletes a message
after its commit. An accepted batch is only queued; on request, the ingester reports
over the same server how much of each file is stored.
"""

import asyncio
import concurrent.futures
import contextlib
import hashlib
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import nats
import nats.errors
import nats.js.errors
from nats.js.api import (
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from mjax.observe.store.batches import MAX_BYTES, Batch, Outcome
from mjax.observe.stream import wire
from mjax.observe.stream.sinks import SinkGoneError

STREAM = "MJAX_OBSERVE"
BATCHES = "mjax.observe.batches"
MARKS = "mjax.observe.marks"
QUEUE_BYTES = 2 * 2**30
"""Maximum size of the stream in bytes. The stream holds a few hundred million
compressed spans. If it is full, collectors wait and the data stays in the files."""
_DUPLICATES_S = 600.0
"""Seconds for which the server remembers message ids. It is longer than the restart of
a collector; the store recognises later duplicates."""
_TIMEOUT_S = 10


class NatsSink:
    """A stream of NATS JetStream; for use by one thread."""

    is_queue = True

    def __init__(self, address: str) -> None:
        """Start the thread for the server connection; it connects when needed."""
        self._address = address
        self._client: Any = None
        self._has_stream = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="nats", daemon=True
        )
        self._thread.start()

    def marks(self, request: wire.MarksRequest) -> wire.MarksAnswer:
        """Request the stored size of the files; raises SinkGoneError."""
        data = self._wait(self._request(wire.encode(request)))
        try:
            return wire.decode(data, wire.MarksAnswer)
        except ValueError as error:
            raise SinkGoneError(
                f"an ingester at {self._address} gave an invalid answer: {error}"
            ) from error

    def send(self, batches: Sequence[Batch], again: int) -> list[Outcome]:
        """Queue batches; raises SinkGoneError if any of them is refused."""
        self._wait(self._publish(batches, again))
        return [_queued(batch) for batch in batches]

    def close(self) -> None:
        """Disconnect and end the thread."""
        if self._client is not None:
            with contextlib.suppress(SinkGoneError):
                self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout=4 * _TIMEOUT_S)
        except nats.errors.NoRespondersError as error:
            raise SinkGoneError(
                f"no ingester answers at {self._address}; start python -m mjax.observe "
                f"ingest --nats {self._address}"
            ) from error
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise SinkGoneError(f"{self._address} does not answer") from error
        except (OSError, TimeoutError, nats.errors.Error) as error:
            raise SinkGoneError(f"{self._address}: {error!r}") from error

    async def _request(self, data: bytes) -> bytes:
        client = await self._connected()
        return (await client.request(MARKS, data, timeout=_TIMEOUT_S)).data

    async def _publish(self, batches: Sequence[Batch], again: int) -> None:
        stream = (await self._connected()).jetstream(timeout=_TIMEOUT_S)
        sends = []
        for group in _groups(batches):
            name = {"Nats-Msg-Id": _message_id(group, again)}
            body = wire.encode_batches(group)
            sends.append(stream.publish(BATCHES, body, headers=name, stream=STREAM))
        for taken in await asyncio.gather(*sends, return_exceptions=True):
            if isinstance(taken, BaseException):
                self._has_stream = False
                raise taken

    async def _connected(self) -> Any:
        if self._client is None or self._client.is_closed:
            self._client = await connect(self._address)
        if not self._has_stream:
            await ensure_stream(self._client)
            self._has_stream = True
        return self._client


async def connect(address: str) -> Any:
    """Connect; the client reconnects by itself when the server returns."""
    return await nats.connect(
        address,
        connect_timeout=5,
        reconnect_time_wait=0.5,
        max_reconnect_attempts=-1,
        allow_reconnect=True,
        error_cb=_ignore,
    )


async def ensure_stream(client: Any) -> None:
    """Create the stream if it is absent."""
    stream = client.jetstream(timeout=_TIMEOUT_S)
    try:
        await stream.stream_info(STREAM)
    except nats.js.errors.NotFoundError:
        await stream.add_stream(
            StreamConfig(
                name=STREAM,
                subjects=[BATCHES],
                retention=RetentionPolicy.WORK_QUEUE,
                storage=StorageType.FILE,
                discard=DiscardPolicy.NEW,
                max_bytes=QUEUE_BYTES,
                duplicate_window=_DUPLICATES_S,
            )
        )


async def _ignore(error: Exception) -> None:
    """Ignore the error: the failing call raises it."""


def _groups(batches: Sequence[Batch]) -> Iterator[list[Batch]]:
    """Yield groups of batches, each of a size that the server accepts."""
    group: list[Batch] = []
    size = 0
    for batch in batches:
        if group and size + len(batch.data) > MAX_BYTES:
            yield group
            group, size = [], 0
        group.append(batch)
        size += len(batch.data)
    if group:
        yield group


def _message_id(batches: Sequence[Batch], again: int) -> str:
    places = [(b.run, b.source, b.revision, b.start, b.end) for b in batches]
    return hashlib.sha256(repr((again, places)).encode()).hexdigest()


def _queued(batch: Batch) -> Outcome:
    num_lines = batch.data.count(b"\n") if batch.skipped is None else 1
    return Outcome(
        run=batch.run,
        source=batch.source,
        verdict="stored",
        revision=batch.revision,
        at_byte=batch.end,
        lines=batch.first_line - 1 + num_lines,
        tail=batch.tail,
    )
