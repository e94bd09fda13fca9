"""Projections into and out of a tensor-parallel region, fused.

Several weights that read the same input are joined along their outputs and multiplied
at once; several that add to the same output are joined along their inputs. Weights are
stored apart (one leaf a logical matrix, so that no stored value's place depends on tp)
and joined per device, where each holds its own shard: in training once a step
(`layers.block.Block.join`), otherwise where they are used (`join_columns`,
`join_rows`).

Training adds gradients over microbatches. A matmul can add its result to what is in
memory (cuBLAS: beta = 1), so the sum so far goes to the projection beside the weight
(`Joined.total`) and comes back as its "gradient" with this microbatch's added: no
kernel of its own reads and writes the sum.

Source: column and row split of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053,
section 3), and its gradient accumulation fusion; the sequence split between the two,
Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
"""Name under which remat policies know the output of a matmul with weights."""


class Joined(NamedTuple):
    """The weights of one projection as one matrix of this device."""

    weight: Float[Array, "m n"]
    """[D, F] of an input projection, [F, D] of an output projection."""
    total: Float[Array, "m n"] | None = None
    """Sum of the gradients so far, in the dtype that they are added in. The backward
    pass returns the sum with its own gradient added as the gradient of `total`, and
    zeros, which nobody is to read, as that of `weight`. So `total` must reach exactly
    one call in a function that is differentiated, and that call must run. None: the
    gradient of `weight` is the ordinary one."""


def column_parallel(
    x: Float[Array, "B t D"],
    joined: Joined,
    widths: Sequence[int],
    num_chunks: int,
    *,
    num_frozen: int = 0,
) -> list[Float[Array, "n B s _"]]:
    """Gather the sequence and project to the outputs that this device owns.

    Args:
      x: the device's part of the sequence, t = T/tp positions.
      joined: w_1 | w_2 | ..., [D, F].
      widths: columns F_i of each w_i; their sum is F.
      num_chunks: matmuls that the sequence is cut into, each of what has arrived.
      num_frozen: of the first columns, whose gradient is zeros instead: it is not
        computed. Only without a total.
    Returns:
      x @ w_i for each i, over the whole sequence: n = tp shards of s = t positions, in
      the order of `collectives.gather_chunks`; with one chunk n = 1, s = T.
    """
    y = _gather_and_multiply(num_chunks, num_frozen, x, joined)
    y = checkpoint_name(y, PROJECTION)
    return jnp.split(y, _ends(widths), axis=3)


def row_parallel(
    parts: Sequence[Float[Array, "n B s _"]],
    joined: Joined,
    num_chunks: int,
    *,
    num_frozen: int = 0,
) -> Float[Array, "B t D"]:
    """Project back to the model width, sum over tp, keep this device's positions.

    Args:
      parts: inputs [n, B, s, F_i], the features that this device owns, in the order of
        `column_parallel`.
      joined: w_1 above w_2 above ..., [F, D], F the sum of the F_i.
      num_chunks: as in `column_parallel`.
      num_frozen: of the first rows, likewise.
    Returns:
      the sum over i and over tp of part_i @ w_i, on t = T/tp positions.
    """
    y = _multiply_and_scatter(num_chunks, num_frozen, tuple(parts), joined)
    return checkpoint_name(y, PROJECTION)


def column_parallel_apart(
    x: Float[Array, "B t D"], weights: Sequence[InWeight]
) -> list[Float[Array, "1 B T _"]]:
    """Project as `column_parallel` in one chunk, by one matmul a weight.

    Joining copies the weights. That costs little beside a long sequence, and more than
    the matmul itself where one token a sequence is decoded.

    Args:
      x: the device's part of the sequence.
      weights: local, [D, ...] each; the dims after the first count as one.
    """
    x = collectives.gather_sequence(x)[None]
    return [jnp.einsum("nbsd,df->nbsf", x, w.reshape(w.shape[0], -1)) for w in weights]


def row_parallel_apart(
    parts: Sequence[Float[Array, "1 B T _"]], weights: Sequence[OutWeight]
) -> Float[Array, "B t D"]:
    """Project back as `row_parallel` in one chunk, by one matmul a weight.

    Args:
      parts: inputs of the weights.
      weights: local, [..., D] each; the dims before the last count as one.
    """
    products = [
        jnp.einsum("nbsf,fd->nbsd", part, w.reshape(-1, w.shape[-1]))
        for part, w in zip(parts, weights, strict=True)
    ]
    return collectives.scatter_sequence(sum(products[1:], products[0])[0])


def join_columns(weights: Sequence[InWeight]) -> Joined:
    """Join weights that read the same input; those with [D, F_i] as they are."""
    matrices = [w.reshape(w.shape[0], -1) for w in weights]
    return Joined(jnp.concatenate(matrices, axis=1))


def join_rows(weights: Sequence[OutWeight]) -> Joined:
    """Join weights that add to the same output; those with [F_i, D] as they are."""
    matrices = [w.reshape(-1, w.shape[-1]) for w in weights]
    return Joined(jnp.concatenate(matrices, axis=0))


@jax.custom_vjp
def keep_totals(x: Array, joined: Mapping[str, Joined]) -> Array:
    """Return x in place of the output of a layer that is left out.

    The backward pass returns the totals as their own gradients: nothing is added.

    Args:
      x: input of the layer.
      joined: its weights, with totals.
    """
    del joined
    return x


keep_totals.defvjp(
    lambda x, joined: (x, joined),
    lambda joined, dy: (
        dy,
        {name: Joined(jnp.zeros_like(w), total) for name, (w, total) in joined.items()},
    ),
)


# The backward passes are written out so that chunks, which are multiplied one by one
# where they travel, are multiplied at once for the gradient of the weights, and so that
# this matmul adds to the total.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_and_multiply(
    num_chunks: int, num_frozen: int, x: Array, joined: Joined
) -> Float[Array, "n B s F"]:
    """Return gathered x @ w, by chunks."""
    return _gather_and_multiply_fwd(num_chunks, num_frozen, x, joined)[0]


def _gather_and_multiply_fwd(
    num_chunks: int, num_frozen: int, x: Array, joined: Joined
) -> Any:
    del num_frozen
    chunks = collectives.gather_chunks(x, num_chunks)
    y = jnp.concatenate([_multiply(chunk, joined.weight) for chunk in chunks])
    # Chunks are gathered again in the backward pass, behind its matmuls; a sequence
    # gathered at once would have nothing to hide behind.
    return y, (x if num_chunks > 1 else chunks[0], joined)


def _gather_and_multiply_bwd(
    num_chunks: int, num_frozen: int, kept: Any, dy: Array
) -> Any:
    x, joined = kept
    chunks = collectives.gather_chunks(x, num_chunks) if num_chunks > 1 else [x]
    dx = _multiply_chunks_and_scatter(num_chunks, dy, joined.weight.T)
    whole = jnp.concatenate(chunks)
    return dx, _gradient_of(joined, whole, dy, num_frozen, axis=1)


_gather_and_multiply.defvjp(_gather_and_multiply_fwd, _gather_and_multiply_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply_and_scatter(
    num_chunks: int, num_frozen: int, parts: tuple[Array, ...], joined: Joined
) -> Float[Array, "B t D"]:
    """Return part_1 @ w_1 + part_2 @ w_2 + ..., as one matmul, summed over tp."""
    del num_frozen
    return _multiply_chunks_and_scatter(
        num_chunks, jnp.concatenate(parts, 3), joined.weight
    )


def _multiply_and_scatter_fwd(
    num_chunks: int, num_frozen: int, parts: tuple[Array, ...], joined: Joined
) -> Any:
    y = _multiply_and_scatter(num_chunks, num_frozen, parts, joined)
    return y, (parts, joined)


def _multiply_and_scatter_bwd(
    num_chunks: int, num_frozen: int, kept: Any, dy: Array
) -> Any:
    parts, joined = kept
    chunks = collectives.gather_chunks(dy, num_chunks)
    dxs = [_multiply(chunk, joined.weight.T) for chunk in chunks]
    # The matmul that needs all chunks comes after those that need one each, which hide
    # the chunks that are still on their way; XLA would be free to take it first.
    dxs, chunks = jax.lax.optimization_barrier((dxs, chunks))
    dx, dy = jnp.concatenate(dxs), jnp.concatenate(chunks)
    whole = jnp.concatenate(parts, 3)
    ends = _ends([p.shape[3] for p in parts])
    d_parts = tuple(jnp.split(dx, ends, axis=3))
    return d_parts, _gradient_of(joined, whole, dy, num_frozen, axis=0)


_multiply_and_scatter.defvjp(_multiply_and_scatter_fwd, _multiply_and_scatter_bwd)


def _gradient_of(
    joined: Joined,
    x: Float[Array, "n B s m"],
    dy: Float[Array, "n B s n_"],
    num_frozen: int,
    *,
    axis: int,
) -> Joined:
    """Return x^T dy as the gradient of the weight, or added to the total.

    `num_frozen` columns (axis 1) or rows (axis 0) come first whose gradient is zeros.
    """
    w, total = joined
    if total is not None:
        assert num_frozen == 0
        product = _multiply_transposed(x, dy, total.dtype)
        return Joined(jnp.zeros_like(w), total + product)
    if num_frozen:
        x, dy = (x, dy[..., num_frozen:]) if axis else (x[..., num_frozen:], dy)
    dw = _multiply_transposed(x, dy, w.dtype)
    if num_frozen:
        frozen = jax.lax.slice_in_dim(w, 0, num_frozen, axis=axis)
        dw = jnp.concatenate([jnp.zeros_like(frozen), dw], axis)
    return Joined(dw)


# Rows are one dim in every matmul. As three dims, XLA may lay out their operands
# differently for the forward and the backward pass, and copies whole stacks of kept
# activations from one layout to the other (jax 0.11.2).


def _multiply(x: Float[Array, "n B s m"], w: Float[Array, "m k"]) -> Array:
    y = jnp.einsum("rm,mk->rk", x.reshape(-1, x.shape[3]), w)
    return y.reshape(*x.shape[:3], w.shape[1])


def _multiply_transposed(
    x: Float[Array, "n B s m"], y: Float[Array, "n B s k"], dtype: Any
) -> Float[Array, "m k"]:
    x, y = x.reshape(-1, x.shape[3]), y.reshape(-1, y.shape[3])
    return jnp.einsum("rm,rk->mk", x, y, preferred_element_type=dtype)


def _multiply_chunks_and_scatter(
    num_chunks: int, x: Float[Array, "n B s F"], w: Float[Array, "F D"]
) -> Float[Array, "B t D"]:
    """Multiply chunk by chunk; this device's own last, while the others travel."""
    own, *others = collectives.cut_chunks(x, num_chunks)
    products = [_multiply(chunk, w) for chunk in [*others, own]]
    return collectives.scatter_chunks([products[-1], *products[:-1]])


def _ends(widths: Sequence[int]) -> list[int]:
    """Return where each of the joined arrays but the last ends."""
    return np.cumsum(widths[:-1]).tolist()
