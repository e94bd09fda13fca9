"""Python's garbage collector at agreed steps, and at no other time.

Left alone, Python collects when it has allocated enough, on each process at another
time. In a run of many processes any of them then launches its step late, and all wait.

Source: MegaScale, arXiv:2402.15627, section 6.3, finds such irregular collections among
the causes of a falling MFU.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def collections_every(num_steps: int) -> Iterator[Callable[[int], None]]:
    """Turn the collector off, and yield what collects after every `num_steps` steps.

    Existing objects, mostly the program itself, are collected once and then frozen. At
    the end the previous state of the collector is restored.

    Args:
      num_steps: between collections. What forms a cycle lives until the next one, with
        the device memory that it may hold.
    Yields:
      a function of the number of steps taken; call it while the device is at work.
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
