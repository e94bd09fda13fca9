"""What attention and its gradients are, and how far rounding may take a kernel off.

A kernel multiplies in 16 bits and sums in float32. It rounds, each time by at most u of
the value (u = 2^-8 for bfloat16, 2^-11 for float16): the probabilities P before P V and
P^T dO, the gradient of the scores dS before dS K and dS^T Q, and the results. It also
takes delta = rowsum(dO * O) from the rounded output. Element by element this bounds the
error; no other tolerance is needed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from mjax.kernels.attention import reference

_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# Below 2^-14 float16 has fixed steps of 2^-24; bfloat16 has the exponents of float32.
_SMALLEST = {"bfloat16": 0.0, "float16": 2.0**-25}
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
    v: Float[Array, "B T K H"],
    d_out: Float[Array, "B T N H"],
    segment_ids: Int32[Array, "B T"] | None,
    *,
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
      window: as in the reference.
      scale: as in the reference.
      soft_cap: as in the reference.

    Returns:
      Values from the reference in float32, lse excepted; lse [B, N, T] and all bounds
      in float64 by the definition.
    """
    attend = functools.partial(
        reference.attention,
        segment_ids=segment_ids,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
    )

    @jax.jit  # One compilation instead of one per operation.
    def out_and_gradients(q, k, v, d_out):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    results = out_and_gradients(*(x.astype(jnp.float32) for x in (q, k, v, d_out)))
    values = {
        name: np.asarray(x, np.float64)
        for name, x in zip(("out", "dq", "dk", "dv"), results, strict=True)
    }

    B, T, N, H = q.shape
    K = k.shape[2]
    unit, smallest = _UNIT[q.dtype.name], _SMALLEST[q.dtype.name]

    def rounding(x: np.ndarray) -> np.ndarray:
        return np.maximum(unit * np.abs(x), smallest)

    q64, d64 = (np.asarray(x, np.float64) for x in (q, d_out))
    k64, v64 = (np.repeat(np.asarray(x, np.float64), N // K, axis=2) for x in (k, v))

    def over_group(x: np.ndarray) -> np.ndarray:
        return x.reshape(B, T, K, N // K, H).sum(axis=3)

    scores = np.einsum("btnh,bsnh->bnts", q64, k64) * scale
    slope = np.ones_like(scores)
    if soft_cap is not None:
        slope = 1 - np.tanh(scores / soft_cap) ** 2
        scores = soft_cap * np.tanh(scores / soft_cap)
    mask = np.asarray(reference.visible(T, window))[None, None]
    if segment_ids is not None:
        ids = np.asarray(segment_ids)
        mask = mask & (ids[:, None, :, None] == ids[:, None, None, :])
    scores = np.where(mask, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    lse = top + np.log(np.exp(scores - top).sum(axis=-1, keepdims=True))
    probs = np.exp(scores - lse)
    values["lse"] = lse[..., 0]

    probs_error = np.where(mask, rounding(probs), 0.0)
    out_bound = np.einsum("bnts,bsnh->btnh", probs_error, np.abs(v64))
    out_bound += rounding(values["out"])
    d_probs = np.einsum("btnh,bsnh->bnts", d64, v64)
    delta = np.einsum("btnh,btnh->bnt", d64, values["out"])[..., None]
    delta_error = np.einsum("btnh,btnh->bnt", np.abs(d64), out_bound)[..., None]
    d_scores = probs * (d_probs - delta) * slope
    d_scores_error = np.where(mask, rounding(d_scores), 0.0)
    d_scores_error += probs * slope * delta_error
    dq_bound = np.einsum("bnts,bsnh->btnh", d_scores_error, np.abs(k64)) * scale
    dk_bound = np.einsum("bnts,btnh->bsnh", d_scores_error, np.abs(q64)) * scale
    dv_bound = np.einsum("bnts,btnh->bsnh", probs_error, np.abs(d64))
    # A score is a sum of H products, lse one of T terms: a rounding for each.
    size = np.einsum("btnh,bsnh->bnts", np.abs(q64), np.abs(k64)) * scale
    size = np.where(mask, size, 0.0).max(axis=-1)
    bounds = {
        "out": out_bound,
        "lse": _FLOAT32_UNIT * (H + T) * np.maximum(size, 1.0),
        "dq": dq_bound + rounding(values["dq"]),
        "dk": over_group(dk_bound) + rounding(values["dk"]),
        "dv": over_group(dv_bound) + rounding(values["dv"]),
    }
    return Truth(values, bounds)
