"""ZeRO: sharding of parameters, gradients and optimizer state over data parallelism.

From level 1 on, stored (master) parameters and moments are split over the axes
`SHARDS`, dp_shard and dp_node (`mesh.rules.param_spec`). A step then

- level 0: uses the stored parameters, all-reduces the gradients;
- level 1: all-gathers the weights, all-reduces the gradients, and keeps the part of
  them that this device stores;
- level 2: all-gathers the weights, reduce-scatters the gradients;
- level 3: all-gathers each layer's weights before the layer is used, in the forward
  and in the backward pass, and reduce-scatters its gradient in the backward pass.

The gather sends the compute dtype (bfloat16), never the float32 masters; gradients are
reduced in `precision.reduce`. With dp_replicate > 1 (HSDP) the reduction has two hops:
over `SHARDS`, then over dp_replicate, where a device sends only its shard (MiCS, Zhang
et al. 2022, arXiv:2205.00119, section 3.4). Each microbatch adds its local gradient
(`summand`) to the sum on the device. At levels 0 to 2 this sends nothing, and at level
3 only over `SHARDS`. The last microbatch ends with `scatter` and `reduce_over`. So
communication over dp_replicate happens once per step.

If the shards span nodes, dp_node above 1 splits each gather into two steps. The first
step gathers between nodes: each device receives the shards of the devices with its own
position on the other nodes. The second step gathers inside the node. A reduce-scatter
has the same steps in reverse order. So each node receives a byte from other nodes only
once, and the number of hops between nodes grows with the number of nodes, not of shards
(MiCS, section 3.3).

The shards are numbered with dp_shard as the major index. So each step joins neighbours,
and the gathered array is in order. MiCS numbers the shards in another order and must
move the gathered bytes again. A gather in two steps gives the same bits as a gather in
one step. A sum in two steps is rounded differently, in `precision.reduce`. The
all-reduce of level 1 is one collective over both axes.

`mjax.step.prefetch` decides when each layer is gathered and reduced. `mjax.step.plain`
decides this for the embedding and the head, and `mjax.pipeline.pieces` for the stages
of a pipeline.

Source: Rajbhandari et al. 2020, arXiv:1910.02054. Differs: level 1 of the paper
reduce-scatters the gradients, as level 2 does; here level 1 all-reduces them, so the
gradients of levels 1 and 2 are rounded differently.

Functions here run per device inside shard_map. Their arguments vary over all axes; a
completely reduced gradient varies only over the axes in its spec.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from mjax.mesh import collectives, rules
from mjax.mesh.axes import AXES, DP_SHARD, SHARDS


def gather(
    params: Any, specs: Any, dtype: DTypeLike, gathered: Any | None = None
) -> Any:
    """Gather parameters: cast, then all-gather over `SHARDS`.

    Args:
      params: tree of this device's parts, varying over all axes.
      specs: tree of PartitionSpecs of `params`.
      dtype: dtype of the gathered weights, and of the bytes that are sent.
      gathered: result of `gather_split` for the same parameters, to be used instead of
        gathering them; None gathers them here.
    Returns:
      the tree with every leaf gathered over `SHARDS`.
    """

    def leaf(
        x: jax.Array, spec: PartitionSpec, gathered: tuple[jax.Array, ...] = ()
    ) -> jax.Array:
        if gathered:
            return gathered[0]
        x, dim = x.astype(dtype), rules.dim_of(spec, DP_SHARD)
        if dim is None:
            return x
        for axis in reversed(SHARDS):
            if lax.axis_size(axis) > 1:
                x = lax.all_gather(x, axis, axis=dim, tiled=True)
        return x

    return jax.tree.map(leaf, params, specs, *([] if gathered is None else [gathered]))


def gather_split(params: Any, specs: Any, dtype: DTypeLike) -> Any:
    """Gather the parameters that are split over `SHARDS`, and no others.

    Args:
      params: as for `gather`.
      specs: as for `gather`.
      dtype: as for `gather`.
    Returns:
      the tree with a tuple for each leaf. The tuple contains the gathered leaf; it is
      empty if `SHARDS` do not split the leaf.
    """

    def leaf(x: jax.Array, spec: PartitionSpec) -> tuple[jax.Array, ...]:
        is_split = rules.dim_of(spec, DP_SHARD) is not None
        return (gather(x, spec, dtype),) if is_split else ()

    return jax.tree.map(leaf, params, specs)


def summand(
    grads: Any,
    specs: Any,
    *,
    level: int,
    dtype: DTypeLike,
    axes: Sequence[str] = SHARDS,
) -> Any:
    """Return what a microbatch adds to the sum of the gradients.

    Args:
      grads: tree of gradients of gathered parameters.
      specs: PartitionSpecs of the stored parameters.
      level: the ZeRO level.
      dtype: dtype in which gradients are accumulated and reduced.
      axes: axes of `SHARDS` to sum over. To do the two steps of a reduce-scatter one by
        one, call this twice: with dp_shard, then with dp_node on the result.
    Returns:
      `grads` in `dtype` at levels 0 to 2; at level 3 this device's parts of their sums
      over `SHARDS`.
    """

    def leaf(g: jax.Array, spec: PartitionSpec) -> jax.Array:
        g, dim = g.astype(dtype), rules.dim_of(spec, DP_SHARD)
        return g if dim is None or level < 3 else _reduce_scatter(g, dim, axes)

    return jax.tree.map(leaf, grads, specs)


def scatter(grads: Any, specs: Any, *, level: int, axes: Sequence[str] = SHARDS) -> Any:
    """Reduce gradients, summed over the microbatches, over `SHARDS`: the first hop.

    Args:
      grads: tree of sums of the results of `summand`.
      specs: PartitionSpecs of the stored parameters.
      level: the ZeRO level; at level 3 `summand` has already reduced the gradients.
      axes: as for `summand`; level 1 always sums over all of `SHARDS`.
    Returns:
      the tree of this device's parts; leaves not split over `SHARDS` are unchanged.
    """

    def leaf(g: jax.Array, spec: PartitionSpec) -> jax.Array:
        dim = rules.dim_of(spec, DP_SHARD)
        if dim is None or level == 3:
            return g
        if level == 1:
            return collectives.vary(_own_part(lax.psum(g, SHARDS), dim))
        return _reduce_scatter(g, dim, axes)

    return jax.tree.map(leaf, grads, specs)


def reduce_over(axes: Sequence[str], grads: Any, specs: Any) -> Any:
    """Sum each gradient over the axes that do not split its parameter: the second hop.

    Args:
      axes: mesh axes to sum over.
      grads: tree of this device's parts.
      specs: PartitionSpecs of the stored parameters.
    """

    def leaf(g: jax.Array, spec: PartitionSpec) -> jax.Array:
        rest = tuple(axis for axis in axes if rules.dim_of(spec, axis) is None)
        return lax.psum(g, rest) if rest else g

    return jax.tree.map(leaf, grads, specs)


def reduce_gradients(grads: Any, specs: Any, *, level: int, dtype: DTypeLike) -> Any:
    """Sum gradients over `SHARDS` and all axes that do not split their parameter.

    Args:
      grads: tree of gradients of gathered parameters.
      specs: PartitionSpecs of the stored parameters.
      level: the ZeRO level.
      dtype: dtype of the reduction and of the result.
    Returns:
      the tree of this device's parts, invariant over the axes that their specs omit.
    """
    grads = summand(grads, specs, level=level, dtype=dtype)
    return reduce_over(AXES, scatter(grads, specs, level=level), specs)


def own_parts(grads: Any, specs: Any) -> Any:
    """Return the parts of complete gradients that this device stores.

    Args:
      grads: tree of complete gradients, equal on all devices of `SHARDS`.
      specs: PartitionSpecs of the stored parameters.
    """

    def leaf(g: jax.Array, spec: PartitionSpec) -> jax.Array:
        dim = rules.dim_of(spec, DP_SHARD)
        return g if dim is None else _own_part(g, dim)

    return jax.tree.map(leaf, grads, specs)


def _reduce_scatter(g: jax.Array, dim: int, axes: Sequence[str]) -> jax.Array:
    for axis in axes:
        if lax.axis_size(axis) > 1:
            g = lax.psum_scatter(g, axis, scatter_dimension=dim, tiled=True)
    return g


def _own_part(g: jax.Array, dim: int) -> jax.Array:
    size = g.shape[dim] // lax.axis_size(SHARDS)
    start = lax.axis_index(SHARDS) * size
    return lax.dynamic_slice_in_dim(g, start, size, axis=dim)
