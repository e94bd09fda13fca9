"""Run requests of many clients on one engine, owned by a thread.

Input: engine requests from coroutines. Output: the events of the requests, in order. A
coroutine gets the events of the requests that it sent. Only the engine's thread calls
`submit`, `cancel` and `step`. Everything else here runs in the event loop, so tickets,
capacity and refusals need no locks.

An accepted request ends in one of four ways: it gets its last event, it gets an error,
its client closes it, or its time limit passes. If the engine fails, every ticket gets
an error, and the callback `on_failure` informs the process. `Counts` counts the
requests by how they ended.
"""

import asyncio
import dataclasses
import math
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from mjax.generate.requests import Event, Request
from mjax.generate.server.errors import ApiError, malformed, stopping

_MEAN_WEIGHT = 0.1
"""Weight of the newest answer in the running mean of durations. The result is a mean
over about ten answers."""
_MOST_RETRY_S = 60
_JOIN_S = 5.0
"""Seconds for which `stop` waits at most until the engine's thread has finished its
current step. Not measured."""


@runtime_checkable
class Engine(Protocol):
    """Interface of the token generator, such as `mjax.generate.engine.Engine`."""

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        ...

    @property
    def num_waiting(self) -> int:
        """Number of requests without a slot."""
        ...

    @property
    def num_running(self) -> int:
        """Number of requests in slots."""
        ...

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that cannot be answered; thread-safe."""
        ...

    def submit(self, request: Request) -> int:
        """Queue a request; return its id."""
        ...

    def cancel(self, request_id: int) -> bool:
        """End a request and free its slot; return whether it had one."""
        ...

    def step(self) -> list[Event]:
        """Generate the next tokens of each running request; return their events."""
        ...


@dataclasses.dataclass(kw_only=True)
class Counts:
    """Requests of the engine since the start, by how they ended.

    If no request is open, `accepted` is the sum of the other counts. Only the event
    loop changes `Scheduler.counts`.
    """

    accepted: int = 0
    finished: int = 0
    """Completed with the last event."""
    cancelled_running: int = 0
    """Aborted in a slot: by the client, the time limit, or the end of the grace period.
    """
    cancelled_waiting: int = 0
    """Aborted before getting a slot."""
    failed: int = 0
    """Open when the engine failed."""

    def add(self, other: "Counts") -> None:
        """Add other counts."""
        for field in dataclasses.fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)


type Indexed = tuple[int, Event]
"""An event, with the index of its request in the ticket."""


class Ticket:
    """Accepted requests of one client. Used in the event loop only."""

    def __init__(self, requests: tuple[Request, ...]) -> None:
        """Store the requests; `Scheduler.open` creates tickets."""
        self.requests = requests
        self.opened_s = time.monotonic()
        self._unread: list[Indexed] = []
        self._wake = asyncio.Event()
        self._num_unfinished = len(requests)
        self._error: ApiError | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the last event of each request has arrived."""
        return self._num_unfinished == 0

    @property
    def has_ended(self) -> bool:
        """Whether no more events follow: the ticket is finished, or has failed."""
        return self.is_finished or self._error is not None

    async def read(self) -> list[Indexed]:
        """Wait for events; return all that have arrived, an empty list at the end.

        Raises:
          ApiError: the requests have failed.
        """
        while not self._unread and not self.has_ended:
            self._wake.clear()
            await self._wake.wait()
        if self._error is not None:
            raise self._error
        events, self._unread = self._unread, []
        return events

    def deliver(self, events: list[Indexed]) -> None:
        """Add events of the engine."""
        self._unread += events
        self._num_unfinished -= sum(event.finished is not None for _, event in events)
        self._wake.set()

    def fail(self, error: ApiError) -> None:
        """End an unfinished ticket with an error."""
        if not self.has_ended:
            self._error = error
            self._wake.set()


class Scheduler:
    """Passes requests to the engine, and events to tickets."""

    def __init__(
        self, engine: Engine, *, capacity: int, on_failure: Callable[[], None]
    ) -> None:
        """Start the engine's thread.

        Args:
          engine: the engine; the caller must not use it any more.
          capacity: maximum number of open requests.
          on_failure: called once, in the engine's thread, after the event loop was told
            to fail the open tickets.
        """
        self._engine, self._capacity, self._on_failure = engine, capacity, on_failure
        self._commands: queue.SimpleQueue[tuple[str, Ticket | None]] = (
            queue.SimpleQueue()
        )
        self._by_id: dict[
            int, tuple[Ticket, int]
        ] = {}  # used by the engine's thread only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[Ticket] = set()
        self._empty = asyncio.Event()
        self._refusal: Callable[[], ApiError] | None = None
        self._mean_s = 1.0
        self.num_open = self.num_running = self.num_waiting = 0
        self.counts = Counts()
        self.failure: str | None = None
        """Why the engine has failed; None while it works."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- in the event loop

    def open(self, requests: Sequence[Request]) -> Ticket:
        """Accept all of the requests or none.

        The caller must close the ticket.

        Raises:
          ApiError: 400, the engine refuses a request; 429, too many are open; 500 or
            503, the engine has failed or the server is stopping.
        """
        self._loop = asyncio.get_running_loop()
        self.check_open()
        for request in requests:
            try:
                self._engine.check(request)
            except ValueError as error:
                raise malformed(str(error)) from None
        if self.num_open + len(requests) > self._capacity:
            raise ApiError(
                429,
                f"{self.num_open} of {self._capacity} answers are running or waiting "
                "(limit: --slots plus --queue of this server), and this request needs "
                f"{len(requests)}; try again",
                code="queue_full",
                retry_after_s=self._retry_after_s(),
            )
        ticket = Ticket(tuple(requests))
        self._open.add(ticket)
        self.num_open += len(requests)
        self.counts.accepted += len(requests)
        self._commands.put(("submit", ticket))
        return ticket

    def check_open(self) -> None:
        """Refuse a request if the server no longer accepts any.

        Raises:
          ApiError: 500 or 503.
        """
        if self._refusal is not None:
            raise self._refusal()

    @property
    def state(self) -> str:
        """State of the scheduler: ok, stopping or failed."""
        if self.failure is not None:
            return "failed"
        return "ok" if self._refusal is None else "stopping"

    def close(self, ticket: Ticket) -> None:
        """Free the capacity of a ticket; cancel its unfinished requests."""
        if ticket not in self._open:
            return
        self._open.remove(ticket)
        self.num_open -= len(ticket.requests)
        if ticket.is_finished:
            took_s = time.monotonic() - ticket.opened_s
            self._mean_s += _MEAN_WEIGHT * (took_s - self._mean_s)
        else:
            self._commands.put(("cancel", ticket))
        if not self._open:
            self._empty.set()

    async def drain(self, grace_s: float) -> int:
        """Refuse new requests and wait for the open ones.

        Args:
          grace_s: seconds after which unfinished requests get an error.
        Returns:
          number of tickets that got an error.
        """
        self._refusal = self._refusal or stopping
        try:
            async with asyncio.timeout(grace_s):
                while self._open:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            return self.cut()
        return 0

    def cut(self) -> int:
        """Give an error to each ticket that has not ended; return their number."""
        cut = [ticket for ticket in self._open if not ticket.has_ended]
        for ticket in cut:
            ticket.fail(
                ApiError(
                    503,
                    "the server has stopped before the answer was complete; send the "
                    "request to another server, or later",
                    code="stopped",
                    retry_after_s=10,
                )
            )
        return len(cut)

    def _retry_after_s(self) -> int:
        """Estimate the seconds until there is capacity: an answer's mean duration."""
        return min(max(1, math.ceil(self._mean_s)), _MOST_RETRY_S)

    def _deliver(
        self,
        batches: dict[Ticket, list[Indexed]],
        ended: Counts,
        running: int,
        waiting: int,
    ) -> None:
        self.num_running, self.num_waiting = running, waiting
        self.counts.add(ended)
        for ticket, events in batches.items():
            if ticket in self._open:
                ticket.deliver(events)

    def _fail_all(self, failure: str) -> None:
        def failed() -> ApiError:
            return ApiError(500, failure, code="engine_failed")

        self._refusal = failed
        counts = self.counts
        cancelled = counts.cancelled_running + counts.cancelled_waiting
        counts.failed = counts.accepted - counts.finished - cancelled
        self.num_running = self.num_waiting = 0
        for ticket in self._open:
            ticket.fail(failed())

    # ----------------------------------------------------------- in the engine's thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._hand_out(self._engine.step())
        except BaseException as error:  # any error, because no ticket may wait for ever
            traceback.print_exception(error)
            self.failure = f"the engine has failed: {type(error).__name__}: {error}"
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._fail_all, self.failure)
            self._on_failure()

    def _take_commands(self) -> bool:
        """Execute the pending commands; wait for one if the engine is idle.

        Returns:
          False if the thread must end.
        """
        while True:
            is_idle = self._engine.is_idle
            if is_idle and self._by_id:
                raise RuntimeError(f"{len(self._by_id)} requests never ended")
            try:
                kind, ticket = self._commands.get(block=is_idle)
            except queue.Empty:
                return True
            if ticket is None:
                return False
            if kind == "submit":
                for index, request in enumerate(ticket.requests):
                    self._by_id[self._engine.submit(request)] = ticket, index
            else:
                self._cancel(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        """End the unfinished requests of a ticket."""
        ended = Counts()
        for request_id in [
            i for i, (owner, _) in self._by_id.items() if owner is ticket
        ]:
            if self._engine.cancel(request_id):
                ended.cancelled_running += 1
            else:
                ended.cancelled_waiting += 1
            del self._by_id[request_id]
        self._tell({}, ended)

    def _hand_out(self, events: list[Event]) -> None:
        """Send events to the event loop, in one call for all tickets."""
        batches: dict[Ticket, list[Indexed]] = {}
        ended = Counts()
        for event in events:
            if event.request_id not in self._by_id:
                continue  # the end of a cancelled request
            ticket, index = self._by_id[event.request_id]
            batches.setdefault(ticket, []).append((index, event))
            if event.finished is not None:
                del self._by_id[event.request_id]
                ended.finished += 1
        self._tell(batches, ended)

    def _tell(self, batches: dict[Ticket, list[Indexed]], ended: Counts) -> None:
        """Report events and the load of the engine to the event loop."""
        assert self._loop is not None  # `open` has set it
        running, waiting = self._engine.num_running, self._engine.num_waiting
        self._loop.call_soon_threadsafe(self._deliver, batches, ended, running, waiting)

    def stop(self) -> None:
        """End the engine's thread; open tickets get no more events."""
        self._commands.put(("stop", None))
        self._thread.join(_JOIN_S)
