"""Create, read and write the stacks of a loop over layers.

Input and output: trees with leaves [n, ...], one entry per layer or iteration.
Everything runs per device inside shard_map.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from mjax.trace.vjp import zeros_of

Index = int | Int[Array, ""]


def scan(body: Any, carry: PyTree, xs: Array) -> tuple[PyTree, PyTree]:
    """Return the results of lax.scan, without initialising the stacks of results.

    lax.scan fills each stack with zeros before the loop overwrites it. XLA fills one
    array and copies it for each stack of the same shape, which takes 2 to 5% of a step
    of gpt-1b3 on an H200 (docs/benchmarks/gpu_changes.md).

    Args:
      body: (carry, x) -> (carry, y).
      carry: the initial carry.
      xs: [n], n at least 1.
    """

    def turn(state: Any, at: Any) -> Any:
        (carry, stacks), (number, x) = state, at
        carry, y = body(carry, x)
        return (carry, put(stacks, y, number)), None

    one = jax.eval_shape(body, carry, xs[0])[1]
    stacked = jax.tree.map(lambda like: _empty(like, xs.shape[0]), one)
    numbers = jnp.arange(xs.shape[0])
    return lax.scan(turn, (carry, stacked), (numbers, xs))[0]


def _empty(like: Any, num: int) -> Array:
    """Allocate [num, ...] for entries of the type of `like`; uninitialised on a GPU."""
    stack = lax.empty((num, *like.shape), like.dtype)
    axes = tuple(sorted(like.manual_axis_type.varying))
    return lax.pcast(stack, axes, to="varying") if axes else stack


def stack_of(one: PyTree, num: int) -> PyTree:
    """Make zeros [num, ...] for `num` entries of the type of `one`."""
    return jax.tree.map(lambda t: zeros_of(jax.typeof(t), num), one)


def get(stacked: PyTree, index: Index) -> PyTree:
    """Return one entry of a stack, leaves [1, ...]."""
    return jax.tree.map(lambda s: lax.dynamic_slice_in_dim(s, index, 1), stacked)


def put(stacked: PyTree, one: PyTree, index: Index) -> PyTree:
    """Return the stack with a layer's leaves, [...] or [1, ...], put into it."""
    return jax.tree.map(
        lambda s, v: lax.dynamic_update_slice_in_dim(
            s, v.reshape(1, *s.shape[1:]), index, 0
        ),
        stacked,
        one,
    )
