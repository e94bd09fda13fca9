"""Parameters with logical names, drawn from a normal distribution or set to zero."""

import jax
import jax.numpy as jnp
from flax import nnx


def normal(
    shape: tuple[int, ...], logical: tuple[str, ...], std: float, rngs: nnx.Rngs
) -> nnx.Param:
    """Draw a float32 weight from N(0, std^2); weight decay applies to it."""
    value = std * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, logical=logical, decay=True)


def zeros(shape: tuple[int, ...], logical: tuple[str, ...]) -> nnx.Param:
    """Make a float32 bias of zeros; weight decay does not apply to it."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), logical=logical, decay=False)
