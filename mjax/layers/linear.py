"""Projections into and out of a tensor-parallel region, fused.

Several weights that read the same input are joined along their outputs and multiplied
at once; several that add to the same output are joined along their inputs. Weights are
stored apart (one leaf a logical matrix, so that no stored value's place depends on tp)
and joined per device, where each holds its own shard.

Source: column and row split of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053,
section 3); the sequence split between the two, Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from mjax.mesh import collectives

InWeight = Float[Array, "D ..."]
"""A weight of this device that reads the residual stream."""

OutWeight = Float[Array, "... D"]
"""A weight of this device that adds to it."""


PROJECTION = "projection"
"""Name under which remat policies know the output of a product with weights."""


def column_parallel(
    x: Float[Array, "B t D"],
    weights: Sequence[InWeight],
    num_chunks: int,
    *,
    joined: bool = True,
    num_frozen: int = 0,
) -> list[Float[Array, "n B s _"]]:
    """Gather the sequence and project to the outputs that this device owns.

    Args:
      x: the device's part of the sequence, t = T/tp positions.
      weights: local, [D, ...] each; the dims after the first count as one, F_i.
      num_chunks: products that the sequence is cut into, each of what has arrived.
      joined: multiply at once. Joining copies the weights, which costs nothing beside
        a long sequence, and more than the product itself where one token a sequence is
        decoded; one by one, there is one chunk.
      num_frozen: of the first weights, whose gradient nobody reads. It is a product of
        its own, which XLA then leaves out.
    Returns:
      x @ w for each w, over the whole sequence: n = tp shards of s = t positions, in
      the order of `collectives.gather_chunks`; with one chunk n = 1, s = T.
    """
    if not joined:
        assert num_chunks == 1
        x = collectives.gather_sequence(x)[None]
        return [
            jnp.einsum("nbsd,df->nbsf", x, w.reshape(w.shape[0], -1)) for w in weights
        ]
    y = _gather_and_multiply(num_chunks, num_frozen, x, tuple(weights))
    y = checkpoint_name(y, PROJECTION)
    return jnp.split(y, _ends([math.prod(w.shape[1:]) for w in weights]), axis=3)


def row_parallel(
    parts: Sequence[Float[Array, "n B s _"]],
    weights: Sequence[OutWeight],
    num_chunks: int,
    *,
    joined: bool = True,
    num_frozen: int = 0,
) -> Float[Array, "B t D"]:
    """Project back to the model width, sum over tp, keep this device's positions.

    Args:
      parts: inputs [n, B, s, F_i], the features that this device owns, in the order of
        `column_parallel`.
      weights: local, [..., D] each; the dims before the last count as one, F_i.
      num_chunks: as in `column_parallel`.
      joined: as in `column_parallel`.
      num_frozen: likewise.
    Returns:
      the sum over i and over tp of part @ w, on t = T/tp positions.
    """
    if not joined:
        assert num_chunks == 1
        products = [
            jnp.einsum("nbsf,fd->nbsd", part, w.reshape(-1, w.shape[-1]))
            for part, w in zip(parts, weights, strict=True)
        ]
        return collectives.scatter_sequence(sum(products[1:], products[0])[0])
    y = _multiply_and_scatter(num_chunks, num_frozen, tuple(parts), tuple(weights))
    return checkpoint_name(y, PROJECTION)


# The backward passes are written out so that what they keep are the weights themselves,
# not their joined copies: those would be kept for each layer, and in a pipeline for
# each microbatch in flight. And so that chunks, which are multiplied one by one where
# they travel, are multiplied at once for the gradient of the weights.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_and_multiply(
    num_chunks: int, num_frozen: int, x: Array, weights: tuple[Array, ...]
) -> Float[Array, "n B s F"]:
    """Return gathered x @ (w_1 | w_2 | ...), by chunks."""
    return _gather_and_multiply_fwd(num_chunks, num_frozen, x, weights)[0]


def _gather_and_multiply_fwd(
    num_chunks: int, num_frozen: int, x: Array, weights: tuple[Array, ...]
) -> Any:
    del num_frozen
    w = _join_columns(weights)
    chunks = collectives.gather_chunks(x, num_chunks)
    y = jnp.concatenate([jnp.einsum("nbsd,df->nbsf", chunk, w) for chunk in chunks])
    # Chunks are gathered again in the backward pass, behind its products; a sequence
    # gathered at once would have nothing to hide behind.
    return y, (x if num_chunks > 1 else chunks[0], weights)


def _gather_and_multiply_bwd(
    num_chunks: int, num_frozen: int, kept: Any, dy: Array
) -> Any:
    x, weights = kept
    chunks = collectives.gather_chunks(x, num_chunks) if num_chunks > 1 else [x]
    dx = _multiply_chunks_and_scatter(num_chunks, dy, _join_columns(weights).T)
    whole = jnp.concatenate(chunks)
    widths = [math.prod(w.shape[1:]) for w in weights]
    border = sum(widths[:num_frozen])
    dws = []
    for some, columns in (
        (slice(num_frozen), slice(border)),
        (slice(num_frozen, None), slice(border, None)),
    ):
        group = weights[some]
        if not group:
            continue
        dw = jnp.einsum("nbsd,nbsf->df", whole, dy[..., columns])
        pieces = jnp.split(dw, _ends(widths[some]), axis=1)
        dws += [p.reshape(w.shape) for p, w in zip(pieces, group, strict=True)]
    return dx, tuple(dws)


_gather_and_multiply.defvjp(_gather_and_multiply_fwd, _gather_and_multiply_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply_and_scatter(
    num_chunks: int,
    num_frozen: int,
    parts: tuple[Array, ...],
    weights: tuple[Array, ...],
) -> Float[Array, "B t D"]:
    """Return part_1 @ w_1 + part_2 @ w_2 + ..., as one product, summed over tp."""
    del num_frozen
    return _multiply_chunks_and_scatter(
        num_chunks, jnp.concatenate(parts, 3), _join_rows(weights)
    )


def _multiply_and_scatter_fwd(
    num_chunks: int,
    num_frozen: int,
    parts: tuple[Array, ...],
    weights: tuple[Array, ...],
) -> Any:
    y = _multiply_and_scatter(num_chunks, num_frozen, parts, weights)
    return y, (parts, weights)


def _multiply_and_scatter_bwd(
    num_chunks: int, num_frozen: int, kept: Any, dy: Array
) -> Any:
    parts, weights = kept
    chunks = collectives.gather_chunks(dy, num_chunks)
    w = _join_rows(weights)
    dxs = [jnp.einsum("nbsd,fd->nbsf", chunk, w) for chunk in chunks]
    # The product that needs all chunks comes after those that need one each, which hide
    # the chunks that are still on their way; XLA would be free to take it first.
    dxs, chunks = jax.lax.optimization_barrier((dxs, chunks))
    dx, dy = jnp.concatenate(dxs), jnp.concatenate(chunks)
    dws = []
    for some in (slice(num_frozen), slice(num_frozen, None)):
        group = weights[some]
        if not group:
            continue
        dw = jnp.einsum("nbsf,nbsd->fd", jnp.concatenate(parts[some], 3), dy)
        pieces = jnp.split(dw, _ends([math.prod(w.shape[:-1]) for w in group]), axis=0)
        dws += [p.reshape(w.shape) for p, w in zip(pieces, group, strict=True)]
    ends = _ends([p.shape[3] for p in parts])
    return tuple(jnp.split(dx, ends, axis=3)), tuple(dws)


_multiply_and_scatter.defvjp(_multiply_and_scatter_fwd, _multiply_and_scatter_bwd)


def _multiply_chunks_and_scatter(
    num_chunks: int, x: Float[Array, "n B s F"], w: Float[Array, "F D"]
) -> Float[Array, "B t D"]:
    """Multiply chunk by chunk; this device's own last, while the others travel."""
    own, *others = collectives.cut_chunks(x, num_chunks)
    products = [jnp.einsum("nbsf,fd->nbsd", chunk, w) for chunk in [*others, own]]
    return collectives.scatter_chunks([products[-1], *products[:-1]])


def _ends(widths: Sequence[int]) -> list[int]:
    """Return where each of the joined arrays but the last ends."""
    return np.cumsum(widths[:-1]).tolist()


def _join_columns(weights: tuple[Array, ...]) -> Float[Array, "D F"]:
    return jnp.concatenate([w.reshape(w.shape[0], -1) for w in weights], axis=1)


def _join_rows(weights: tuple[Array, ...]) -> Float[Array, "F D"]:
    return jnp.concatenate([w.reshape(-1, w.shape[-1]) for w in weights], axis=0)
