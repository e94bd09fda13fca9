"""Cross-entropy over a vocabulary split over tensor parallelism.

Logits are never gathered, and only one chunk of positions at a time has logits in
memory. Devices exchange the maximum, the sum of exponentials and the target's logit of
each position: three numbers instead of V. The same pass computes the gradients; the
backward pass exchanges nothing.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3, with the same traffic: B x T
numbers, not B x T x V.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mjax.kernels.cross_entropy.api import Vocabulary, linear_cross_entropy
from mjax.mesh import collectives

NO_TARGET = -1
"""Target of a position that is not predicted."""


def summed_nll(
    x: Float[Array, "B T D"],
    table: Float[Array, "v D"],
    bias: Float[Array, " v"] | None,
    targets: Int[Array, "B T"],
    *,
    scale: float,
    vocab_size: int,
    soft_cap: float | None = None,
) -> Float[Array, ""]:
    """Project to the vocabulary; return the targets' summed negative log-likelihood.

    Args:
      x: hidden states of the whole sequence.
      table: this device's tokens, dtype of x.
      bias: bias of this device's tokens, or None.
      targets: global token ids; `NO_TARGET` adds 0.
      scale: factor on the logits.
      vocab_size: size of the vocabulary without padding; ids from there on have zero
        probability.
      soft_cap: bound on the magnitude of the scaled logits, or None.
    Returns:
      nats, float32, equal on all devices of a tp group.
    """
    vocabulary = Vocabulary(
        size=vocab_size,
        maximum=collectives.max_over_vocab,
        total=collectives.sum_over_vocab,
    )
    first = collectives.vocab_offset(table.shape[0])
    return linear_cross_entropy(
        x,
        table,
        bias,
        targets,
        first,
        scale=scale,
        vocabulary=vocabulary,
        soft_cap=soft_cap,
    )


def mask_padding(
    logits: Float[Array, "*dims v"], vocab_size: int
) -> Float[Array, "*dims v"]:
    """Set the logits of padding to -inf; return float32.

    Args:
      logits: this device's columns.
      vocab_size: size of the vocabulary without padding.
    """
    local_vocab = logits.shape[-1]
    token_ids = collectives.vocab_offset(local_vocab) + jnp.arange(local_vocab)
    return jnp.where(token_ids < vocab_size, logits.astype(jnp.float32), -jnp.inf)
