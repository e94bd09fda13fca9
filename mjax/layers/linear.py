"""Projections into and out of a tensor-parallel region, fused.

Several weights that read the same input are joined along their outputs and multiplied
at once; several that add to the same output are joined along their inputs. Weights are
stored apart (one leaf a logical matrix, so that no stored value's place depends on tp)
and joined per device, where each holds its own shard.

Source: column and row split of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053,
section 3); the sequence split between the two, Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from mjax.mesh import collectives

InWeight = Float[Array, "D ..."]
"""A weight of this device that reads the residual stream."""

OutWeight = Float[Array, "... D"]
"""A weight of this device that adds to it."""


PROJECTION = "projection"
"""Name under which remat policies know the output of a product with weights."""


def column_parallel(
    x: Float[Array, "B t D"], weights: Sequence[InWeight]
) -> list[Float[Array, "B T _"]]:
    """Gather the sequence and project to the outputs that this device owns.

    Args:
      x: the device's part of the sequence, t = T/tp positions.
      weights: local, [D, ...] each; the dims after the first count as one, F_i.
    Returns:
      x @ w for each w, over the whole sequence.
    """
    y = _multiply_joined(collectives.gather_sequence(x), tuple(weights))
    y = checkpoint_name(y, PROJECTION)
    ends = np.cumsum([math.prod(w.shape[1:]) for w in weights[:-1]])
    return jnp.split(y, ends.tolist(), axis=2)


def row_parallel(
    parts: Sequence[Float[Array, "B T _"]], weights: Sequence[OutWeight]
) -> Float[Array, "B t D"]:
    """Project back to the model width, sum over tp, keep this device's positions.

    Args:
      parts: inputs [B, T, F_i], the features that this device owns.
      weights: local, [..., D] each; the dims before the last count as one, F_i.
    Returns:
      the sum over i and over tp of part @ w, on t = T/tp positions.
    """
    y = checkpoint_name(_multiply_and_add(tuple(parts), tuple(weights)), PROJECTION)
    return collectives.scatter_sequence(y)


# The backward passes are written out so that what they keep are the weights themselves,
# not their joined copies: those would be kept for each layer, and in a pipeline for
# each microbatch in flight.


@jax.custom_vjp
def _multiply_joined(x: Array, weights: tuple[Array, ...]) -> Array:
    """Return x @ (w_1 | w_2 | ...)."""
    return jnp.einsum("btd,df->btf", x, _join_columns(weights))


def _multiply_joined_fwd(x: Array, weights: tuple[Array, ...]) -> Any:
    return _multiply_joined(x, weights), (x, weights)


def _multiply_joined_bwd(kept: Any, dy: Array) -> Any:
    x, weights = kept
    dx = jnp.einsum("btf,df->btd", dy, _join_columns(weights))
    dw = jnp.einsum("btd,btf->df", x, dy)
    ends = np.cumsum([math.prod(w.shape[1:]) for w in weights[:-1]])
    pieces = jnp.split(dw, ends.tolist(), axis=1)
    return dx, tuple(p.reshape(w.shape) for p, w in zip(pieces, weights, strict=True))


_multiply_joined.defvjp(_multiply_joined_fwd, _multiply_joined_bwd)


@jax.custom_vjp
def _multiply_and_add(parts: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
    """Return part_1 @ w_1 + part_2 @ w_2 + ..., as one product."""
    return jnp.einsum("btf,fd->btd", jnp.concatenate(parts, 2), _join_rows(weights))


def _multiply_and_add_fwd(parts: tuple[Array, ...], weights: tuple[Array, ...]) -> Any:
    return _multiply_and_add(parts, weights), (parts, weights)


def _multiply_and_add_bwd(kept: Any, dy: Array) -> Any:
    parts, weights = kept
    ends = np.cumsum([p.shape[2] for p in parts[:-1]]).tolist()
    dx = jnp.einsum("btd,fd->btf", dy, _join_rows(weights))
    dw = jnp.einsum("btf,btd->fd", jnp.concatenate(parts, 2), dy)
    pieces = jnp.split(dw, ends, axis=0)
    return tuple(jnp.split(dx, ends, axis=2)), tuple(
        p.reshape(w.shape) for p, w in zip(pieces, weights, strict=True)
    )


_multiply_and_add.defvjp(_multiply_and_add_fwd, _multiply_and_add_bwd)


def _join_columns(weights: tuple[Array, ...]) -> Float[Array, "D F"]:
    return jnp.concatenate([w.reshape(w.shape[0], -1) for w in weights], axis=1)


def _join_rows(weights: tuple[Array, ...]) -> Float[Array, "F D"]:
    return jnp.concatenate([w.reshape(-1, w.shape[-1]) for w in weights], axis=0)
