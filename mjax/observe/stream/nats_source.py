"""Move batches from NATS JetStream to an ingester.

Input: messages of the stream. Output: batches at the ingester, and acknowledgements
after the commit. It also answers collectors that request the stored size of their
files.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.js.api import AckPolicy, ConsumerConfig

from mjax.observe.store.base import ConflictError, StoreGoneError
from mjax.observe.store.ingester import Ingester
from mjax.observe.stream import wire
from mjax.observe.stream.http_server import marks_answer
from mjax.observe.stream.nats_sink import (
    BATCHES,
    MARKS,
    STREAM,
    connect,
    ensure_stream,
)

_CONSUMER = "mjax-ingest"
_FETCH = 32
"""Number of messages in one fetch. It is half of a transaction of the ingester."""
_ACK_WAIT_S = 5.0
"""Seconds after which an unacknowledged message is delivered again, because its
ingester may have been killed. A repeated message does no harm while it is being
committed."""
_RETRY_S = 0.5
_GAP_S = 0.5
_TRIES = 16
"""Maximum deliveries of a message that would leave a gap after the stored bytes.
Together the deliveries take longer than _ACK_WAIT_S, after which the missing messages
have arrived or are lost. The collector then sends them all again."""


class NatsSource:
    """Feeds an ingester from a NATS server until `close`, in its own thread."""

    def __init__(
        self, address: str, ingester: Ingester, say: Callable[[str], None]
    ) -> None:
        """Start; connecting is retried until the server answers."""
        self._address, self._ingester, self._say = address, ingester, say
        self._loop = asyncio.new_event_loop()
        self._consumer: Any = None
        self._thread = threading.Thread(target=self._run, name="nats", daemon=True)
        self._thread.start()
        self._task: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Stop after the current commit."""
        with contextlib.suppress(RuntimeError):  # the loop has already ended
            self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join()

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._work())
        self._loop.close()

    async def _work(self) -> None:
        """Connect and feed; start again after an error of the server."""
        said = ""
        while True:
            client: Any = None
            try:
                client = await connect(self._address)
                await ensure_stream(client)
                stream = client.jetstream(timeout=10)
                self._consumer = await stream.pull_subscribe(
                    BATCHES,
                    durable=_CONSUMER,
                    stream=STREAM,
                    config=ConsumerConfig(
                        ack_policy=AckPolicy.EXPLICIT, ack_wait=_ACK_WAIT_S
                    ),
                )
                await client.subscribe(MARKS, cb=self._answer)
                said = ""
                await self._feed()
            except (OSError, TimeoutError, nats.errors.Error) as error:
                text = f"{self._address}: {error!r}; trying again"
                if text != said:
                    self._say(text)
                    said = text
                await asyncio.sleep(_RETRY_S)
            finally:
                if client is not None:
                    with contextlib.suppress(Exception):
                        await client.close()

    async def _feed(self) -> None:
        while True:
            try:
                messages = await self._consumer.fetch(_FETCH, timeout=5)
            except (TimeoutError, nats.errors.TimeoutError):
                # No messages, or the server restarted; the answer shows which.
                await self._consumer.consumer_info()
                continue
            await self._settle(messages)

    async def _settle(self, messages: list[Any]) -> None:
        """Commit messages in order, and acknowledge them."""
        found = []
        for message in messages:
            try:
                batches = wire.decode_batches(message.data)
            except ValueError as error:
                self._say(f"a message in {STREAM} is left out: {error}")
                await message.term()
                continue
            found.append((message, batches))
        futures = [self._ingester.submit(batches) for _, batches in found]
        for (message, batches), future in zip(found, futures, strict=True):
            while True:
                try:
                    outcomes = await asyncio.wrap_future(future)
                    break
                except (StoreGoneError, ConflictError) as error:
                    self._say(f"{error}; trying again")
                    await message.in_progress()
                    await asyncio.sleep(_RETRY_S)
                    future = self._ingester.submit(batches)
            verdicts = {outcome.verdict for outcome in outcomes}
            if "gap" not in verdicts:
                await message.ack()
            elif message.metadata.num_delivered < _TRIES:
                await message.nak(delay=_GAP_S)
            else:
                await message.term()

    async def _answer(self, message: Any) -> None:
        """Send a collector the stored size of its files."""
        try:
            request = wire.decode(message.data, wire.MarksRequest)
            info = await self._consumer.consumer_info()
        except (ValueError, TimeoutError, nats.errors.Error):
            return  # the collector asks again
        # Before the marks are read: see wire.MarksAnswer.
        pending = (info.num_pending or 0) + (info.num_ack_pending or 0)
        answer = marks_answer(self._ingester, request, pending)
        await message.respond(wire.encode(answer))
