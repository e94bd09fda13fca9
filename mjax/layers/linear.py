"""Fused projections into and out of a tensor-parallel region.

Weights that read the same input are joined along their outputs, for one matmul. Weights
that add to the same output are joined along their inputs. Weights are stored
separately, one leaf per logical matrix, so the layout of a checkpoint does not depend
on tp. Each device joins its own shards: once per step in training
(`layers.block.Block.join`), otherwise at each use (`join_columns`, `join_rows`).

Training accumulates gradients over microbatches. A matmul can add its result to an
array in memory (cuBLAS: beta = 1). So the projection takes the sum so far together with
the weight (`Joined.total`), and the backward pass returns the new sum as the "gradient"
of the old sum. No separate kernel reads and writes the sum.

Source: column and row split of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053,
section 3), and its gradient accumulation fusion; the sequence split outside the region,
Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from mjax.layers import fp8
from mjax.layers.fp8 import Quantised, QuantisedWeight
from mjax.mesh import collectives

InWeight = Float[Array, "D ..."]
"""This device's part of a weight that reads the residual stream."""

OutWeight = Float[Array, "... D"]
"""This device's part of a weight that adds to the residual stream."""


PROJECTION = "projection"
"""Name, in remat policies, of the output of a matmul with weights."""


class Joined(NamedTuple):
    """The weights of one projection, joined into one matrix on this device."""

    weight: Float[Array, "m n"] | QuantisedWeight
    """[D, F] in an input projection, [F, D] in an output projection. A quantised
    weight has no gradient, so it needs `total`."""
    total: Float[Array, "m n"] | None = None
    """Sum of the gradients so far, in the dtype of the sum. The backward pass adds its
    own gradient and returns the new sum as the gradient of `total`. For `weight` it
    returns zeros, which callers must not use. So a differentiated function must pass
    `total` to exactly one call, and that call must run. If None, `weight` has its
    ordinary gradient."""


def column_parallel(
    x: Float[Array, "B t D"],
    joined: Joined,
    widths: Sequence[int],
    num_chunks: int,
    *,
    num_frozen: int = 0,
    in_fp8: bool = False,
) -> list[Float[Array, "n B s _"]]:
    """Gather the sequence and project to the outputs that this device owns.

    Args:
      x: the device's part of the sequence, t = T/tp positions.
      joined: w_1 | w_2 | ..., [D, F].
      widths: columns F_i of each w_i; their sum is F.
      num_chunks: number of chunks of the sequence; each chunk is multiplied as it
        arrives.
      num_frozen: number of leading columns whose gradient is zeros and not computed.
        Must be 0 with a total.
      in_fp8: multiply in FP8 (`layers.fp8`), forward and backward. Activations that are
        sent over tp before a matmul are in FP8. A quantised weight implies in_fp8.
    Returns:
      x @ w_i for each i, over the whole sequence: n = tp shards of s = t positions, in
      the order of `collectives.gather_chunks`; with one chunk n = 1, s = T.
    """
    batch = x.shape[0]
    if num_chunks > 1:
        x = x.reshape(1, -1, x.shape[2])
    options = _Options(num_chunks, num_frozen, in_fp8, tuple(widths))
    y = cast(Array, _gather_and_multiply(options, x, joined))
    if num_chunks > 1:
        y = y.reshape(y.shape[0], batch, -1, y.shape[3])
    y = checkpoint_name(y, PROJECTION)
    return jnp.split(y, _ends(widths), axis=3)


def row_parallel(
    parts: Sequence[Float[Array, "n B s _"]],
    joined: Joined,
    num_chunks: int,
    *,
    num_frozen: int = 0,
    in_fp8: bool = False,
) -> Float[Array, "B t D"]:
    """Project back to the model width, sum over tp, keep this device's positions.

    Args:
      parts: inputs [n, B, s, F_i], the features that this device owns, in the order of
        `column_parallel`.
      joined: w_1, w_2, ... stacked along their inputs, [F, D], F the sum of the F_i.
      num_chunks: as in `column_parallel`.
      num_frozen: as in `column_parallel`, but for the leading rows.
      in_fp8: as in `column_parallel`; partial sums are sent in the dtype of `parts`.
    Returns:
      the sum over i and over tp of part_i @ w_i, on t = T/tp positions.
    """
    batch = parts[0].shape[1]
    if num_chunks > 1:
        parts = [p.reshape(p.shape[0], 1, -1, p.shape[3]) for p in parts]
    widths = tuple(part.shape[3] for part in parts)
    options = _Options(num_chunks, num_frozen, in_fp8, widths)
    y = cast(Array, _multiply_and_scatter(options, tuple(parts), joined))
    if num_chunks > 1:
        y = y.reshape(batch, -1, y.shape[2])
    return checkpoint_name(y, PROJECTION)


def column_parallel_apart(
    x: Float[Array, "B t D"], weights: Sequence[InWeight]
) -> list[Float[Array, "1 B T _"]]:
    """Project like `column_parallel` in one chunk, with one matmul per weight.

    Joining copies the weights. This costs little for a long sequence, but more than the
    matmul itself when decoding one token per sequence.

    Args:
      x: the device's part of the sequence.
      weights: local, [D, ...] each; the dims after the first are flattened.
    """
    x = collectives.gather_sequence(x)[None]
    return [jnp.einsum("nbsd,df->nbsf", x, w.reshape(w.shape[0], -1)) for w in weights]


def row_parallel_apart(
    parts: Sequence[Float[Array, "1 B T _"]], weights: Sequence[OutWeight]
) -> Float[Array, "B t D"]:
    """Project back like `row_parallel` in one chunk, with one matmul per weight.

    Args:
      parts: inputs of the weights.
      weights: local, [..., D] each; the dims before the last are flattened.
    """
    products = [
        jnp.einsum("nbsf,fd->nbsd", part, w.reshape(-1, w.shape[-1]))
        for part, w in zip(parts, weights, strict=True)
    ]
    return collectives.scatter_sequence(sum(products[1:], products[0])[0])


def join_columns(weights: Sequence[InWeight]) -> Joined:
    """Join weights that read the same input; a weight [D, F_i] is not reshaped."""
    matrices = [w.reshape(w.shape[0], -1) for w in weights]
    return Joined(jnp.concatenate(matrices, axis=1))


def join_rows(weights: Sequence[OutWeight]) -> Joined:
    """Join weights that add to the same output; a weight [F_i, D] is not reshaped."""
    matrices = [w.reshape(-1, w.shape[-1]) for w in weights]
    return Joined(jnp.concatenate(matrices, axis=0))


@jax.custom_vjp
def add_bias(
    x: Float[Array, "*dims"], bias: Float[Array, "..."]
) -> Float[Array, "*dims"]:
    """Add a bias to the last dims of x.

    The gradient of the bias is summed in float32 and rounded once. The transpose of
    broadcasting would sum it in the dtype of x.

    Args:
      x: activations, any float dtype.
      bias: dtype of x, and the shape of its last dims.
    """
    return x + bias.reshape((1,) * (x.ndim - bias.ndim) + bias.shape)


def _add_bias_backward(bias: Array, g: Array) -> tuple[Array, Array]:
    positions = tuple(range(g.ndim - bias.ndim))
    return g, g.sum(positions, dtype=jnp.float32).astype(bias.dtype)


add_bias.defvjp(lambda x, bias: (add_bias(x, bias), bias), _add_bias_backward)


@jax.custom_vjp
def keep_totals(x: Array, joined: Mapping[str, Joined]) -> Array:
    """Return x as the output of a skipped layer.

    The backward pass returns each total unchanged as its gradient.

    Args:
      x: input of the layer.
      joined: weights of the layer, with totals.
    """
    del joined
    return x


keep_totals.defvjp(
    lambda x, joined: (x, joined),
    lambda joined, dy: (
        dy,
        {
            name: Joined(jax.tree.map(jnp.zeros_like, w), total)
            for name, (w, total) in joined.items()
        },
    ),
)


# The backward passes are explicit for three reasons. Chunks are multiplied as they
# arrive, except in the gradient of the weights, which is one matmul. That matmul adds
# to the total. Quantised operands are kept in FP8.

_Matrix = Array | QuantisedWeight


class _Options(NamedTuple):
    """Static options of a projection."""

    num_chunks: int
    num_frozen: int
    in_fp8: bool
    widths: tuple[int, ...]
    """Widths of the joined weights."""


class _Operand(NamedTuple):
    """Activation operand of a matmul with a weight; FP8 if the weight is in FP8."""

    values: Float[Array, "n B s _"]
    scale: Float[Array, ""] | None
    """As in `fp8.Quantised`; None if not in FP8."""

    def cut(self, cut: Callable[[Array], list[Array]]) -> list["_Operand"]:
        """Split the values with the given function; all chunks keep the scale."""
        return [_Operand(chunk, self.scale) for chunk in cut(self.values)]

    def gather(self, num_chunks: int) -> list["_Operand"]:
        """Gather a part of the sequence, [B, t, _], over tp."""
        return self.cut(lambda x: collectives.gather_chunks(x, num_chunks))

    @property
    def rows(self) -> "_Operand":
        """Return all positions as one dim: [n B s, _].

        Positions are one dim in every matmul and in every chunk that is sent. With more
        dims, XLA may use different layouts in the forward and the backward pass, and
        then copies whole stacks of kept activations between them. Or it sends positions
        in another order than the matmul needs, and the matmul waits for a copy of each
        chunk (jax 0.11.2).
        """
        return _Operand(self.values.reshape(-1, self.values.shape[-1]), self.scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_and_multiply(
    options: _Options, x: Array, joined: Joined
) -> Float[Array, "n B s F"]:
    """Gather x over tp and return x @ w, computed chunk by chunk."""
    return _gather_and_multiply_fwd(options, x, joined)[0]


def _gather_and_multiply_fwd(options: _Options, x: Array, joined: Joined) -> Any:
    w = _matrix(options, joined)
    operand = _operand(x, w, fp8.FORWARD, over_tp=True)
    chunks = operand.gather(options.num_chunks)
    y = jnp.concatenate([_multiply(chunk, w) for chunk in chunks])
    # With several chunks the backward pass gathers them again, overlapped with its
    # matmuls. One chunk is kept, because gathering it again would not be overlapped.
    return y, (operand if options.num_chunks > 1 else chunks[0], joined)


def _gather_and_multiply_bwd(options: _Options, kept: Any, dy: Array) -> Any:
    x, joined = kept
    w = _matrix(options, joined)
    chunks = x.gather(options.num_chunks) if options.num_chunks > 1 else [x]
    operand = _operand(dy, w, fp8.BACKWARD)
    dx = _multiply_chunks_and_scatter(options, operand, w, transpose=True)
    return dx, _gradient_of(options, joined, _concatenate(chunks), operand, axis=1)


_gather_and_multiply.defvjp(_gather_and_multiply_fwd, _gather_and_multiply_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_and_scatter(
    options: _Options, parts: tuple[Array, ...], joined: Joined
) -> Float[Array, "B t D"]:
    """Return part_1 @ w_1 + part_2 @ w_2 + ..., as one matmul, summed over tp."""
    return _multiply_and_scatter_fwd(options, parts, joined)[0]


def _multiply_and_scatter_fwd(
    options: _Options, parts: tuple[Array, ...], joined: Joined
) -> Any:
    w = _matrix(options, joined)
    operand = _operand(jnp.concatenate(parts, 3), w, fp8.FORWARD)
    y = _multiply_chunks_and_scatter(options, operand, w)
    # In 16 bits other operations keep the parts anyway, so keeping them costs nothing.
    return y, (parts if operand.scale is None else operand, joined)


def _multiply_and_scatter_bwd(options: _Options, kept: Any, dy: Array) -> Any:
    x, joined = kept
    if not isinstance(x, _Operand):
        x = _Operand(jnp.concatenate(x, 3), None)
    w = _matrix(options, joined)
    chunks = _operand(dy, w, fp8.BACKWARD, over_tp=True).gather(options.num_chunks)
    dxs = [_multiply(chunk, w, transpose=True) for chunk in chunks]
    # The matmuls of single chunks overlap the remaining transfers, so they come before
    # the matmul that needs all chunks. Without the barrier XLA may run that one first.
    dxs, chunks = jax.lax.optimization_barrier((dxs, chunks))
    d_parts = jnp.split(jnp.concatenate(dxs), _ends(options.widths), axis=3)
    gradient = _gradient_of(options, joined, x, _concatenate(chunks), axis=0)
    return tuple(d_parts), gradient


_multiply_and_scatter.defvjp(_multiply_and_scatter_fwd, _multiply_and_scatter_bwd)


def _gradient_of(
    options: _Options, joined: Joined, x: _Operand, dy: _Operand, *, axis: int
) -> Joined:
    """Return x^T dy: as the gradient of the weight, or added to the total, if any.

    x is [n, B, s, m], dy [n, B, s, k]. The gradient of the first `num_frozen` columns
    (axis 1) or rows (axis 0) is zeros.
    """
    (w, total), num_frozen = joined, options.num_frozen
    if total is not None:
        assert num_frozen == 0
        product = _multiply_transposed(x, dy, total.dtype)
        return Joined(jax.tree.map(jnp.zeros_like, w), total + product)
    assert not isinstance(w, QuantisedWeight)
    if num_frozen and axis:
        dy = _Operand(dy.values[..., num_frozen:], dy.scale)
    elif num_frozen:
        x = _Operand(x.values[..., num_frozen:], x.scale)
    dw = _multiply_transposed(x, dy, w.dtype)
    if num_frozen:
        frozen = jax.lax.slice_in_dim(w, 0, num_frozen, axis=axis)
        dw = jnp.concatenate([jnp.zeros_like(frozen), dw], axis)
    return Joined(dw)


def _matrix(options: _Options, joined: Joined) -> _Matrix:
    """Return the weight in the form that matmuls use: quantised for FP8."""
    w = joined.weight
    if options.in_fp8 and not isinstance(w, QuantisedWeight):
        return fp8.quantise_weight(w)
    return w


def _operand(x: Array, w: _Matrix, dtype: Any, *, over_tp: bool = False) -> _Operand:
    """Return x as an operand for w; `dtype` and `over_tp` matter only in FP8."""
    if isinstance(w, QuantisedWeight):
        return _Operand(*fp8.quantise(x, dtype, over_tp=over_tp))
    return _Operand(x, None)


def _concatenate(chunks: list[_Operand]) -> _Operand:
    """Concatenate the chunks of one operand."""
    return _Operand(jnp.concatenate([c.values for c in chunks]), chunks[0].scale)


def _multiply(x: _Operand, w: _Matrix, *, transpose: bool = False) -> Array:
    """Return x @ w, or x @ w^T: [n, B, s, m] -> [n, B, s, k]."""
    values, scale = x.rows
    if isinstance(w, QuantisedWeight):
        assert scale is not None
        factor = w.rows if transpose else w.columns  # the contracted dim is the last
        y = fp8.multiply("rm,km->rk", Quantised(values, scale), factor)
    else:
        y = jnp.einsum("rm,mk->rk", values, w.T if transpose else w)
    return y.reshape(*x.values.shape[:3], y.shape[1])


def _multiply_transposed(x: _Operand, y: _Operand, dtype: Any) -> Float[Array, "m k"]:
    """Return x^T y, summed over all positions."""
    (x_values, x_scale), (y_values, y_scale) = x.rows, y.rows
    if x_scale is None or y_scale is None:
        return jnp.einsum("rm,rk->mk", x_values, y_values, preferred_element_type=dtype)
    factors = Quantised(x_values, x_scale), Quantised(y_values, y_scale)
    return fp8.multiply("rm,rk->mk", *factors, dtype=dtype)


def _multiply_chunks_and_scatter(
    options: _Options, x: _Operand, w: _Matrix, *, transpose: bool = False
) -> Float[Array, "B t D"]:
    """Multiply by chunks, the own chunk last, so that transfers overlap matmuls."""
    chunks = x.cut(lambda values: collectives.cut_chunks(values, options.num_chunks))
    if x.scale is not None:
        # Without the barrier XLA dequantises all chunks at once and slices the result,
        # which then has several readers, so XLA makes no FP8 matmul (jax 0.11.2).
        chunks = jax.lax.optimization_barrier(chunks)
    own, *others = chunks
    products = [_multiply(chunk, w, transpose=transpose) for chunk in [*others, own]]
    return collectives.scatter_chunks([products[-1], *products[:-1]])


def _ends(widths: Sequence[int]) -> list[int]:
    """Return the column where each joined array ends, except the last."""
    return np.cumsum(widths[:-1]).tolist()
