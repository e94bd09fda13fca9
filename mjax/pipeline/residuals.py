"""Tell apart what a chunk's backward slot must find kept, and what it can make itself.

Differentiation keeps whatever the backward pass reads. Much of that comes from the
weights alone (slices and joined projections) or from the context (angles, masks,
dropout keys): both are there again in the backward slot. Only what depends on the
chunk's input has to wait in a ring buffer.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Residuals:
    """What one backward pass reads, in the order of its leaves."""

    is_kept: tuple[bool, ...]
    """Whether a leaf depends on the chunk's input."""
    make: Callable[..., list[Array]]
    """Computes the other leaves, from the arguments of the forward pass; the input is
    not looked at."""

    def kept(self, leaves: Sequence[Any]) -> tuple[Array, ...]:
        """Pick the leaves that depend on the input."""
        chosen = zip(leaves, self.is_kept, strict=True)
        return tuple(leaf for leaf, is_kept in chosen if is_kept)

    def whole(self, kept: Sequence[Array], *args: PyTree) -> list[Array]:
        """Put the leaves that were kept and those that are made again together."""
        sources = {True: iter(kept), False: iter(self.make(*args))}
        return [next(sources[is_kept]) for is_kept in self.is_kept]


def separate(f: Callable[..., list[Array]], *args: PyTree, place: int) -> Residuals:
    """Find which results of f depend on one of its arguments.

    Args:
      f: (*args) -> the leaves of a backward pass.
      args: arrays, or their types.
      place: of the chunk's input among the arguments, one array.
    """
    closed = jax.make_jaxpr(f)(*args)
    x = sum(len(jax.tree.leaves(arg)) for arg in args[:place])
    num_leaves = len(closed.jaxpr.outvars)

    def reads_input(leaf: int) -> bool:
        _, reads = dce_jaxpr(closed.jaxpr, [i == leaf for i in range(num_leaves)])
        return reads[x]

    is_kept = tuple(reads_input(leaf) for leaf in range(num_leaves))
    others, reads = dce_jaxpr(closed.jaxpr, [not kept for kept in is_kept])
    make_others = jaxpr_as_fun(closed.replace(jaxpr=others))

    def make(*args: PyTree) -> list[Any]:
        flat = zip(jax.tree.leaves(args), reads, strict=True)
        return make_others(*[leaf for leaf, is_read in flat if is_read])

    return Residuals(is_kept, make)
