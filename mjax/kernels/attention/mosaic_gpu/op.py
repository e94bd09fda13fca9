"""Sliding-window attention by Pallas Mosaic GPU kernels, for Hopper.

Input and output are those of `reference`, in bfloat16 or float16. There is one forward
kernel, and two backward kernels, one for dq and one for dk and dv. These two compute
every sum in a fixed order, so gradients are bit-identical in every run. With
`MosaicTuning.fused` there is one backward kernel, and dq is not deterministic. Blocks
outside the window, or entirely in other segments, are neither loaded nor computed,
forward or backward.

Source: Dao 2023, algorithms 1 and 2, arXiv:2307.08691. Differs: window, segments and
prefix; a separate kernel for dq instead of atomic additions.

Additional letter: P padded length.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from mjax.kernels.attention.mosaic_gpu import dkv_wide
from mjax.kernels.attention.mosaic_gpu.dkv import key_value_gradients
from mjax.kernels.attention.mosaic_gpu.dq import query_gradient
from mjax.kernels.attention.mosaic_gpu.forward import forward
from mjax.kernels.attention.mosaic_gpu.fused import gradients
from mjax.kernels.attention.mosaic_gpu.tiles import LOG2_E, Problem
from mjax.kernels.attention.saved import LSE_NAME, OUT_NAME
from mjax.kernels.attention.tuning import MosaicKernel, MosaicTuning


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    segment_ids: Int32[Array, "B T"] | None,
    *,
    causal: bool = True,
    prefix_len: Int32[Array, "B"] | None = None,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    tuning: MosaicTuning,
) -> Float[Array, "B T N Hv"]:
    """Attend like `reference.attention`, in the Mosaic GPU kernels.

    Scores, softmax and sums are float32; probabilities and gradients of scores are
    rounded to the dtype of q before they are multiplied. Inside shard_map all arrays
    must vary over the same axes. With a remat policy that saves `OUT_NAME` and
    `LSE_NAME`, the backward pass does not repeat the forward pass.

    Args:
      q: queries.
      k: keys; head n of q reads head n * K // N.
      v: values.
      segment_ids: positions see each other only if their ids are equal. The ids never
        decrease along T.
      causal: whether the keys after a query are hidden.
      prefix_len: [B], causality hides no key before this position; None means 0.
      window: query i sees key j only if |i - j| < window; None means no window.
      scale: factor on the scores, positive.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None means no cap.
      tuning: sizes of the kernels.

    Returns:
      The output in the dtype of q.
    """
    T, N, H = q.shape[1:]
    # A copy in tiles of 8 rows needs whole tiles (TileTransform of jax 0.11.2). The
    # padding has no effect: causality or `Problem.num_keys` hides the padded keys, and
    # the padded queries have zero cotangents.
    q, k, v = (_lengthen(x, -T % 8) for x in (q, k, v))
    if segment_ids is not None:
        segment_ids = _lengthen(segment_ids, -T % 8, mode="edge")
    backward = tuning.fused or tuning.dkv, tuning.dq
    problem = Problem(
        seq_len=q.shape[1],
        padded_len=padded_len(T, tuning.forward, *backward),
        heads=N,
        kv_heads=k.shape[2],
        head_dim=H,
        value_dim=v.shape[3],
        causal=causal,
        num_keys=T,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
    )
    out: Any = _attention(problem, tuning, q, k, v, segment_ids, prefix_len)
    return out[:, :T]


def padded_len(T: int, *kernels: MosaicKernel) -> int:
    """Return T rounded up to whole tiles and blocks of all these kernels."""
    whole = math.lcm(*(size for k in kernels for size in (k.tile, k.block)))
    return -(-T // whole) * whole


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(problem: Problem, tuning: MosaicTuning, q, k, v, segment_ids, prefix):
    return _forward(problem, tuning, q, k, v, segment_ids, prefix)[0]


def _forward(problem: Problem, tuning: MosaicTuning, q, k, v, segment_ids, prefix):
    """Return the output and the residuals of the backward pass."""
    edges = _key_edges(problem, segment_ids, prefix)
    out, lse = forward(q, k, v, *edges, problem=problem, tuning=tuning.forward)
    out = checkpoint_name(out, OUT_NAME)
    lse = checkpoint_name(lse, LSE_NAME)
    return out, (q, k, v, segment_ids, prefix, out, lse)


def _backward(problem: Problem, tuning: MosaicTuning, saved, d_out):
    """Return the cotangents of q, k and v, and None for segments and prefixes."""
    q, k, v, segment_ids, prefix, out, lse = saved
    # Row sums of probs * d_probs, from the output (section 3.1, eq. 4 of the source).
    product = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    delta = product.sum(axis=-1).transpose(0, 2, 1)
    rest = problem.padded_len - problem.seq_len
    delta = jnp.pad(delta, ((0, 0), (0, 0), (0, rest)))
    rows = (q, k, v, d_out, lse * LOG2_E - problem.offset, delta)
    last, first = _query_edges(problem, segment_ids, prefix)
    if tuning.fused is not None:
        assert problem.causal, "api refuses it"
        assert prefix is None, "api refuses it"
        fused = gradients(*rows, last, problem=problem, tuning=tuning.fused)
        return *fused, None, None
    edges = _key_edges(problem, segment_ids, prefix)
    dq = query_gradient(*rows, *edges, problem=problem, tuning=tuning.dq)
    of_keys = key_value_gradients
    if tuning.dkv.splits_width:
        of_keys = dkv_wide.key_value_gradients
    dk, dv = of_keys(*rows, last, first, problem=problem, tuning=tuning.dkv)
    return dq, dk, dv, None, None


_attention.defvjp(_forward, _backward)


def _key_edges(problem: Problem, segment_ids, prefix) -> tuple[Any, Any]:
    """Return each query's first and last key; None if a kernel can compute them."""
    first = last = None
    if segment_ids is not None:
        first = first_keys(problem, segment_ids)
    if _near_is_data(problem, segment_ids, prefix):
        last = last_keys(problem, segment_ids, prefix)
    return first, last


def _query_edges(problem: Problem, segment_ids, prefix) -> tuple[Any, Any]:
    """Return each key's last and first query; None if a kernel can compute them."""
    first = last = None
    if segment_ids is not None:
        last = last_queries(problem, segment_ids)
    if _near_is_data(problem, segment_ids, prefix):
        first = first_queries(problem, segment_ids, prefix)
    return last, first


def _near_is_data(problem: Problem, segment_ids, prefix) -> bool:
    """Return whether the kernels need an array for the near edge of `masks.FarEdge`."""
    return prefix is not None or (segment_ids is not None and not problem.causal)


def first_keys(
    problem: Problem, segment_ids: Int32[Array, "B T"]
) -> Int32[Array, "B P"]:
    """Return the first key that each query sees in its segment and window."""
    starts, i = _starts(problem, segment_ids)
    return jnp.maximum(starts, i - (problem.reach - 1))


def last_queries(
    problem: Problem, segment_ids: Int32[Array, "B T"]
) -> Int32[Array, "B P"]:
    """Return the last query that sees each key; the last segment extends beyond T."""
    ends, j = _ends(problem, segment_ids)
    return jnp.minimum(ends, j + (problem.reach - 1))


def last_keys(
    problem: Problem,
    segment_ids: Int32[Array, "B T"] | None,
    prefix: Int32[Array, "B"] | None,
) -> Int32[Array, "B P"]:
    """Return each query's last key; queries beyond the end see themselves."""
    i = jnp.arange(problem.padded_len, dtype=jnp.int32)[None]
    num_keys = problem.num_keys or problem.seq_len
    last = jnp.minimum(i + (problem.reach - 1), num_keys - 1)
    if segment_ids is not None:
        last = jnp.minimum(last, _ends(problem, segment_ids)[0])
    if prefix is not None:
        last = jnp.minimum(last, jnp.maximum(i, prefix[:, None] - 1))
    return jnp.maximum(last, i)


def first_queries(
    problem: Problem,
    segment_ids: Int32[Array, "B T"] | None,
    prefix: Int32[Array, "B"] | None,
) -> Int32[Array, "B P"]:
    """Return the first query that sees each key."""
    j = jnp.arange(problem.padded_len, dtype=jnp.int32)[None]
    first = jnp.maximum(j - (problem.reach - 1), 0)
    if segment_ids is not None:
        first = jnp.maximum(first, _starts(problem, segment_ids)[0])
    if prefix is not None:
        first = jnp.where(j < prefix[:, None], first, j)
    return first


def _starts(problem: Problem, segment_ids):
    """Return the first position of each position's segment, and positions [1, P]."""
    ids, i = _padded(problem, segment_ids)
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    return lax.cummax(jnp.where(begins, i, 0), axis=1), i


def _ends(problem: Problem, segment_ids):
    """Return the last position of each position's segment, and positions [1, P]."""
    ids, j = _padded(problem, segment_ids)
    is_last = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (0, 1)))
    beyond = problem.padded_len - 1
    return lax.cummin(jnp.where(is_last, j, beyond), axis=1, reverse=True), j


def _padded(
    problem: Problem, segment_ids: Int32[Array, "B T"]
) -> tuple[Int32[Array, "B P"], Int32[Array, "1 P"]]:
    """Return the ids, padded with copies of the last id, and the positions."""
    ids = _lengthen(segment_ids, problem.padded_len - problem.seq_len, mode="edge")
    return ids, jnp.arange(problem.padded_len, dtype=jnp.int32)[None]


def _lengthen(x: Any, rest: int, mode: str = "constant") -> Any:
    """Append `rest` positions to dim 1: zeros, or copies of the last entry ("edge")."""
    if rest == 0:
        return x
    widths = [(0, 0), (0, rest), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths, mode=mode)
