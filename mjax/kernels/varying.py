"""Set the mesh axes over which a kernel's result varies, inside shard_map."""

import jax
from jax import lax


def vary_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Make a kernel's result vary over the mesh axes of its operand.

    plgpu.kernel returns results that vary over no mesh axis (jax 0.11.2).
    """
    axes = jax.typeof(like).manual_axis_type.varying
    missing = axes - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x
