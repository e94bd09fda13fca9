"""The joined weights of the current virtual stage, and the sums of its gradients.

A matmul accumulates gradients in place only if the sum is an array of the loop's carry.
If a stage indexed the sums by the number of the virtual stage, XLA would copy each sum
out and back. So the carry *holds* the weights of the current virtual stage (`chunk` in
names) of each half-tick, layer by layer, and the gradient sums of the backward one. A
stage exchanges them when the virtual stage changes, at most once in P ticks. With one
virtual stage it exchanges nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from mjax.pipeline.schedule import IDLE, Table


class Held(NamedTuple):
    """Weights and gradient sums of a virtual stage."""

    joined: tuple[PyTree, ...]
    """Joined weights of each of its n layers."""
    totals: tuple[PyTree, ...]
    """The sums of their gradients so far. The backward pass adds its gradients, and
    returns the new sums as the gradient of `totals`."""
    others: PyTree
    """The other weights, leaves [n, ...]; they have ordinary gradients."""


def held_in_forward(chunks: Table) -> Table:
    """Return the virtual stage whose weights the forward half-tick of each tick holds.

    Args:
      chunks: `Schedule.forward_chunk`. An idle stage keeps its last virtual stage,
        because the gather of the next one may not be complete.
    """
    return _fill_backward(_fill_forward(chunks))


def held_in_backward(chunks: Table) -> Table:
    """Return the virtual stage whose weights and sums each backward half-tick holds.

    Args:
      chunks: `Schedule.backward_chunk`. An idle stage already holds the next virtual
        stage. So it writes sums back right after the last backward half-tick of a
        virtual stage, and the next tick may reduce them.
    """
    return _fill_forward(_fill_backward(chunks))


def changes(held: Table) -> Bool[np.ndarray, " ticks"]:
    """Return for each tick whether any stage changes its virtual stage."""
    return np.any(np.diff(held, axis=0, prepend=held[:1]) != 0, axis=1)


def _fill_forward(chunks: Table) -> Table:
    """Fill idle ticks with the virtual stage of the last tick that is not idle."""
    filled = chunks.copy()
    for tick in range(1, len(filled)):
        filled[tick] = np.where(filled[tick] == IDLE, filled[tick - 1], filled[tick])
    return filled


def _fill_backward(chunks: Table) -> Table:
    return _fill_forward(chunks[::-1])[::-1]


def take_layers(stacked: PyTree, chunk: Int[Array, ""] | int) -> tuple[PyTree, ...]:
    """Take the layers of a virtual stage from leaves [v, n, ...]."""

    def leaf(x: Array, layer: int) -> Array:
        at = (chunk, layer, *[0] * (x.ndim - 2))
        return lax.dynamic_slice(x, at, (1, 1, *x.shape[2:]))[0, 0]

    num_layers = [x.shape[1] for x in jax.tree.leaves(stacked)]
    return tuple(
        jax.tree.map(lambda x, layer=layer: leaf(x, layer), stacked)
        for layer in range(max(num_layers, default=0))
    )


def put_layers(
    stacked: PyTree, chunk: Int[Array, ""] | int, layers: tuple[PyTree, ...]
) -> PyTree:
    """Put the layers of a virtual stage into leaves [v, n, ...]."""

    def leaf(x: Array, *values: Array) -> Array:
        for layer, value in enumerate(values):
            at = (chunk, layer, *[0] * value.ndim)
            x = lax.dynamic_update_slice(x, value[None, None], at)
        return x

    return jax.tree.map(leaf, stacked, *layers)


def stack_layers(layers: tuple[PyTree, ...]) -> PyTree:
    """Make leaves [1, n, ...] of the layers of the only virtual stage."""
    return jax.tree.map(lambda *values: jnp.stack(values)[None], *layers)
