"""Causal sliding-window attention by three Pallas Mosaic GPU kernels, for Hopper.

Enters and leaves: as in `reference`, in bfloat16 or float16. One kernel forward, two
backward (dq; dk and dv), so that every sum has one owner and one order: the gradients
are the same bits each time. What is outside the window, or in blocks of other segments
altogether, is neither loaded nor computed, forward or backward.

Source: Dao 2023, algorithms 1 and 2, arXiv:2307.08691. Differs: window, segments; dq
in a kernel of its own instead of atomic additions.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from mjax.kernels.attention.mosaic_gpu.dkv import key_value_gradients
from mjax.kernels.attention.mosaic_gpu.dq import query_gradient
from mjax.kernels.attention.mosaic_gpu.forward import forward
from mjax.kernels.attention.mosaic_gpu.tiles import Problem
from mjax.kernels.attention.saved import LSE_NAME, OUT_NAME
from mjax.kernels.attention.tuning import MosaicKernel, MosaicTuning


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int32[Array, "B T"] | None,
    *,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    tuning: MosaicTuning,
) -> Float[Array, "B T N H"]:
    """Attend causally within the window and the segment.

    Scores, softmax and sums are float32; probabilities and gradients of scores are
    rounded to the dtype of q before they are multiplied. Inside shard_map all arrays
    must vary over the same axes. A remat policy that saves `OUT_NAME` and `LSE_NAME`
    spares the backward pass a second forward.

    Args:
      q: queries.
      k: keys; head n of q reads head n * K // N.
      v: values.
      segment_ids: positions see each other only where these are equal. Any numbers are
        right; blocks are left out where the ranges of numbers do not meet, which is all
        of them when the documents are packed one after the other.
      window: number of keys a query sees, itself included; None is all before it.
      scale: factor on the scores, positive.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None leaves them.
      tuning: sizes of the kernels.

    Returns:
      The output in the dtype of q.
    """
    T, N, H = q.shape[1:]
    # A copy in tiles of 8 rows needs whole tiles (TileTransform of jax 0.11.2). What is
    # added hides itself: keys by causality, queries by having no cotangent.
    q, k, v = (_lengthen(x, -T % 8) for x in (q, k, v))
    if segment_ids is not None:
        segment_ids = _lengthen(segment_ids, -T % 8, mode="edge")
    problem = Problem(
        seq_len=q.shape[1],
        padded_len=padded_len(T, tuning.forward, tuning.dq, tuning.dkv),
        heads=N,
        kv_heads=k.shape[2],
        head_dim=H,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
    )
    out: Any = _attention(problem, tuning, q, k, v, segment_ids)
    return out[:, :T]


def padded_len(T: int, *kernels: MosaicKernel) -> int:
    """Return T rounded up to whole tiles and blocks of all these kernels."""
    whole = math.lcm(*(size for k in kernels for size in (k.tile, k.block)))
    return -(-T // whole) * whole


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(problem: Problem, tuning: MosaicTuning, q, k, v, segment_ids):
    return _forward(problem, tuning, q, k, v, segment_ids)[0]


def _forward(problem: Problem, tuning: MosaicTuning, q, k, v, segment_ids):
    """Return the output and what the backward pass needs."""
    config = tuning.forward
    segments = None
    if segment_ids is not None:
        ids = _padded_segments(problem, segment_ids)
        bounds = key_bounds(ids, config.tile, config.block)
        segments = (ids, bounds)
    out, lse = forward(q, k, v, segments, problem=problem, tuning=config)
    out = checkpoint_name(out, OUT_NAME)
    lse = checkpoint_name(lse, LSE_NAME)
    return out, (q, k, v, segment_ids, out, lse)


def _backward(problem: Problem, tuning: MosaicTuning, saved, d_out):
    """Return the cotangents of q, k, v (and none for the segments)."""
    q, k, v, segment_ids, out, lse = saved
    # Row sums of probs * d_probs, from the output (eq. 4 of the source, section 3.1).
    product = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    delta = product.sum(axis=-1).transpose(0, 2, 1)
    rest = problem.padded_len - problem.seq_len
    delta = jnp.pad(delta, ((0, 0), (0, 0), (0, rest)))
    q_segments = k_segments = None
    if segment_ids is not None:
        ids = _padded_segments(problem, segment_ids)
        dq, dkv = tuning.dq, tuning.dkv
        q_segments = ids, key_bounds(ids, dq.tile, dq.block)
        k_segments = ids, query_bounds(ids, dkv.tile, dkv.block)
    rows = (q, k, v, d_out, lse, delta)
    dq = query_gradient(*rows, q_segments, problem=problem, tuning=tuning.dq)
    dk, dv = key_value_gradients(*rows, k_segments, problem=problem, tuning=tuning.dkv)
    return dq, dk, dv, None


_attention.defvjp(_forward, _backward)


def _padded_segments(problem: Problem, segment_ids: Any) -> Int32[Array, "B P"]:
    """Lengthen by the last id: it adds no segment to any tile.

    Keys beyond the end are hidden by causality, queries beyond it by their log-sum-exp.
    """
    rest = problem.padded_len - problem.seq_len
    return _lengthen(segment_ids.astype(jnp.int32), rest, mode="edge")


def _lengthen(x: Any, rest: int, mode: str = "constant") -> Any:
    """Add positions, the second dim: zeros, or copies of the last ("edge")."""
    if rest == 0:
        return x
    widths = [(0, 0), (0, rest), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths, mode=mode)


def key_bounds(
    ids: Int32[Array, "B P"], tile: int, block: int
) -> Int32[Array, "B 2 tiles"]:
    """Bound the blocks of keys that the queries of each tile can share a segment with.

    Args:
      ids: segment of each position, P a multiple of tile and block.
      tile: queries per tile.
      block: keys per block.

    Returns:
      For each tile, the first block that may share a segment with it, and the first
      from which on, up to the tile's own, all is one segment.
    """
    meets, same = _relations(ids, tile, block)
    blocks = jnp.arange(meets.shape[2], dtype=jnp.int32)
    ends = (
        jnp.arange(1, meets.shape[1] + 1, dtype=jnp.int32) * tile + block - 1
    ) // block
    before = blocks < ends[:, None]
    first = jnp.argmax(meets, axis=2).astype(jnp.int32)
    full_from = jnp.where(before & ~same, blocks + 1, 0).max(axis=2)
    return jnp.stack([first, full_from], axis=1)


def query_bounds(
    ids: Int32[Array, "B P"], tile: int, block: int
) -> Int32[Array, "B 2 tiles"]:
    """Bound the blocks of queries that the keys of each tile can share a segment with.

    Args:
      ids: segment of each position, P a multiple of tile and block.
      tile: keys per tile.
      block: queries per block.

    Returns:
      For each tile, the end of the blocks that may share a segment with it, and the end
      of those that, from the tile's own on, are all of one segment.
    """
    meets, same = _relations(ids, tile, block)
    blocks = jnp.arange(meets.shape[2], dtype=jnp.int32)
    starts = jnp.arange(meets.shape[1], dtype=jnp.int32) * tile // block
    after = blocks >= starts[:, None]
    end = jnp.where(meets, blocks + 1, 0).max(axis=2)
    full_until = jnp.where(after & ~same, blocks, blocks.size).min(axis=2)
    return jnp.stack([end, full_until], axis=1)


def _relations(ids: Any, tile: int, block: int) -> tuple[Any, Any]:
    """Return, [B, tiles, blocks]: the ranges of ids meet; all ids are one."""

    def ranges(size: int) -> tuple[Any, Any]:
        parts = ids.reshape(ids.shape[0], -1, size)
        return parts.min(axis=2), parts.max(axis=2)

    tile_low, tile_high = (x[:, :, None] for x in ranges(tile))
    low, high = (x[:, None, :] for x in ranges(block))
    meets = (tile_low <= high) & (low <= tile_high)
    same = (tile_low == high) & (low == tile_high)
    return meets, same & (tile_low == tile_high)
