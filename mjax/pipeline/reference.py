"""The sequential oracle: what a pipeline must compute, without one.

The same model, as functions, on one device or per device inside shard_map: every chunk
of every microbatch in turn, differentiated by `jax.value_and_grad`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mjax.pipeline.run import Microbatches, Model, Weights


def gradients(
    model: Model, weights: Weights, microbatches: Microbatches
) -> tuple[Float[Array, ""], Weights]:
    """Compute the loss of all microbatches and its gradients.

    Args:
      model: as for `run.gradients`.
      weights: chunks [K, n, ...], all of them, in the order of the model.
      microbatches: [M, b, T].
    Returns:
      the sum of the losses, and its gradients like `weights`.
    """
    num_chunks = jax.tree.leaves(weights.chunks)[0].shape[0]
    num_microbatches = jax.tree.leaves(microbatches)[0].shape[0]

    def loss(weights: Weights) -> Array:
        total = jnp.zeros(())
        for i in range(num_microbatches):
            micro = {name: rows[i] for name, rows in microbatches.items()}
            x = model.embed(weights.ends, micro)
            for number in range(num_chunks):
                chunk = jax.tree.map(lambda w, k=number: w[k], weights.chunks)
                context = model.context(micro)
                x = model.chunk(chunk, x, context, jnp.int32(number))
            total += model.head(weights.ends, x, micro)
        return total

    return jax.value_and_grad(loss)(weights)
