"""The joined weights of the current virtual stage, and the sums of its gradients.

Identifiers call a virtual stage `chunk`. A tick has a forward half-tick and a backward
half-tick, and each runs one virtual stage (`pipeline.schedule`).

A matmul accumulates gradients in place only if the sum is a whole array in the loop's
carry. If the sums of all virtual stages were parts of one array, XLA would copy each
sum out and back. So the carry *holds* separate arrays for each layer: the weights of
the virtual stage of the forward half-tick, and the weights and the gradient sums of the
virtual stage of the backward half-tick. A stage replaces these arrays when it changes
to another virtual stage, at most once in P ticks. With one virtual stage it replaces
nothing.
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
    """Joined weights of each of the n layers of the virtual stage."""
    totals: tuple[PyTree, ...]
    """Sums of the gradients of `joined` so far. The backward pass adds new gradients of
    `joined` to these sums, and returns the new sums as the gradient of `totals`. This
    is deliberate, although the true gradient of `totals` is zero."""
    others: PyTree
    """The other weights, leaves [n, ...]; they have ordinary gradients."""


def held_in_forward(chunks: Table) -> Table:
    """Return a table [ticks, P]: the virtual stage held for forward half-ticks.

    In idle half-ticks a stage holds the virtual stage that it ran last, because the
    weights of the next virtual stage may not be completely gathered yet.

    Args:
      chunks: `Schedule.forward_chunk`.
    """
    return _fill_backward(_fill_forward(chunks))


def held_in_backward(chunks: Table) -> Table:
    """Return a table [ticks, P]: the virtual stage held for backward half-ticks.

    In idle half-ticks a stage holds the virtual stage that it runs next. So it changes
    to that virtual stage right after the last backward half-tick of the previous one.
    At the change it stores the gradient sums of the previous virtual stage, and the
    next tick may reduce these sums.

    Args:
      chunks: `Schedule.backward_chunk`.
    """
    return _fill_forward(_fill_backward(chunks))


def changes(held: Table) -> Bool[np.ndarray, " ticks"]:
    """Return, for each tick, whether any stage changes its virtual stage."""
    return np.any(np.diff(held, axis=0, prepend=held[:1]) != 0, axis=1)


def _fill_forward(chunks: Table) -> Table:
    """Replace each idle entry by the nearest earlier entry that is not idle."""
    filled = chunks.copy()
    for tick in range(1, len(filled)):
        filled[tick] = np.where(filled[tick] == IDLE, filled[tick - 1], filled[tick])
    return filled


def _fill_backward(chunks: Table) -> Table:
    """Replace each idle entry by the nearest later entry that is not idle."""
    return _fill_forward(chunks[::-1])[::-1]


def take_layers(stacked: PyTree, chunk: Int[Array, ""] | int) -> tuple[PyTree, ...]:
    """Return the layers of a virtual stage from leaves [v, n, ...]."""

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
    """Return leaves [v, n, ...] with the layers of one virtual stage replaced."""

    def leaf(x: Array, *values: Array) -> Array:
        for layer, value in enumerate(values):
            at = (chunk, layer, *[0] * value.ndim)
            x = lax.dynamic_update_slice(x, value[None, None], at)
        return x

    return jax.tree.map(leaf, stacked, *layers)


def stack_layers(layers: tuple[PyTree, ...]) -> PyTree:
    """Stack the layers of the only virtual stage to leaves [1, n, ...]."""
    return jax.tree.map(lambda *values: jnp.stack(values)[None], *layers)
