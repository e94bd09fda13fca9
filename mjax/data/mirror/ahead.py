"""Read several blocks at a time, because each waits for the answer of a remote."""

import collections
import concurrent.futures
from collections.abc import Callable, Iterator, Sequence

NUM_AHEAD = 4
"""Blocks that a host reads at a time; each takes up to twice its size in memory."""


def in_order[S, T](call: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
    """Yield the results of calls in order; `NUM_AHEAD` calls are made at a time."""
    pool = concurrent.futures.ThreadPoolExecutor(NUM_AHEAD)
    waiting: collections.deque[concurrent.futures.Future[T]] = collections.deque()
    try:
        for item in items:
            if len(waiting) == NUM_AHEAD:
                yield waiting.popleft().result()
            waiting.append(pool.submit(call, item))
        while waiting:
            yield waiting.popleft().result()
    finally:  # after an error or Ctrl-C nobody waits for the others
        pool.shutdown(wait=False, cancel_futures=True)
