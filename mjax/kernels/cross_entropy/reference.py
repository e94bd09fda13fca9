"""Cross-entropy as defined: all logits at once, float32, without optimizations.

Input: hidden states, table and targets of one device that holds the whole vocabulary.
Output: the summed negative log-likelihood, in nats. The chunked backend is tested
against it and against its automatic gradients.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def summed_nll(
    x: Float[Array, "B T D"],
    w: Float[Array, "v D"],
    bias: Float[Array, " v"] | None,
    targets: Int[Array, "B T"],
    *,
    scale: float,
    vocab_size: int,
    soft_cap: float | None = None,
) -> Float[Array, ""]:
    """Return the sum of -log softmax((x w^T + bias) scale)[target] over positions.

    Args:
      x: hidden states.
      w: table of the output projection; rows from vocab_size on are padding.
      bias: [v], added to x w^T, or None.
      targets: token ids; negative ids add 0.
      scale: factor on the logits.
      vocab_size: V.
      soft_cap: bound on the magnitude of the scaled logits, or None.
    """
    f32, exact = jnp.float32, jax.lax.Precision.HIGHEST
    logits = jnp.einsum("btd,vd->btv", x.astype(f32), w.astype(f32), precision=exact)
    if bias is not None:
        logits = logits + bias.astype(f32)[None, None]
    logits = logits * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logp = jax.nn.log_softmax(logits[..., :vocab_size])
    picked = jnp.take_along_axis(logp, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return -jnp.where(targets < 0, 0.0, picked).sum()
