"""Cross-entropy in chunks of positions, with gradients computed in the forward pass.

The loss is a sum over positions. So the gradient of the logits is (softmax - onehot)
times one factor for all positions, which the backward pass supplies. A chunk
therefore computes its logits once, uses them for the loss and both gradients, and
discards them: three matmuls, as without chunks, and no recomputation.

Source: Hsu et al. 2024 (Liger Kernel), arXiv:2410.10989, FusedLinearCrossEntropy;
split vocabulary: Shoeybi et al. 2019, arXiv:1909.08053, section 3. Differs: plain JAX,
and the result is a sum, so one factor scales all gradients.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_F32 = jnp.float32
_NO_TARGET = -1


def _held_whole(x: jax.Array) -> jax.Array:
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The size of a vocabulary, and reductions over the devices that share it."""

    size: int
    """V; columns from V on are padding and have zero probability."""
    maximum: Callable[[jax.Array], jax.Array] = _held_whole
    """Elementwise maximum over the devices that share the vocabulary."""
    total: Callable[[jax.Array], jax.Array] = _held_whole
    """Elementwise sum over the devices that share the vocabulary."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Static arguments of one call."""

    num_chunks: int
    """Number of chunks of equal size into which the padded positions are split."""
    scale: float
    """Factor on the logits."""
    vocabulary: Vocabulary
    """Size of the vocabulary, and reductions over the devices that share it."""
    soft_cap: float | None = None
    """Bound on the magnitude of the scaled logits; None means no bound."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def summed_nll(
    options: Options, x: Any, targets: Any, w: Any, bias: Any, first_token: Any
) -> Any:
    """Return the summed NLL in nats; arguments as in `api.linear_cross_entropy`.

    Here x is [n, D] and targets [n]. Without a gradient only the loss is computed.
    """

    def chunk(_: None, piece: Any) -> tuple[None, Any]:
        x, targets = piece
        return None, _nll(options, x, targets, w, bias, first_token)[0].sum()

    return _over_chunks(chunk, None, options.num_chunks, (x, targets))[1].sum()


def _forward(
    options: Options, x: Any, targets: Any, w: Any, bias: Any, first_token: Any
) -> tuple[Any, Any]:
    def chunk(sums: Any, piece: Any) -> tuple[Any, Any]:
        x, targets = piece
        nll, dz = _nll(options, x, targets, w, bias, first_token)
        dz = dz.astype(x.dtype)
        dx = jnp.einsum("nv,vd->nd", dz, w)
        parts = [jnp.einsum("nv,nd->vd", dz, x, preferred_element_type=_F32)]
        if bias is not None:
            parts.append(dz.sum(0, dtype=_F32))
        return jax.tree.map(jnp.add, sums, parts), (nll.sum(), dx)

    params = [w] if bias is None else [w, bias]
    zeros = [jnp.zeros_like(p, _F32) for p in params]
    grads, (nll, dx) = _over_chunks(chunk, zeros, options.num_chunks, (x, targets))
    dx = dx.reshape(-1, x.shape[1])[: x.shape[0]]
    return nll.sum(), (dx, grads, bias)


def _backward(options: Options, saved: Any, g: Any) -> Any:
    dx, grads, bias = saved

    def scaled(grad: Any, dtype: Any) -> Any:
        return (g * grad.astype(_F32)).astype(dtype)

    # x and w have one dtype.
    dw = scaled(grads[0], dx.dtype)
    db = None if bias is None else scaled(grads[1], bias.dtype)
    return scaled(dx, dx.dtype), None, dw, db, None


summed_nll.defvjp(_forward, _backward)


def _over_chunks(chunk: Any, carry: Any, num_chunks: int, arrays: Any) -> Any:
    """Scan chunk(carry, (x, targets)) over chunks of equal size; the last is padded.

    A padding position has no target, so it adds nothing to any sum.
    """
    x, targets = arrays
    if num_chunks == 1:
        return chunk(carry, arrays)
    missing = -x.shape[0] % num_chunks
    x = jnp.pad(x, ((0, missing), (0, 0)))
    targets = jnp.pad(targets, (0, missing), constant_values=_NO_TARGET)
    pieces = x.reshape(num_chunks, -1, x.shape[1]), targets.reshape(num_chunks, -1)
    return lax.scan(chunk, carry, pieces)


def _nll(
    options: Options, x: Any, targets: Any, w: Any, bias: Any, first_token: Any
) -> tuple[Any, Any]:
    """Return each position's loss [c] and its gradient with respect to x w^T [c, v]."""
    vocabulary, scale = options.vocabulary, options.scale
    z = jnp.einsum("nd,vd->nv", x, w, preferred_element_type=_F32)
    z = (z if bias is None else z + bias[None].astype(_F32)) * scale
    cap, slope = options.soft_cap, None
    if cap is not None:
        z = jnp.tanh(z / cap)
        z, slope = cap * z, 1.0 - z * z
    token_ids = (first_token + jnp.arange(w.shape[0]))[None]
    z = jnp.where(token_ids < vocabulary.size, z, -jnp.inf)
    top = vocabulary.maximum(z.max(-1))
    total = vocabulary.total(jnp.exp(z - top[:, None]).sum(-1))
    hit = token_ids == targets[:, None]
    target_logit = vocabulary.total(jnp.where(hit, z, 0.0).sum(-1))
    log_total = top + jnp.log(total)
    predicted = targets >= 0
    nll = jnp.where(predicted, log_total - target_logit, 0.0)
    dz = jnp.exp(z - log_total[:, None]) - hit.astype(_F32)
    dz = dz if slope is None else dz * slope
    return nll, jnp.where(predicted[:, None], dz * scale, 0.0)
