"""The sequential oracle: what a pipeline must compute, without one.

The same model, as functions, on one device or per device inside shard_map: every
virtual stage (`chunk`) of every microbatch in turn, differentiated by
`jax.value_and_grad`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from mjax.pipeline.model import Microbatch, Microbatches, Model, Weights


def gradients(
    model: Model, weights: Weights, microbatches: Microbatches
) -> tuple[Float[Array, ""], Weights]:
    """Compute the loss of all microbatches and its gradients.

    Args:
      model: as for `run.gradients`.
      weights: weights of all virtual stages, `chunks` [K, n, ...] in the order of the
        model.
      microbatches: [M, b, T].
    Returns:
      the sum of the losses, and its gradients like `weights`.
    """
    numbers = jnp.arange(jax.tree.leaves(weights.chunks)[0].shape[0])

    def loss_of(weights: Weights, micro: Microbatch) -> Array:
        context = model.context(micro)

        def through(x: Array, chunk: tuple[PyTree, Array]) -> tuple[Array, None]:
            layers, number = chunk
            return model.chunk(x, layers, context, number), None

        x = model.embed(weights.embedding, micro)
        x, _ = lax.scan(through, x, (weights.chunks, numbers))
        return model.head(weights.embedding, weights.head, x, micro)

    def loss(weights: Weights) -> Array:
        return lax.map(lambda micro: loss_of(weights, micro), microbatches).sum()

    return jax.value_and_grad(loss)(weights)
