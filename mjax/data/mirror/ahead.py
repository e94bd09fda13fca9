"""Read several blocks at the same time, to overlap waits for the remote."""

import collections
import concurrent.futures
from collections.abc import Callable, Iterator, Sequence

NUM_AHEAD = 4
"""Blocks that a host reads at the same time; each takes up to twice its size in
memory."""


def in_order[S, T](call: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
    """Yield the results of calls in order; `NUM_AHEAD` calls run at the same time."""
    pool = concurrent.futures.ThreadPoolExecutor(NUM_AHEAD)
    waiting: collections.deque[concurrent.futures.Future[T]] = collections.deque()
    try:
        for item in items:
            if len(waiting) == NUM_AHEAD:
                yield waiting.popleft().result()
            waiting.append(pool.submit(call, item))
        while waiting:
            yield waiting.popleft().result()
    finally:  # after an error or Ctrl-C the other calls are abandoned
        pool.shutdown(wait=False, cancel_futures=True)
