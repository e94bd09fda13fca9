"""Work that may block, in a thread, so that no loop waits for a disk or a terminal.

Input: functions. Output: their results, in order. The thread does not keep the process
alive: a function that never returns delays no exit.
"""

import asyncio
import contextlib
import functools
import queue
import sys
import threading
from collections.abc import Callable

_MOST = 10_000
"""Functions that wait at most. Beyond them the newest are dropped: they are lines for a
terminal that accepts none."""


class Worker:
    """A thread that runs functions one after another."""

    def __init__(self) -> None:
        """Start the thread."""
        self._work: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], object]) -> None:
        """Run a function later. It must not raise."""
        if self._work.qsize() < _MOST:
            self._work.put(work)

    async def run[T](self, work: Callable[[], T]) -> T:
        """Run a function and return its result."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def end(value: T | None, error: Exception | None) -> None:
            if result.cancelled():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)  # pyright: ignore[reportArgumentType]

        def call() -> None:
            value, problem = None, None
            try:
                value = work()
            except Exception as error:  # raised to the caller of `run`
                problem = error
            post(loop, functools.partial(end, value, problem))

        self._work.put(call)
        return await result

    def finish(self, timeout_s: float) -> bool:
        """End the thread; return whether all functions have run in time."""
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def post(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Call a function in a loop, from another thread, unless the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def say(text: str) -> None:
    """Print a line to standard error; a full disk or a closed terminal is no error."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
