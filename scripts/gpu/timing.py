"""Time calls that a device runs in its own time.

A batch of calls is started without waiting in between, so that the device is never
idle, and then waited for: time per call = time of the batch / calls. That holds where a
call takes the device longer than the host takes to start it (some 50 us), which is so
for every case of the report. It counts all that the device does, gaps and fills of
memory included, in the same way for every contender, of whatever framework.

Calls go round several sets of inputs, each larger than the cache of the device.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

BATCH_S = 0.03
"""Time that a batch should take: some thousand times that of starting it."""
ROUNDS = 9
"""Batches; the median counts."""
SLOW_S = 0.3
"""A call that takes longer makes three batches of one."""
INPUT_SETS = 2
"""Sets of inputs that calls go round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Time of one call."""

    median_ms: float
    spread: float
    """(slowest batch - fastest batch) / median."""
    calls: int
    """Calls that were timed."""


def time_calls(
    call: Callable[[int], Any],
    wait: Callable[[Any], Any],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time calls of a device.

    Args:
      call: starts the call with input set i, i < INPUT_SETS, and returns its result.
      wait: waits until a result, and all that was started before, is there.
      clock: seconds.
    """
    for i in range(INPUT_SETS):
        wait(call(i))
    one_s = _batch_s(call, wait, clock, 1)
    if one_s < SLOW_S:
        # A single call is mostly the start of it.
        one_s = _batch_s(call, wait, clock, 5) / 5
    per_batch = max(1, min(500, math.ceil(BATCH_S / max(one_s, 1e-6))))
    rounds = ROUNDS if one_s < SLOW_S else 3
    times = [_batch_s(call, wait, clock, per_batch) / per_batch for _ in range(rounds)]
    median = statistics.median(times)
    return Timing(
        median_ms=1e3 * median,
        spread=(max(times) - min(times)) / median,
        calls=rounds * per_batch,
    )


def _batch_s(
    call: Callable[[int], Any],
    wait: Callable[[Any], Any],
    clock: Callable[[], float],
    calls: int,
) -> float:
    start = clock()
    result = None
    for i in range(calls):
        result = call(i % INPUT_SETS)
    wait(result)
    return clock() - start
