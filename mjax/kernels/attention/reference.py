"""Attention as defined: dense, float32, without optimizations.

Input: q, k, v of one length T. Output: the weighted sum of the values. Costs
O(T^2) arithmetic and memory; the other backends are tested against it.
Source: Vaswani et al. 2017, eq. 1, arXiv:1706.03762; grouped heads: Ainslie et al.
2023, arXiv:2305.13245. Differs: prefix, window, segments, soft cap.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


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
) -> Float[Array, "B T N Hv"]:
    """Attend to the keys that `visible` and the segments allow, all in float32.

    Args:
      q: queries.
      k: keys; head n of q reads head n * K // N.
      v: values.
      segment_ids: positions see each other only if their ids are equal. The ids never
        decrease along T.
      causal: whether the keys after a query are hidden, as in `visible`.
      prefix_len: [B], causality hides no key before this position; None means 0.
      window: number of keys that a query sees, as in `visible`; None means all.
      scale: factor on the scores.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None means no cap.

    Returns:
      The output in the dtype of q.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    f32, exact = jnp.float32, jax.lax.Precision.HIGHEST
    q5 = q.astype(f32).reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q5, k.astype(f32), precision=exact) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    mask = visible(T, window, causal=causal)[None]
    if prefix_len is not None:
        in_prefix = jnp.arange(T)[None, None, :] < prefix_len[:, None, None]
        mask = mask | (visible(T, window, causal=False)[None] & in_prefix)
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    probs = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("bkgts,bskh->btkgh", probs, v.astype(f32), precision=exact)
    return out.reshape(B, T, N, v.shape[3]).astype(q.dtype)


def visible(T: int, window: int | None, *, causal: bool = True) -> Bool[Array, "T T"]:
    """Return the mask [query, key]: query i sees key j iff |i - j| < window and, if
    causal, j <= i.
    """
    i = jnp.arange(T)[:, None]
    j = jnp.arange(T)[None, :]
    mask = j <= i if causal else jnp.ones((T, T), bool)
    return mask if window is None else mask & (jnp.abs(i - j) < window)
