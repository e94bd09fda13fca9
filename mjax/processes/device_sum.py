"""Add a number over all devices, which connects them as the first step of a run does.

Input: the devices of all processes. Output: a jitted sum, its argument, and the right
result.
"""

import jax
import numpy as np
from jax.stages import Wrapped
from jaxtyping import Array, Float


def device_sum() -> tuple[Wrapped, Float[Array, " devices"], float]:
    """Prepare the sum of the numbers 1, 2, ..., one for each device of all processes.

    Every process must run the returned function.

    Returns:
      The sum, a jitted function [devices] -> [devices] that adds with one all-reduce;
      its argument, float32, one number on each device; and the value that each entry
      of the result must have.
    """
    devices = jax.devices()
    axis = jax.sharding.PartitionSpec("all")
    mesh = jax.sharding.Mesh(np.asarray(devices), ("all",))
    numbers = jax.make_array_from_callback(
        (len(devices),),
        jax.sharding.NamedSharding(mesh, axis),
        lambda place: np.arange(1, len(devices) + 1, dtype=np.float32)[place],
    )

    def total(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "all")

    summed = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=axis, out_specs=axis))
    return summed, numbers, len(devices) * (len(devices) + 1) / 2
