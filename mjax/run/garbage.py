"""Run Python's garbage collector at fixed steps and at no other time.

By default Python collects after enough allocations, at a different time in each
process. Each collection makes one process launch its step late, and all others wait.

Source: MegaScale, arXiv:2402.15627, section 6.3, finds such irregular collections among
the causes of a falling MFU.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def collections_every(num_steps: int) -> Iterator[Callable[[int], None]]:
    """Turn the collector off and yield a function that runs it periodically.

    Existing objects (mostly the program itself) are collected once and then frozen. The
    previous state of the collector is restored at the end.

    Args:
      num_steps: steps between collections. Reference cycles, and any device memory they
        hold, live until the next one.
    Yields:
      a function of the number of steps taken; call it while the device is busy.
    """

    def collect(step: int) -> None:
        if step % num_steps == 0:
            gc.collect()

    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()
    try:
        yield collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
