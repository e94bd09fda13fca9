"""Compute slow answers once, cache them and share them among all viewers.

Input: a computation, with a key and a version of its input. Output: the result, at once
if it is fresh. For any number of viewers, an answer is computed once, in one thread,
and again only after ten times its computing time.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

_LEAST_S = 2.0
"""Shortest time for which an answer is fresh, in seconds."""
_SHARE = 10.0
"""An answer is also fresh for this multiple of its computing time, so that it takes at
most a tenth of a core. Not measured."""
_MOST_HELD = 32
"""Number of answers to keep. A viewer looks at one or two at a time."""


@dataclasses.dataclass(kw_only=True)
class _Held:
    """An answer, and the computation of the next one."""

    version: Hashable = None
    value: Any = None
    error: Exception | None = None
    is_there: bool = False
    until: float = 0.0
    """Monotonic time until which the answer is fresh, even if the version changes."""
    making: "concurrent.futures.Future[None] | None" = None


class Worker:
    """Computes answers in its own thread, without delaying the exit of the process."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._held: collections.OrderedDict[Hashable, _Held] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Run no computation that is asked for later; earlier ones may still run."""
        self._jobs.put(None)

    async def get(
        self,
        key: Hashable,
        version: Hashable,
        compute: Callable[[], Any],
        *,
        wait_s: float,
    ) -> Any | None:
        """Return an answer, which may be of an earlier version; None if none is there.

        Args:
          key: key of the answer.
          version: version of the input.
          compute: function that returns the answer.
          wait_s: longest wait of this viewer.
        Raises:
          Exception: what `compute` raised.
        """
        with self._lock:
            held = self._entry(key)
            is_fresh = held.version == version or time.monotonic() < held.until
            if held.making is None and not (held.is_there and is_fresh):
                held.making = concurrent.futures.Future()
                self._jobs.put(lambda: self._make(held, version, compute))
            making = held.making
        if making is not None:
            try:
                waiting = asyncio.shield(asyncio.wrap_future(making))
                await asyncio.wait_for(waiting, wait_s)
            except TimeoutError:
                pass
        if held.error is not None:
            raise held.error
        return held.value

    def _entry(self, key: Hashable) -> _Held:
        held = self._held.setdefault(key, _Held())
        self._held.move_to_end(key)
        for other in [*self._held]:
            if len(self._held) <= _MOST_HELD:
                break
            if self._held[other].making is None and other != key:
                del self._held[other]
        return held

    def _make(self, held: _Held, version: Hashable, compute: Callable[[], Any]) -> None:
        begin = time.monotonic()
        value, error = None, None
        try:
            value = compute()
        except Exception as caught:  # passed on to the waiting callers
            error = caught
        took_s = time.monotonic() - begin
        with self._lock:
            held.value, held.error, held.is_there = value, error, True
            held.version = version
            held.until = time.monotonic() + max(_LEAST_S, _SHARE * took_s)
            making, held.making = held.making, None
        if making is not None:
            making.set_result(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
