"""Dropout whose mask does not depend on the mesh."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from mjax.mesh import collectives


class DropoutKey(NamedTuple):
    """The key of a mask, made of global indices: it does not depend on the mesh."""

    # Not a dataclass: jax.vjp rebuilds the arguments of a virtual stage with
    # placeholders for arrays, which a type-checked constructor (as in tests) refuses.
    key: Key[Array, ""]
    """The seed, step, layer and site are folded into the key in this order."""
    rows: Int[Array, " B"]
    """Index in the global batch of each local sequence."""

    def at(self, site: int | Int[Array, ""]) -> "DropoutKey":
        """Return the key of one layer, or of one site within a layer."""
        return self._replace(key=jax.random.fold_in(self.key, site))


def dropout(
    x: Float[Array, "B t D"], rate: float, key: DropoutKey | None
) -> Float[Array, "B t D"]:
    """Zero entries with probability `rate` and scale the rest by 1/(1 - rate).

    The mask is a function of (seed, step, layer, site, index of the sequence in the
    global batch, global position). So it does not depend on mesh or microbatches.

    Args:
      x: the device's part of the sequence.
      rate: probability of dropping an entry.
      key: key of the mask; None, in evaluation, returns x unchanged.
    """
    if rate == 0.0 or key is None:
        return x
    positions = collectives.sequence_offset(x.shape[1]) + jnp.arange(x.shape[1])
    by_position = jax.vmap(jax.random.fold_in, (None, 0))
    by_row = jax.vmap(jax.random.fold_in, (None, 0))(key.key, key.rows)
    keys = jax.vmap(by_position, (0, None))(by_row, positions)
    draw = jax.vmap(jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, x.shape[2:])))
    keep = draw(keys)
    return jnp.where(keep, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros_like(x))
