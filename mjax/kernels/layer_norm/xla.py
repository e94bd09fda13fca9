"""Backward pass of norms in plain JAX; XLA compiles it to two reads of the data.

With automatic differentiation every sum depends on the centred x, and XLA stores
float32 intermediates as large as x. Here one read of x and g computes all sums over a
position. These are moments about a value near the mean, not about the mean itself, so
no sum depends on another. A second read computes dx and the sums over positions.

Source: Ba et al. 2016, arXiv:1607.06450, eq. 4, differentiated; shifted moments: Chan
et al. 1983, doi:10.1080/00031305.1983.10483115, section 2.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_F32 = jnp.float32


def backward(
    x: Float[Array, "*dims D"],
    scale: Float[Array, " D"],
    g: Float[Array, "*dims D"],
    *,
    centred: bool,
    eps: float,
) -> tuple[Float[Array, "*dims D"], Float[Array, " D"], Float[Array, " D"]]:
    """Return the float32 gradients of x, scale and bias.

    Args:
      x: input of the norm.
      scale: factors.
      g: gradient of the norm's result.
      centred: LayerNorm if True, otherwise RMSNorm.
      eps: added to the variance or mean square.
    """
    y, g = x.astype(_F32), g.astype(_F32)
    gs = g * scale.astype(_F32)
    # Any value near the mean keeps the variance precise; the first entry costs nothing.
    y = y - y[..., :1] if centred else y
    square, along = _mean(y * y), _mean(gs * y)
    if centred:
        mean, mean_gs = _mean(y), _mean(gs)
        square, along = square - mean * mean, along - mean * mean_gs
        y, gs = y - mean, gs - mean_gs
    rstd = lax.rsqrt(jnp.maximum(square, 0.0) + eps)
    y = y * rstd
    dx = rstd * (gs - y * (rstd * along))
    return dx, _sum_over_positions(g * y), _sum_over_positions(g)


def _mean(x: jax.Array) -> jax.Array:
    return x.mean(-1, keepdims=True)


def _sum_over_positions(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1]).sum(0)
