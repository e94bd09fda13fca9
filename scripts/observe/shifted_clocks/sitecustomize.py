"""Give a process wrong clocks; this folder is put on PYTHONPATH.

Python imports this module when it starts. `CLOCK_SHIFT` has three numbers: the
nanoseconds by which the clocks of this process are ahead, their drift in parts per
million, and the time of the true monotonic clock at which the shift equals the first
number.
Without the variable nothing changes. See `scripts/observe/real_timeline.py`.
"""

import os
import time
from collections.abc import Callable

VARIABLE = "CLOCK_SHIFT"


def _shift(words: str) -> None:
    """Replace the clocks of the module `time`."""
    offset_ns, fast_ppm, anchor_ns = words.split()
    ahead_ns, fast, since_ns = int(offset_ns), float(fast_ppm) * 1e-6, int(anchor_ns)
    true_ns = time.monotonic_ns

    def shift_ns() -> int:
        return ahead_ns + round((true_ns() - since_ns) * fast)

    def in_ns(clock: Callable[[], int]) -> Callable[[], int]:
        return lambda: clock() + shift_ns()

    def in_s(clock: Callable[[], int]) -> Callable[[], float]:
        return lambda: (clock() + shift_ns()) / 1e9

    monotonic, wall = time.monotonic_ns, time.time_ns
    time.monotonic_ns, time.monotonic = in_ns(monotonic), in_s(monotonic)
    # On Linux both are CLOCK_MONOTONIC, and mjax takes them for one.
    time.perf_counter_ns, time.perf_counter = time.monotonic_ns, time.monotonic
    time.time_ns, time.time = in_ns(wall), in_s(wall)


if VARIABLE in os.environ:
    _shift(os.environ[VARIABLE])
