"""Cross-entropy over a vocabulary split over tensor parallelism.

Logits are never gathered: devices exchange the maximum, the sum of exponentials and the
target's logit of each position, three numbers instead of V. The backward pass
exchanges nothing.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; traffic B x T.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mjax.mesh import collectives

NO_TARGET = -1
"""Target of a position that is not predicted."""


def cross_entropy(
    logits: Float[Array, "B T v"], targets: Int[Array, "B T"], vocab_size: int
) -> Float[Array, "B T"]:
    """Return the negative log-likelihood of each target, in nats.

    Args:
      logits: this device's columns, any float dtype; computed in float32.
      targets: global token ids; `NO_TARGET` gives 0.
      vocab_size: V; columns from there on are padding and have no probability.
    Returns:
      nll: [B, T] float32, equal on all devices of a tp group.
    """
    return _cross_entropy(logits, targets, vocab_size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(logits: Any, targets: Any, vocab_size: int) -> Any:
    return _forward(logits, targets, vocab_size)[0]


def _forward(logits: Any, targets: Any, vocab_size: int) -> tuple[Any, Any]:
    z = mask_padding(logits, vocab_size)
    top = collectives.max_over_vocab(z.max(-1))
    total = collectives.sum_over_vocab(jnp.exp(z - top[..., None]).sum(-1))
    hit = token_ids(z.shape[-1]) == targets[..., None]
    target_logit = collectives.sum_over_vocab(jnp.where(hit, z, 0.0).sum(-1))
    log_total = top + jnp.log(total)
    nll = jnp.where(targets == NO_TARGET, 0.0, log_total - target_logit)
    return nll, (logits, log_total, targets)


def _backward(vocab_size: int, saved: Any, g: Any) -> tuple[Any, None]:
    logits, log_total, targets = saved
    z = mask_padding(logits, vocab_size)
    hit = token_ids(z.shape[-1]) == targets[..., None]
    g = jnp.where(targets == NO_TARGET, 0.0, g)[..., None]
    dz = (jnp.exp(z - log_total[..., None]) - hit.astype(jnp.float32)) * g
    return dz.astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)


def token_ids(local_vocab: int) -> Int[Array, " v"]:
    """Return the token id of each of this device's columns."""
    return collectives.vocab_offset(local_vocab) + jnp.arange(local_vocab)


def mask_padding(
    logits: Float[Array, "*dims v"], vocab_size: int
) -> Float[Array, "*dims v"]:
    """Give the columns beyond the vocabulary the logit -inf; returns float32."""
    real = token_ids(logits.shape[-1]) < vocab_size
    return jnp.where(real, logits.astype(jnp.float32), -jnp.inf)
