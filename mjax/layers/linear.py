"""Projections into and out of a tensor-parallel region, fused.

Several weights that read the same input are joined along their outputs and multiplied
at once; several that add to the same output are joined along their inputs. Weights are
stored apart (one leaf a logical matrix, so that no stored value's place depends on tp)
and joined per device, where each holds its own shard.

Source: column and row split of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053,
section 3); the sequence split between the two, Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from mjax.mesh import collectives

Matrix = Float[Array, "_ _"]
"""A weight [in, out] of this device; sizes differ within one fused projection."""


def column_parallel(
    x: Float[Array, "B t D"], weights: Sequence[Matrix]
) -> list[Float[Array, "B T _"]]:
    """Gather the sequence and project to the outputs that this device owns.

    Args:
      x: the device's part of the sequence, t = T/tp positions.
      weights: local matrices [D, F_i].
    Returns:
      x @ w for each w, over the whole sequence.
    """
    x = collectives.gather_sequence(x)
    y = jnp.einsum("btd,df->btf", x, jnp.concatenate(weights, axis=1))
    ends, end = [], 0
    for w in weights[:-1]:
        end += w.shape[1]
        ends.append(end)
    return jnp.split(y, ends, axis=2)


def row_parallel(
    parts: Sequence[Float[Array, "B T _"]], weights: Sequence[Matrix]
) -> Float[Array, "B t D"]:
    """Project back to the model width, sum over tp, keep this device's positions.

    Args:
      parts: inputs [B, T, F_i], the features that this device owns.
      weights: local matrices [F_i, D].
    Returns:
      the sum over i and over tp of part @ w, on t = T/tp positions.
    """
    y = jnp.einsum(
        "btf,fd->btd", jnp.concatenate(parts, axis=2), jnp.concatenate(weights, axis=0)
    )
    return collectives.scatter_sequence(y)
