"""Norms in plain JAX, with a backward pass that XLA makes two reads of the data.

Automatic differentiation leaves XLA with the centring of x on the way to every sum, and
it then stores float32 intermediates as large as x. Here all sums over a position are
taken in one read of x and g: with moments about a value near the mean instead of about
the mean, none of them waits for another. A second read makes dx and sums over
positions.

Source: Ba et al. 2016, arXiv:1607.06450, eq. 4, differentiated; shifted moments, Chan
et al. 1983, doi:10.1080/00031305.1983.10483115, section 2.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.layer_norm import reference

_F32 = jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is static in one call; fields as the arguments of the entry point."""

    centred: bool
    eps: float


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def norm(options: Options, x: Any, scale: Any, bias: Any) -> Any:
    """Normalise x over its last dim; arguments as in the entry point."""
    return reference.norm(x, scale, bias, centred=options.centred, eps=options.eps)


def _forward(options: Options, x: Any, scale: Any, bias: Any) -> tuple[Any, Any]:
    return norm(options, x, scale, bias), (x, scale, bias)


def _backward(options: Options, saved: Any, g: Any) -> tuple[Any, Any, Any]:
    x, scale, bias = saved
    y, g = x.astype(_F32), g.astype(_F32)
    gs = g * scale.astype(_F32)
    # Any value near the mean keeps the digits of the variance; the first one is free.
    y = y - y[..., :1] if options.centred else y
    square, along = _mean(y * y), _mean(gs * y)
    if options.centred:
        mean, mean_gs = _mean(y), _mean(gs)
        square, along = square - mean * mean, along - mean * mean_gs
        y, gs = y - mean, gs - mean_gs
    rstd = lax.rsqrt(jnp.maximum(square, 0.0) + options.eps)
    y = y * rstd
    dx = rstd * (gs - y * (rstd * along))
    d_scale = _sum_over_positions(g * y).astype(scale.dtype)
    d_bias = None if bias is None else _sum_over_positions(g).astype(bias.dtype)
    return dx.astype(x.dtype), d_scale, d_bias


norm.defvjp(_forward, _backward)


def _mean(x: jax.Array) -> jax.Array:
    return x.mean(-1, keepdims=True)


def _sum_over_positions(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1]).sum(0)
