"""Time calls that a device runs asynchronously.

A batch of calls is started without waiting in between, so that the device is never
idle, and then waited for: time per call = time of the batch / calls. This needs calls
that take the device longer than the host takes to start them (some 50 us), as in every
case of the report. It counts everything on the device, including gaps and memory fills,
in the same way for every contender and framework.

Calls cycle through several sets of inputs, each larger than the device's cache.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

BATCH_S = 0.03
"""Target time of a batch, about a thousand times that of starting it."""
ROUNDS = 9
"""Number of timed batches; the median counts."""
SLOW_S = 0.3
"""A longer call is timed in three batches of one call."""
INPUT_SETS = 2
"""Sets of inputs that calls cycle through."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Time of one call."""

    median_ms: float
    spread: float
    """(slowest batch - fastest batch) / median."""
    calls: int
    """Number of timed calls."""


def time_calls(
    call: Callable[[int], Any],
    wait: Callable[[Any], Any],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time calls of a device.

    Args:
      call: starts the call with input set i, i < INPUT_SETS, and returns its result.
      wait: waits until a result, and everything started before it, is ready.
      clock: seconds.
    """
    for i in range(INPUT_SETS):
        wait(call(i))
    one_s = _batch_s(call, wait, clock, 1)
    if one_s < SLOW_S:
        # The time of a single call is mostly its start.
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
