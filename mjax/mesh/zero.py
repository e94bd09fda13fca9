"""ZeRO: where parameters, gradients and optimizer state live over data parallelism.

Stored (master) parameters and moments are split over dp_shard from level 1 on
(`mesh.rules.param_spec`). A step then

- level 0: uses the stored parameters, all-reduces the gradients;
- level 1: all-gathers the compute copy, all-reduces the gradients, keeps its part;
- level 2: all-gathers the compute copy, reduce-scatters the gradients;
- level 3: all-gathers each layer where it is used, again in the backward pass, and
  reduce-scatters the layer's gradient there.

The gather moves the compute dtype (bfloat16), never the float32 masters; gradients are
reduced in `precision.reduce`. With dp_replicate > 1 (HSDP) the reduction has two hops:
inside dp_shard, then over dp_replicate on 1/dp_shard of the bytes (MiCS, Zhang et al.
2022, arXiv:2205.00119, section 3.4). At levels 0 to 2 nothing is reduced inside the
loop over microbatches: once per step.

Source: Rajbhandari et al. 2020, arXiv:1910.02054. Level 1 there scatters too; here it
is the all-reduce, so that levels 1 and 2 differ in what a device receives.

Functions here run per device inside shard_map, on values varying over all axes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from mjax.mesh import collectives, rules
from mjax.mesh.axes import AXES, DP_SHARD


def gather(params: Any, specs: Any, dtype: DTypeLike) -> Any:
    """Make the compute copy of parameters: cast, then all-gather over dp_shard.

    Args:
      params: tree of this device's parts, varying over all axes.
      specs: tree of PartitionSpecs of `params`.
      dtype: of the compute copy, and of the bytes that travel.
    Returns:
      the tree with every leaf whole over dp_shard.
    """

    def leaf(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return _all_gather(x.astype(dtype), rules.dim_of(spec, DP_SHARD))

    return jax.tree.map(leaf, params, specs)


def gather_with_gradient(
    params: Any, specs: Any, dtype: DTypeLike, reduce_dtype: DTypeLike
) -> Any:
    """Level 3: `gather`, whose transpose reduce-scatters in `reduce_dtype`."""

    def leaf(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        dim = rules.dim_of(spec, DP_SHARD)
        return _gather_leaf(dim, jnp.dtype(dtype), jnp.dtype(reduce_dtype), x)

    return jax.tree.map(leaf, params, specs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather_leaf(dim: int | None, dtype: Any, reduce_dtype: Any, x: Any) -> Any:
    del reduce_dtype
    return _all_gather(x.astype(dtype), dim)


def _gather_leaf_fwd(dim: int | None, dtype: Any, reduce_dtype: Any, x: Any) -> Any:
    return _gather_leaf(dim, dtype, reduce_dtype, x), jnp.zeros((0,), x.dtype)


def _gather_leaf_bwd(
    dim: int | None, dtype: Any, reduce_dtype: Any, like: Any, g: Any
) -> tuple[Any]:
    del dtype
    return (_reduce_scatter(g.astype(reduce_dtype), dim).astype(like.dtype),)


_gather_leaf.defvjp(_gather_leaf_fwd, _gather_leaf_bwd)


def reduce_gradients(grads: Any, specs: Any, *, level: int, dtype: DTypeLike) -> Any:
    """Sum gradients over every axis that their parameter is not split over.

    Args:
      grads: tree; at levels 0 to 2 of the compute copy (whole over dp_shard), at
        level 3 of the parts, already reduce-scattered over dp_shard where split.
      specs: PartitionSpecs of the stored parameters.
      level: the ZeRO level.
      dtype: of the reduction and of the result.
    Returns:
      the tree of this device's parts, invariant over the axes that the spec leaves out.
    """

    def leaf(g: jax.Array, spec: PartitionSpec) -> jax.Array:
        g = g.astype(dtype)
        dim = rules.dim_of(spec, DP_SHARD)
        if dim is not None and level == 1:
            g = _own_part(lax.psum(g, DP_SHARD), dim)
        elif dim is not None and level == 2:
            g = _reduce_scatter(g, dim)
        rest = tuple(axis for axis in AXES if rules.dim_of(spec, axis) is None)
        return lax.psum(g, rest) if rest else g

    return jax.tree.map(leaf, grads, specs)


def _all_gather(x: jax.Array, dim: int | None) -> jax.Array:
    if dim is None or lax.axis_size(DP_SHARD) == 1:
        return x
    return lax.all_gather(x, DP_SHARD, axis=dim, tiled=True)


def _reduce_scatter(g: jax.Array, dim: int | None) -> jax.Array:
    if dim is None or lax.axis_size(DP_SHARD) == 1:
        return g
    return lax.psum_scatter(g, DP_SHARD, scatter_dimension=dim, tiled=True)


def _own_part(g: jax.Array, dim: int) -> jax.Array:
    size = g.shape[dim] // lax.axis_size(DP_SHARD)
    start = lax.axis_index(DP_SHARD) * size
    return collectives.vary(lax.dynamic_slice_in_dim(g, start, size, axis=dim))
