"""Exact attention with gradients, and bounds of a kernel's rounding errors.

A kernel multiplies in 16 bits and sums in float32. It rounds, each time by at most u of
the value (u = 2^-8 for bfloat16, 2^-11 for float16): the probabilities P before P V and
P^T dO, the gradient of the scores dS before dS K and dS^T Q, and the results. It also
takes delta = rowsum(dO * O) from the rounded output. A score is a float32 sum of H
products, and its error is a relative error of P, which counts where scores are large.
Element by element this bounds the error; no other tolerance is needed.
"""

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Float, Int32

from mjax.kernels.attention import reference

_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# Below 2^-14 float16 has fixed steps of 2^-24. bfloat16 has the exponents of float32,
# where what is below 2^-126 may become 0.
_SMALLEST = {"bfloat16": 2.0**-126, "float16": 2.0**-25}
_FLOAT32_UNIT = 2.0**-24


@dataclasses.dataclass(frozen=True)
class Truth:
    """Exact values, and the largest error that rounding explains."""

    values: dict[str, np.ndarray]
    bounds: dict[str, np.ndarray]

    def errors(self, got: dict[str, jax.Array]) -> dict[str, float]:
        """Return the largest error of each array in units of its bound."""
        errors = {}
        for name, array in got.items():
            difference = np.abs(np.asarray(array, np.float64) - self.values[name])
            share = difference / self.bounds[name]
            errors[name] = float(np.where(np.isnan(share), np.inf, share).max())
        return errors


def truth(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    d_out: Float[Array, "B T N Hv"],
    segment_ids: Int32[Array, "B T"] | None,
    *,
    causal: bool = True,
    prefix_len: Int32[Array, "B"] | None = None,
    window: int | None,
    scale: float,
    soft_cap: float | None,
) -> Truth:
    """Compute out, lse, dq, dk and dv with bounds of their errors.

    Args:
      q: queries, in 16 bits like k, v and d_out.
      k: keys.
      v: values.
      d_out: cotangent of the output.
      segment_ids: as in the reference.
      causal: as in the reference.
      prefix_len: as in the reference.
      window: as in the reference.
      scale: as in the reference.
      soft_cap: as in the reference.

    Returns:
      Values and bounds in float64, by the definition; lse [B, N, T]. No exponential
      overflows, whatever the scores.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    unit, smallest = _UNIT[q.dtype.name], _SMALLEST[q.dtype.name]

    def rounding(x: np.ndarray) -> np.ndarray:
        return np.maximum(unit * np.abs(x), smallest)

    q64, d64 = (np.asarray(x, np.float64) for x in (q, d_out))
    k64, v64 = (np.repeat(np.asarray(x, np.float64), N // K, axis=2) for x in (k, v))

    def over_group(x: np.ndarray) -> np.ndarray:
        return x.reshape(B, T, K, N // K, -1).sum(axis=3)

    def by_key(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
        return np.einsum("bnts,bsnh->btnh", weights, x, optimize=True)

    def by_query(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
        return np.einsum("bnts,btnh->bsnh", weights, x, optimize=True)

    def products(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.einsum("btnh,bsnh->bnts", x, y, optimize=True)

    scores = products(q64, k64) * scale
    # One rounding for each product, and a few for the exponent computed from the sum.
    scores_error = _FLOAT32_UNIT * (H + 4) * products(np.abs(q64), np.abs(k64)) * scale
    slope, slope_error = np.ones_like(scores), np.zeros_like(scores)
    if soft_cap is not None:
        x = scores / soft_cap
        slope = 1 / np.cosh(x) ** 2
        # By 4 r (1 - r), r = 1 / (exp(2 x) + 1): small x and large ones keep their
        # digits; below 0, r is near 1, and 1 - r has an absolute error.
        slope_error = slope * (2 * scores_error / soft_cap + 8 * _FLOAT32_UNIT)
        slope_error += np.where(x < 0, 4 * _FLOAT32_UNIT, 0.0)
        scores = soft_cap * np.tanh(x)
        scores_error = slope * scores_error + 8 * _FLOAT32_UNIT * soft_cap
    mask = np.asarray(reference.visible(T, window, causal=causal))[None, None]
    if prefix_len is not None:
        both = np.asarray(reference.visible(T, window, causal=False))
        mask = mask | (
            both & (np.arange(T) < np.asarray(prefix_len)[:, None, None, None])
        )
    if segment_ids is not None:
        ids = np.asarray(segment_ids)
        mask = mask & (ids[:, None, :, None] == ids[:, None, None, :])
    scores = np.where(mask, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    lse = top + np.log(np.exp(scores - top).sum(axis=-1, keepdims=True))
    probs = np.exp(scores - lse)
    lse_error = (probs * scores_error).sum(axis=-1, keepdims=True)
    # A rounding for each of T terms, and a few of the base and of the sum's logarithm.
    lse_error += _FLOAT32_UNIT * (T + 4 * np.maximum(np.abs(lse), 1.0))
    # As both scores and lse are exponents, their errors are relative ones of probs.
    relative = scores_error + lse_error

    out = by_key(probs, v64)
    probs_error = np.where(mask, rounding(probs), 0.0) + probs * relative
    out_bound = by_key(probs_error, np.abs(v64)) + rounding(out)
    d_probs = products(d64, v64)
    delta = np.einsum("btnh,btnh->bnt", d64, out)[..., None]
    delta_error = np.einsum("btnh,btnh->bnt", np.abs(d64), out_bound)[..., None]
    d_scores = probs * (d_probs - delta) * slope
    d_scores_error = np.where(mask, rounding(d_scores), 0.0)
    d_scores_error += probs * slope * delta_error
    d_scores_error += np.abs(d_scores) * relative
    d_scores_error += np.abs(probs * (d_probs - delta)) * slope_error
    dq, dk = by_key(d_scores, k64) * scale, over_group(by_query(d_scores, q64)) * scale
    dv = over_group(by_query(probs, d64))
    dk_bound = over_group(by_query(d_scores_error, np.abs(q64))) * scale
    dv_bound = over_group(by_query(probs_error, np.abs(d64)))
    values = {"out": out, "lse": lse[..., 0], "dq": dq, "dk": dk, "dv": dv}
    bounds = {
        "out": out_bound,
        "lse": lse_error[..., 0],
        "dq": by_key(d_scores_error, np.abs(k64)) * scale + rounding(dq),
        "dk": dk_bound + rounding(dk),
        "dv": dv_bound + rounding(dv),
    }
    return Truth(values, bounds)
