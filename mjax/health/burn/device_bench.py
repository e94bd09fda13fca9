"""Shared code of measurements on devices: names, timing, and counts of wrong words.

Input: the devices of this process and a task. Output: median times and `Measured`.
Runs in a process that `health burn` starts.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from mjax.health.burn.host_workloads import repeat
from mjax.health.burn.measurements import BUDGET_S, Measured, Outcome, Task, unit_of

AXIS = "device"
Device = Any
"""A jax.Device; type checkers mistake the class for a variable."""
_STEP = np.uint32(0x9E3779B1)
"""2^32 over the golden ratio, made odd (Knuth, The Art of Computer Programming 3, 6.4):
its multiples by different numbers below 2^32 differ modulo 2^32."""
_BATCH_S = 0.01
"""Seconds that a batch of calls takes; only its last call is waited for. A batch takes
long enough to hide the launch cost."""


class Bench:
    """The devices of one process, and the time budget of their measurements."""

    def __init__(self, devices: Mapping[str, Device], task: Task) -> None:
        """Store the devices and the task.

        Args:
          devices: devices by name (`gpu0` and so on), in the order of jax.
          task: the task, which gives the time budget.
        """
        self.devices, self.task = devices, task
        self.is_cpu = next(iter(devices.values())).platform == "cpu"
        self.mesh = Mesh(np.array([*devices.values()]), (AXIS,))

    def time(self, call: Callable[[], jax.Array], parts: int = 1) -> float:
        """Return the median seconds of a call, after two warm-up calls.

        Args:
          call: starts work on devices without waiting for it.
          parts: number of timed calls per device that share its time budget.
        """
        jax.block_until_ready(call())
        started_s = time.perf_counter()
        jax.block_until_ready(call())
        once_s = max(time.perf_counter() - started_s, 1e-6)
        batch = math.ceil(_BATCH_S / once_s)
        times = []
        for _ in repeat(BUDGET_S[self.task.form] / len(self.devices) / parts):
            started_s = time.perf_counter()
            for _ in range(batch - 1):
                call()
            jax.block_until_ready(call())
            times.append((time.perf_counter() - started_s) / batch)
        return statistics.median(times)

    def shards(self, x: jax.Array) -> dict[str, np.ndarray]:
        """Return the data on each device of this process, by device name."""
        held = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
        return {name: held[device] for name, device in self.devices.items()}

    def wrong_words(self, counts: jax.Array) -> dict[str, int]:
        """Return the number of wrong words on each device of this process, by name."""
        return {name: int(count.sum()) for name, count in self.shards(counts).items()}


def per_device(
    mesh: Mesh, function: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """Return a jitted function that runs `function` on each device.

    Arguments and results are sharded over the first dim. Replication is not checked:
    every device gets equal arguments on purpose.
    """
    spec = PartitionSpec(AXIS)
    spread = jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(spread)


def words(count: int) -> jax.Array:
    """Return [count] distinct uint32, each a function of its index."""
    return jnp.arange(count, dtype=jnp.uint32) * _STEP


def scatter(x: jax.Array) -> jax.Array:
    """Multiply uint32 by an odd number; different words stay different."""
    return x * _STEP


def check_place(x: jax.Array, device: Device) -> None:
    """Raise if a result is not on `device`: the report would name a wrong device.

    Raises:
      RuntimeError: it is not on the device.
    """
    if x.devices() != {device}:
        raise RuntimeError(f"computed on {x.devices()} instead of {device}")


def rate(
    name: str, work: float, seconds: float, wrong: Mapping[str, int] | None = None
) -> Measured:
    """Return the work per second as a measurement.

    Its outcome is "wrong" if a word is wrong.

    Args:
      name: name of the measurement.
      work: work of one call, in 10^12 operations or 10^9 bytes.
      seconds: time of one call.
      wrong: number of wrong words by name of the device; None: not counted.
    """
    notes = [
        f"{n} words are wrong on {place}" for place, n in (wrong or {}).items() if n
    ]
    outcome: Outcome = "wrong" if notes else "value"
    return Measured(
        name=name,
        outcome=outcome,
        value=work / seconds,
        unit=unit_of(name),
        note="; ".join(notes),
    )
