"""LayerNorm and RMSNorm: the norm alone, or together with the residual stream.

Input: activations, scale and bias. Output: the normalised activations, in their dtype.
Only the arguments are kept for the backward pass. The forward pass is `reference.norm`,
which XLA compiles to one kernel that reads x once. The backward pass has two backends.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mjax.kernels.layer_norm import reference, tuning, xla
from mjax.kernels.target import Target, target

Backend = Literal["mosaic_gpu", "xla"]

# The D / 128 sums of a thread stay in registers; at D = 12288 they spill.
_MAX_WIDTH = 8192
NEEDS = (
    "mosaic_gpu takes bfloat16 and float16 without a bias on Hopper GPUs, at widths up "
    f"to {_MAX_WIDTH} that {tuning.LANE} divides"
)
"""Text that says when `choose` selects the kernel."""


def norm(
    x: Float[Array, "*dims D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    *,
    centred: bool,
    eps: float,
) -> Float[Array, "*dims D"]:
    """Normalise every position by its own statistics over D in float32, then scale it.

    centred (LayerNorm): y = (x - mean) * scale / sqrt(var + eps) + bias;
    otherwise (RMSNorm): y = x * scale / sqrt(mean(x^2) + eps) + bias.

    Can be differentiated once. Inside shard_map all arguments must vary over the same
    mesh axes.

    Args:
      x: activations, any float dtype.
      scale: factors on the normalised activations, any float dtype.
      bias: added to the scaled activations; None adds nothing.
      centred: subtract the mean.
      eps: added to the variance or mean square; unit of x squared.
    Returns:
      y, dtype of x.
    Source: Ba et al. 2016, arXiv:1607.06450, eq. 4; Zhang and Sennrich 2019,
    arXiv:1910.07467, eq. 4. Differs: eps, absent in the latter.
    """
    return _norm(_Options(centred=centred, eps=eps, backend="xla"), x, scale, bias)


def skip_and_norm(
    x: Float[Array, "*dims D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    *,
    centred: bool,
    eps: float,
) -> tuple[Float[Array, "*dims D"], Float[Array, "*dims D"]]:
    """Return x and `norm` of x, for the start of a residual branch.

    The backward kernel adds the gradients of both results, which saves a separate pass.

    Args:
      x: activations, as in `norm`.
      scale: factors.
      bias: added to the scaled activations; None adds nothing.
      centred: subtract the mean.
      eps: added to the variance or mean square.
    """
    backend = choose(
        target=target(),
        dtype=x.dtype,
        width=x.shape[-1],
        use_bias=bias is not None,
    )
    options = _Options(centred=centred, eps=eps, backend=backend)
    return _skip_and_norm(options, x, scale, bias)


def choose(*, target: Target, dtype: DTypeLike, width: int, use_bias: bool) -> Backend:
    """Choose the backend of the backward pass of `skip_and_norm`.

    Args:
      target: the kind of device that the program is traced for.
      dtype: dtype of x.
      width: D.
      use_bias: whether there is a bias.
    """
    fits = width % tuning.LANE == 0 and width <= _MAX_WIDTH
    narrow = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    hopper = target.generation == "hopper"
    return "mosaic_gpu" if hopper and narrow and fits and not use_bias else "xla"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """Static arguments of one call."""

    centred: bool
    eps: float
    backend: Backend


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(options: _Options, x: Any, scale: Any, bias: Any) -> Any:
    return reference.norm(x, scale, bias, centred=options.centred, eps=options.eps)


def _norm_forward(options: _Options, x: Any, scale: Any, bias: Any) -> Any:
    return _norm(options, x, scale, bias), (x, scale, bias)


def _norm_backward(options: _Options, saved: Any, g: Any) -> tuple[Any, Any, Any]:
    return _backward(options, saved, g, None)


_norm.defvjp(_norm_forward, _norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _skip_and_norm(options: _Options, x: Any, scale: Any, bias: Any) -> Any:
    return x, _norm(options, x, scale, bias)


def _skip_forward(options: _Options, x: Any, scale: Any, bias: Any) -> Any:
    return _skip_and_norm(options, x, scale, bias), (x, scale, bias)


def _skip_backward(options: _Options, saved: Any, g: Any) -> tuple[Any, Any, Any]:
    g_x, g_y = g
    return _backward(options, saved, g_y, g_x)


_skip_and_norm.defvjp(_skip_forward, _skip_backward)


def _backward(options: _Options, saved: Any, g: Any, g_x: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of x, scale and bias; g_x is added to the gradient of x."""
    x, scale, bias = saved
    statics = {"centred": options.centred, "eps": options.eps}
    if options.backend == "mosaic_gpu":
        # Imported here, not at the top, so that runs without a GPU save the 0.3 s of
        # this import.
        from mjax.kernels.layer_norm import mosaic_gpu

        width = x.shape[-1]
        rows = (a.reshape(-1, width) for a in (g, g_x))
        dx, d_scale = mosaic_gpu.backward(
            x.reshape(-1, width), scale, *rows, tuning=tuning.mosaic(width), **statics
        )
        return dx.reshape(x.shape), d_scale.astype(scale.dtype), None
    dx, d_scale, d_bias = xla.backward(x, scale, g, **statics)
    dx = dx if g_x is None else dx + g_x.astype(dx.dtype)
    d_bias = None if bias is None else d_bias.astype(bias.dtype)
    return dx.astype(x.dtype), d_scale.astype(scale.dtype), d_bias
