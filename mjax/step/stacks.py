"""Make, read and write the stacks of a loop over layers.

Enters and leaves: trees whose leaves are [n, ...], an entry for each layer or
iteration. All of it runs per device inside shard_map.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from mjax.vjp import zeros_of

Index = int | Int[Array, ""]


def scan(
    body: Any, carry: PyTree, xs: Array, *, unlike: Array
) -> tuple[PyTree, PyTree]:
    """Scan, as lax.scan does, into stacks that no other scan shares.

    lax.scan initialises each stack with zeros. XLA shares one array of zeros between
    several loops, keeps it from the first loop to the last, and copies it for each
    loop: one stack too many. Here the initial stack depends on a value that only this
    scan has. The loop overwrites it.

    Args:
      body: (carry, x) -> (carry, y).
      carry: at the start.
      xs: [n].
      unlike: an array, with entries that only this scan has.
    """
    first = unlike[(0,) * unlike.ndim]
    odd = first != first  # false, but not to a compiler: a float may be NaN

    def empty(like: Any) -> Array:
        is_float = jnp.issubdtype(like.dtype, jnp.floating)
        zeros = zeros_of(like, xs.shape[0])
        return zeros + odd.astype(like.dtype) if is_float else zeros

    def turn(state: Any, at: Any) -> Any:
        (carry, stacks), (number, x) = state, at
        carry, y = body(carry, x)
        return (carry, put(stacks, y, number)), None

    stacked = jax.tree.map(empty, jax.eval_shape(body, carry, xs[0])[1])
    numbers = jnp.arange(xs.shape[0])
    return lax.scan(turn, (carry, stacked), (numbers, xs))[0]


def stack_of(one: PyTree, num: int) -> PyTree:
    """Make zeros [num, ...], with room for `num` entries like `one`."""
    return jax.tree.map(lambda t: zeros_of(jax.typeof(t), num), one)


def get(stacked: PyTree, index: Index) -> PyTree:
    """Take an entry out of a stack, leaves [1, ...]."""
    return jax.tree.map(lambda s: lax.dynamic_slice_in_dim(s, index, 1), stacked)


def put(stacked: PyTree, one: PyTree, index: Index) -> PyTree:
    """Put a layer's leaves, [...] or [1, ...], into a stack."""
    return jax.tree.map(
        lambda s, v: lax.dynamic_update_slice_in_dim(
            s, v.reshape(1, *s.shape[1:]), index, 0
        ),
        stacked,
        one,
    )
