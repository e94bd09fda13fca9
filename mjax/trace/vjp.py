"""Run the forward and the backward pass of a function separately.

Differentiation saves residuals: the arrays that the backward pass reads. Many of them
depend only on the weights (slices and joined projections) or on the context (angles,
masks, dropout keys), which are available again in the backward pass. So only residuals
that depend on the input must be saved. A layer saves them for the loop of the backward
pass; a pipeline stage saves them in a ring buffer for a later tick.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, PyTree


class SplitVJP:
    """A function, and its vector-Jacobian product as a separate call.

    The function is (x, params, *context) -> y, with one array x and any trees. It is
    differentiated with respect to x and params.
    """

    def __init__(self, function: Callable[..., Array], *types: PyTree) -> None:
        """Find which residuals depend on x.

        Args:
          function: function to differentiate; traced here, and again by `forward`.
          types: arguments of the function: arrays, or results of `jax.eval_shape`.
        """
        self.function = function
        closed = jax.make_jaxpr(self._residuals)(*types)
        leaves = range(len(closed.jaxpr.outvars))

        def depends_on_x(leaf: int) -> bool:
            _, reads = dce_jaxpr(closed.jaxpr, [other == leaf for other in leaves])
            return reads[0]

        self._is_saved = [depends_on_x(leaf) for leaf in leaves]
        others, self._reads = dce_jaxpr(closed.jaxpr, [not s for s in self._is_saved])
        self._others = jaxpr_as_fun(closed.replace(jaxpr=others))

    def forward(
        self, x: Array, params: PyTree, *context: PyTree
    ) -> tuple[Array, tuple[Array, ...]]:
        """Run the function; return its output, and the residuals that depend on x."""
        y, pullback = self._vjp(x, params, *context)
        residuals = zip(jax.tree.leaves(pullback), self._is_saved, strict=True)
        return y, tuple(leaf for leaf, is_saved in residuals if is_saved)

    def backward(
        self, saved: tuple[Array, ...], dy: Array, params: PyTree, *context: PyTree
    ) -> tuple[Array, PyTree]:
        """Return the gradients of x and of params.

        Args:
          saved: the residuals that `forward` returned.
          dy: gradient of the output, which has the type of x.
          params: as passed to `forward`.
          context: as passed to `forward`.
        """
        # dy replaces x, whose value is not read.
        flat = zip(jax.tree.leaves((dy, params, context)), self._reads, strict=True)
        others = iter(self._others(*[leaf for leaf, is_read in flat if is_read]))
        of_x = iter(saved)
        residuals = [next(of_x if is_saved else others) for is_saved in self._is_saved]
        pullback: Any = jax.tree.unflatten(self._structure, residuals)
        pullback.args_res[1:] = params, *context
        dx, d_params, *_ = pullback(dy)
        return dx, d_params

    def _residuals(self, *args: Any) -> list[Any]:
        residuals, self._structure = jax.tree.flatten(self._vjp(*args)[1])
        return residuals

    def _vjp(self, *args: Any) -> tuple[Array, Any]:
        """Differentiate; among the arguments, only x may be a residual."""
        has_gradient = (True, True, *[False] * (len(args) - 2))
        return jax.vjp(
            self.function,
            *args,
            saveable_args=(True, *[False] * (len(args) - 1)),
            in_nzs=has_gradient,
        )


def row_major(x: Array) -> Array:
    """Keep x, a stack of arrays or one of its entries, in row-major layout.

    Without the constraint XLA chooses the layout of a stack for the operations on one
    entry, and keeps a transposed copy of the whole stack.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def zeros_of(like: Any, *lead: int) -> Array:
    """Make zeros [*lead, *like.shape] that vary over the mesh axes of `like`."""
    zeros = jnp.zeros((*lead, *like.shape), like.dtype)
    axes = tuple(sorted(like.manual_axis_type.varying))
    return lax.pcast(zeros, axes, to="varying") if axes else zeros
