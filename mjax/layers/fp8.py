"""Matrices quantised to FP8, and their matmuls.

Forward operands (activations, weights) are e4m3, gradients e5m2 (Micikevicius et al.
2022, arXiv:2209.05433, section 3). A tensor has one scale, computed from its largest
magnitude each time it is quantised. Nothing is kept from step to step (the recipe
Float8CurrentScaling of NVIDIA Transformer Engine; delayed scaling keeps a history).

Differs from that recipe: scales are powers of two. Scaling is then exact in bfloat16
and in float32, and a value is rounded once (by the conversion). Two devices or chunks
with different scales round alike, unless a value is below the normal numbers of its
format. The cost is range: up to one power of two, of the 15 (e4m3) or 30 (e5m2) between
the smallest and the largest normal number.

A matmul is written as dequantisation to bfloat16 and a bfloat16 matmul. On a GPU with
FP8 matmuls XLA replaces both by an FP8 matmul (`__cublas$lt$matmul$f8`) with the scales
as operands. Elsewhere it runs as written, in bfloat16, with the same result up to the
order of the sums.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mjax.mesh import collectives

FORWARD = jnp.float8_e4m3fn
"""Activations and weights: 4 bits of exponent, 3 of mantissa."""

BACKWARD = jnp.float8_e5m2
"""Gradients: 5 bits of exponent, 2 of mantissa."""

_SMALLEST_SCALE = 2.0**-100
"""Keeps the scale, its reciprocal and the scaled values normal in float32."""


class Quantised(NamedTuple):
    """A tensor in FP8; it represents values * scale."""

    values: Float[Array, "*dims"]
    scale: Float[Array, ""]
    """float32, a power of two. An infinite entry makes the scale NaN. A NaN entry makes
    the scale or the values NaN, because a maximum over tp may drop a NaN."""

    def dequantised(self) -> Float[Array, "*dims"]:
        """Return the tensor in bfloat16, which holds each value exactly."""
        return self.values.astype(jnp.bfloat16) * self.scale.astype(jnp.bfloat16)


class QuantisedWeight(NamedTuple):
    """A weight in FP8, in both orientations, or a stack of weights.

    On Hopper an operand of an FP8 matmul must have the contracted dim last in memory.
    The forward pass contracts the first dim of a weight, the backward pass the last.
    Both orientations together take as many bytes as one copy in bfloat16.
    """

    values: Float[Array, "*stack m n"]
    transposed: Float[Array, "*stack n m"]
    scale: Float[Array, "*stack"]
    """float32, one power of two for each weight of the stack."""

    @property
    def rows(self) -> Quantised:
        """The weight [m, n]; undefined for a stack."""
        return Quantised(self.values, self.scale)

    @property
    def columns(self) -> Quantised:
        """The transposed weight [n, m]; undefined for a stack."""
        return Quantised(self.transposed, self.scale)


def quantise(
    x: Float[Array, "*dims"], dtype: DTypeLike, *, over_tp: bool = False
) -> Quantised:
    """Quantise a tensor with a scale computed from its largest magnitude.

    Args:
      x: bfloat16 or float32. Zeros have scale 1.
      dtype: `FORWARD` or `BACKWARD`.
      over_tp: all tp devices use the same scale, each for its part of the sequence.
        The gradient of a weight contracts the whole sequence in one matmul, so all
        parts need the same scale; one scale per part would need one matmul per part.
        Transformer Engine also reduces the magnitude of these tensors over tp. Tensors
        whose features are split over tp never share a matmul, so each device has its
        own scale.
    Returns:
      the values and their scale. The largest scaled value is between half the largest
      number of the format and that number. If an entry of x is infinite or NaN, the
      result of every matmul is NaN, which the guard of the optimizer detects; a
      saturating conversion would mask it.
    """
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    if over_tp:
        largest = collectives.max_over_sequence(largest)
    scale = _scale(largest, dtype)
    return Quantised(_divide(x, scale, dtype), scale)


def quantise_weight(w: Float[Array, "*stack m n"]) -> QuantisedWeight:
    """Quantise a weight, or each weight of a stack, in both orientations.

    Args:
      w: this device's part; devices do not share its scale.
    """
    largest = jnp.max(jnp.abs(w), axis=(-2, -1)).astype(jnp.float32)
    scale = _scale(largest, FORWARD)
    values = _divide(w, scale[..., None, None], FORWARD)
    return QuantisedWeight(values, values.swapaxes(-2, -1), scale)


def multiply(
    spec: str, a: Quantised, b: Quantised, *, dtype: DTypeLike = jnp.bfloat16
) -> Float[Array, "*result"]:
    """Return the einsum of two quantised tensors.

    Args:
      spec: for `jnp.einsum`, one matmul: each dim is contracted or in the result.
      a: left operand. Its contracted dims should be last: Hopper copies an operand in
        another order.
      b: right operand; its contracted dims should be last too.
      dtype: dtype of the result. Sums are in float32.
    """
    return jnp.einsum(
        spec, a.dequantised(), b.dequantised(), preferred_element_type=dtype
    )


def _scale(largest: Float[Array, "*n"], dtype: DTypeLike) -> Float[Array, "*n"]:
    """Return the smallest power of two that scales a magnitude into a format."""
    wanted = largest / float(jnp.finfo(dtype).max)
    wanted = jnp.maximum(wanted, jnp.float32(_SMALLEST_SCALE))
    # Round up to a power of two: carry any bit of the mantissa into the exponent.
    bits = lax.bitcast_convert_type(wanted, jnp.uint32)
    bits = (bits + jnp.uint32(0x007F_FFFF)) & jnp.uint32(0x7F80_0000)
    scale = lax.bitcast_convert_type(bits, jnp.float32)
    scale = jnp.where(largest == 0, jnp.float32(1), scale)
    return jnp.where(jnp.isfinite(largest), scale, jnp.float32(jnp.nan))


def _divide(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    return (x.astype(jnp.float32) * (1 / scale)).astype(dtype)
