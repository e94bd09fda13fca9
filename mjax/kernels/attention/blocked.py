"""Attention tile by tile in plain JAX: cost O(T * window), memory O(T).

Queries and keys are cut into blocks of equal length. The pairs (query block, key block)
with at least one visible score are listed when the function is traced, and a scan walks
the list. The forward scan keeps a running softmax per query; the backward scan
recomputes each tile from the saved log-sum-exp. Pairs hidden by causality and the
window are never computed. (With prefixes, whose lengths are data, only pairs hidden by
the window are skipped.) The trip count is a constant of the compiled program.

Source: Dao 2023, algorithms 1 and 2, arXiv:2307.08691. Differs: one flat loop over the
visible pairs; the sums are stored in full-size arrays that the loop updates in place.

Additional letters: n blocks, G = N / K query heads per key head, c positions per block.
The block dim comes first, so reading a block is a contiguous copy.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int32, Shaped

from mjax.kernels.attention.saved import LSE_NAME, OUT_NAME
from mjax.kernels.attention.tuning import BlockedTuning

# The softmax starts from a finite maximum: exp(-inf - finite) = 0. A start at -inf
# would give exp(-inf + inf) = NaN on a tile with a hidden row.
_LOWEST = -1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static:
    """Static arguments of one call."""

    seq_len: int
    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None
    block: int


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
    tuning: BlockedTuning,
) -> Float[Array, "B T N Hv"]:
    """Attend like `reference.attention`, one tile at a time.

    Scores, softmax and sums are float32; probabilities are rounded to the dtype of v
    for the matmul with it. Inside shard_map all arrays must vary over the same axes.
    With a remat policy that saves `OUT_NAME` and `LSE_NAME`, the backward pass does not
    repeat the forward pass.

    Args:
      q: queries.
      k: keys; head n of q reads head n * K // N.
      v: values.
      segment_ids: positions see each other only if their ids are equal. The ids never
        decrease along T.
      causal: as in `reference.visible`.
      prefix_len: [B], causality hides no key before this position; None means 0.
      window: as in `reference.visible`.
      scale: factor on the scores.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None means no cap.
      tuning: size of the tiles.

    Returns:
      The output in the dtype of q.
    """
    block = min(tuning.block, q.shape[1])
    static = _Static(
        seq_len=q.shape[1],
        causal=causal,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        block=block,
    )
    return _flash(static, q, k, v, segment_ids, prefix_len)


def visible_tiles(
    T: int, block: int, window: int | None, *, causal: bool = True
) -> Int32[np.ndarray, "P 2"]:
    """List the tiles with a visible score as pairs (query block, key block)."""
    reach, num = T if window is None else window, -(-T // block)
    pairs = [
        (i, j)
        for i in range(num)
        # The first query of block i sees keys from i * block - reach + 1 on. The last
        # query, (i + 1) * block - 1, sees up to reach - 1 keys after itself.
        for j in range(
            max(0, (i * block - reach + 1) // block),
            i + 1 if causal else min(num, ((i + 1) * block + reach - 2) // block + 1),
        )
    ]
    return np.array(pairs, np.int32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(static: _Static, q, k, v, segment_ids, prefix_len):
    return _forward(static, q, k, v, segment_ids, prefix_len)[0]


def _forward(static: _Static, q, k, v, segment_ids, prefix_len):
    """Return the output and the residuals of the backward pass."""
    q_blocks, k_blocks, v_blocks = _split_qkv(static, q, k, v)
    seg_blocks = _split_segments(static, segment_ids)

    def add_tile(carry, i, j):
        acc, row_max, row_sum = carry
        scores = _tile_scores(static, _read(q_blocks, i), _read(k_blocks, j))
        mask = _tile_mask(static, seg_blocks, prefix_len, i, j)
        scores = jnp.where(mask, scores, -jnp.inf)
        old_max = _read(row_max, i)
        new_max = jnp.maximum(old_max, scores.max(axis=-1))
        probs = jnp.exp(scores - new_max[..., None])
        shrink = jnp.exp(old_max - new_max)
        out = _dot("bkgts,bksh->bkgth", probs.astype(v.dtype), _read(v_blocks, j))
        return (
            _write(acc, _read(acc, i) * shrink[..., None] + out, i),
            _write(row_max, new_max, i),
            _write(row_sum, _read(row_sum, i) * shrink + probs.sum(axis=-1), i),
        )

    # zeros_like, not zeros: inside shard_map it varies over the axes of q.
    zero_rows = jnp.zeros_like(q_blocks[..., 0], dtype=jnp.float32)
    zeros = jnp.broadcast_to(zero_rows[..., None], (*zero_rows.shape, v.shape[3]))
    carry = (zeros, zero_rows + _LOWEST, zero_rows)
    is_causal = static.causal and prefix_len is None
    acc, row_max, row_sum = _over_pairs(static, add_tile, carry, is_causal)
    out = _join(acc / row_sum[..., None], q)
    # Names for remat policies: the backward pass recomputes the tiles from these two.
    out = checkpoint_name(out, OUT_NAME)
    lse = checkpoint_name(row_max + jnp.log(row_sum), LSE_NAME)
    return out, (q, k, v, segment_ids, prefix_len, out, lse)


def _backward(static: _Static, residuals, d_out):
    """Return the cotangents of q, k and v, and None for segments and prefixes."""
    q, k, v, segment_ids, prefix_len, out, lse = residuals
    q_blocks, k_blocks, v_blocks = _split_qkv(static, q, k, v)
    seg_blocks = _split_segments(static, segment_ids)
    do_blocks, _, _ = _split_qkv(static, d_out, k, v)
    # Row sums of probs * d_probs, from the output (section 3.1, eq. 4 of the source).
    out_blocks, _, _ = _split_qkv(static, out, k, v)
    delta = jnp.sum(
        do_blocks.astype(jnp.float32) * out_blocks.astype(jnp.float32), axis=-1
    )

    def add_tile(carry, i, j):
        dq, dk, dv = carry
        q_i, k_j, do_i = _read(q_blocks, i), _read(k_blocks, j), _read(do_blocks, i)
        scores = _tile_scores(static, q_i, k_j)
        mask = _tile_mask(static, seg_blocks, prefix_len, i, j)
        probs = jnp.where(mask, jnp.exp(scores - _read(lse, i)[..., None]), 0.0)
        d_probs = _dot("bkgth,bksh->bkgts", do_i, _read(v_blocks, j))
        d_scores = probs * (d_probs - _read(delta, i)[..., None]) * static.scale
        if static.soft_cap is not None:
            d_scores = d_scores * (1.0 - jnp.square(scores / static.soft_cap))
        d_scores = d_scores.astype(q.dtype)
        probs = probs.astype(v.dtype)
        dq_i = _dot("bkgts,bksh->bkgth", d_scores, k_j)
        dk_j = _dot("bkgts,bkgth->bksh", d_scores, q_i)
        dv_j = _dot("bkgts,bkgth->bksh", probs, do_i)
        return (
            _write(dq, _read(dq, i) + dq_i, i),
            _write(dk, _read(dk, j) + dk_j, j),
            _write(dv, _read(dv, j) + dv_j, j),
        )

    blocks = (q_blocks, k_blocks, v_blocks)
    carry = tuple(jnp.zeros_like(x, dtype=jnp.float32) for x in blocks)
    is_causal = static.causal and prefix_len is None
    dq, dk, dv = _over_pairs(static, add_tile, carry, is_causal)
    dk, dv = (_join(x[:, :, :, None], like) for x, like in ((dk, k), (dv, v)))
    return _join(dq, q), dk, dv, None, None


_flash.defvjp(_forward, _backward)


def _over_pairs(
    static: _Static, add_tile: Callable, carry: tuple, is_causal: bool
) -> tuple:
    """Apply add_tile to the carry for each visible pair; one pair needs no loop."""
    pairs = visible_tiles(static.seq_len, static.block, static.window, causal=is_causal)
    if len(pairs) == 1:
        return add_tile(carry, 0, 0)
    return lax.scan(lambda c, ij: (add_tile(c, ij[0], ij[1]), None), carry, pairs)[0]


def _tile_scores(
    static: _Static, q_i: Float[Array, "B K G c H"], k_j: Float[Array, "B K c H"]
) -> Float[Array, "B K G c c"]:
    """Return the scores of one tile, scaled and capped, before the mask."""
    scores = _dot("bkgth,bksh->bkgts", q_i, k_j) * static.scale
    if static.soft_cap is None:
        return scores
    return static.soft_cap * jnp.tanh(scores / static.soft_cap)


def _tile_mask(
    static: _Static,
    seg_blocks: Int32[Array, "n B c"] | None,
    prefix_len: Int32[Array, "B"] | None,
    i,
    j,
) -> Bool[Array, "#B 1 1 c c"]:
    """Return which scores of the tile (i, j) are visible.

    Padding comes last, so causality hides it from the real queries. Without causality
    the padding is a document of its own. Each padded query sees at least itself.
    """
    rows = jnp.arange(static.block, dtype=jnp.int32)
    distance = ((i - j) * static.block + rows[:, None] - rows[None, :])[None]
    queries, keys = i * static.block + rows, j * static.block + rows
    mask = distance >= 0 if static.causal else jnp.ones_like(distance, bool)
    if prefix_len is not None:
        mask = mask | (keys[None, None, :] < prefix_len[:, None, None])
    if not static.causal or prefix_len is not None:
        is_real = queries < static.seq_len
        mask = mask & (is_real[:, None] == (keys < static.seq_len)[None, :])[None]
    if static.window is not None:
        mask = mask & (jnp.abs(distance) < static.window)
    if seg_blocks is not None:
        seg_i, seg_j = _read(seg_blocks, i), _read(seg_blocks, j)
        mask = mask & (seg_i[:, :, None] == seg_j[:, None, :])
    return mask[:, None, None]


def _split_qkv(static: _Static, q, k, v):
    """Cut q into [n, B, K, G, c, H], k and v into [n, B, K, c, ...], padded with 0."""
    B, T, N, H = q.shape
    K = k.shape[2]
    q_blocks = _split(static, q.reshape(B, T, K, N // K, H), 0)
    return (
        q_blocks.transpose(0, 1, 3, 4, 2, 5),
        _split(static, k, 0).transpose(0, 1, 3, 2, 4),
        _split(static, v, 0).transpose(0, 1, 3, 2, 4),
    )


def _split_segments(static: _Static, segment_ids):
    """Cut the segments into [n, B, c]; the padding is a segment of its own."""
    return None if segment_ids is None else _split(static, segment_ids, -1)


def _split(
    static: _Static, x: Shaped[Array, "B T *dims"], fill: int
) -> Shaped[Array, "n B c *dims"]:
    """Pad the positions to whole blocks and put the blocks first."""
    B, T, *dims = x.shape
    n = -(-T // static.block)
    widths = [(0, 0), (0, n * static.block - T)] + [(0, 0)] * len(dims)
    x = jnp.pad(x, widths, constant_values=fill)
    return jnp.moveaxis(x.reshape(B, n, static.block, *dims), 1, 0)


def _join(
    blocks: Float[Array, "n B K G c width"], like: Float[Array, "B T N H"]
) -> Float[Array, "B T N width"]:
    """Undo the split: back to positions, heads and dtype of `like`, without padding."""
    B, T, N, _ = like.shape
    x = blocks.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, N, blocks.shape[-1])
    return x[:, :T].astype(like.dtype)


def _dot(spec: str, x: Array, y: Array) -> Array:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def _read(blocks: Array, i) -> Array:
    return lax.dynamic_index_in_dim(blocks, i, keepdims=False)


def _write(blocks: Array, block: Array, i) -> Array:
    return lax.dynamic_update_index_in_dim(blocks, block, i, axis=0)
