"""Stamps: the times at which a device reaches chosen points of a compiled step.

Input: a log, which is an int32 array that the step carries, and values computed at a
point. Output: the log with one more row, and the same values. The row is written when
the values have been computed, and code that reads the returned values runs afterwards.
So the compiler cannot move the stamp. The host never waits for a stamp: the log is an
output of the step, like its metrics.

Row 0 of a log is (number of appended rows, unused). Row i is (tag, clock), with the
clock in units of 2**8 ns, modulo 2**32: differences of up to 18 minutes are exact. If
the log is full, a new row replaces the last row, and the number still grows.

On a GPU a kernel of one thread writes the row, and the clock is `%globaltimer`. On CPU
a call to the host writes it in about 15 us (0.78 ms with `jax.pure_callback`, measured
together on a busy host of 2 cores, 2026-11), and the clock is CLOCK_MONOTONIC. XLA for
CPUs orders operations by data dependencies only, and the call takes the first element
of each value. So a row is written after these elements have been computed, but possibly
before the rest of the values.

In a loop, put a stamp at the start of the body. A stamp at the end would keep the
compiler from overlapping the collectives of that body with compute.

Everything runs per device inside shard_map. The type of the log must not vary over a
mesh axis, so create it with `begin` and never cast it. `out_specs` of the shard_map may
still split the log over all axes: each device has its own log.

Source: MegaScale, arXiv:2402.15627, section 5.1 (CUDA events measure segments of code
on every rank); PTX ISA, special register %globaltimer.
"""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, PyTree

from mjax.kernels.stamp import callback
from mjax.kernels.target import Target, target

Backend = Literal["mosaic_gpu", "callback"]

UNIT_NS = callback.UNIT_NS
"""Unit of the clock, in nanoseconds."""


def begin(
    num_rows: int, values: PyTree, tag: int
) -> tuple[Int32[Array, "rows 2"], PyTree]:
    """Return a log whose first row is written when the values have been computed.

    Args:
      num_rows: capacity of the log, at least 1. Rows not yet appended have arbitrary
        contents.
      values: as in `append`.
      tag: tag of the row.
    """
    if num_rows < 1:
        raise ValueError(f"a log must have room for at least 1 row, got {num_rows}")
    tags, values = lax.optimization_barrier((jnp.full((1,), tag, jnp.int32), values))
    if choose(target()) == "mosaic_gpu":
        from mjax.kernels.stamp import mosaic_gpu  # the import takes 0.25 s

        log = mosaic_gpu.begin(num_rows, tags)
    else:
        log = callback.append(jnp.zeros((num_rows + 1, 2), jnp.int32), tags, values)
    return lax.optimization_barrier((log, values))


def append(
    log: Int32[Array, "rows 2"], values: PyTree, tag: int
) -> tuple[Int32[Array, "rows 2"], PyTree]:
    """Append a row when the values have been computed.

    Not differentiable: append outside differentiated functions.

    Args:
      log: log of this step.
      values: arrays in memory, such as the carry of a loop or the result of a matmul;
        stamping a value inside a fusion would split the fusion.
      tag: tag of the row, from -2**31 to 2**31 - 1.
    Returns:
      The log with the new row, and the values; later code must read these values.
    """
    log, values = lax.optimization_barrier((log, values))
    tags = jnp.full((1,), tag, jnp.int32)
    if choose(target()) == "mosaic_gpu":
        from mjax.kernels.stamp import mosaic_gpu

        log = mosaic_gpu.append(log, tags)
    else:
        log = callback.append(log, tags, values)
    return lax.optimization_barrier((log, values))


def is_supported(device: Target) -> bool:
    """Return whether there is a backend for a kind of device."""
    is_gpu = device.platform == "gpu" and device.generation in ("hopper", "blackwell")
    return is_gpu or device.platform == "cpu"


def choose(device: Target) -> Backend:
    """Return the backend that writes the rows on a kind of device.

    Raises:
      NotImplementedError: the device is neither a CPU nor a GPU that Mosaic compiles
        for.
    """
    if not is_supported(device):
        raise NotImplementedError(
            f"stamps need a Hopper or Blackwell GPU, or a CPU, got "
            f"{device.device_kind}; turn them off with --observe.stamps False"
        )
    return "callback" if device.platform == "cpu" else "mosaic_gpu"
