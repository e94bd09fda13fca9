"""The only table that maps logical names of dims to mesh axes.

Input: the shape of a parameter and the logical names of its dims. Output: a
PartitionSpec. The same spec places the stored array and is the `in_spec` of the step's
shard_map. A gradient must still be summed over all axes that the spec does not name
(`mesh.zero`).
"""

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from mjax.mesh.axes import DP, PP, SHARDS, TP, AxisSizes

LOGICAL_TO_AXIS: dict[str | None, str | None] = {
    "layers": PP,
    "embed": None,
    "heads": TP,
    "kv_heads": TP,
    "head_width": None,
    "mlp": TP,
    "rank": None,
    "vocab": TP,
    "positions": None,
    None: None,
}
"""The mesh axis that splits a dim with this logical name; None: no axis."""

BATCH_SPEC = PartitionSpec(DP, None)
"""Placement of `[B, T]` arrays: B split over data parallelism, T not split."""


def param_spec(
    shape: Sequence[int],
    logical: Sequence[str | None],
    sizes: AxisSizes,
    *,
    shard_over_dp: bool,
) -> PartitionSpec:
    """Place one parameter.

    `LOGICAL_TO_AXIS` gives the axis that splits each dim. With `shard_over_dp`
    (ZeRO >= 1), `SHARDS` split one dim too, even if tp already splits this dim. The
    dim is the model width if `SHARDS` divide it, otherwise the largest dim that they
    divide. If `SHARDS` divide no dim, they split none. If there are fewer key/value
    heads than tp, the heads are not split: every device holds all of them, and uses
    only those that its query heads need.

    Args:
      shape: global shape.
      logical: one logical name per dim.
      sizes: sizes of the mesh axes.
      shard_over_dp: whether to split the parameter over `SHARDS` too.
    Raises:
      ValueError: the size of a dim is not a multiple of the size of its axis.
    """
    axis_size = {PP: sizes.pp, TP: sizes.tp}
    entries: list[str | tuple[str, ...] | None] = []
    local = list(shape)
    for dim, name in enumerate(logical):
        axis = LOGICAL_TO_AXIS[name]
        if name == "kv_heads" and shape[dim] < sizes.tp:
            axis = None
        if axis is not None:
            if shape[dim] % axis_size[axis]:
                raise ValueError(
                    f"dim {name!r} must be a multiple of the mesh axis {axis} "
                    f"{axis_size[axis]}, got {shape[dim]}; choose a divisor of "
                    f"{shape[dim]} for the axis"
                )
            local[dim] //= axis_size[axis]
        entries.append(axis)
    dim = _dp_dim(local, logical, sizes.shards) if shard_over_dp else None
    if dim is not None:
        axis = entries[dim]
        entries[dim] = SHARDS if axis is None else (str(axis), *SHARDS)
    return PartitionSpec(*entries)


def joined_spec(logical: Sequence[str], *, embed_over_dp: bool) -> PartitionSpec:
    """Place the joined weights of all layers, an array [slots, m, n].

    Each device has joined its parts of several weights into one matrix per layer. A
    slot is the place of one layer in the stack of these matrices.

    Args:
      logical: logical names of the two dims of a matrix. Joining merges all dims of a
        weight except "embed".
      embed_over_dp: whether the model width is split over `SHARDS`.
    """
    names = "layers", *logical
    axes: list[str | tuple[str, ...] | None] = [LOGICAL_TO_AXIS[n] for n in names]
    if embed_over_dp:
        axes[1 + logical.index("embed")] = SHARDS
    return PartitionSpec(*axes)


def _dp_dim(
    local: Sequence[int], logical: Sequence[str | None], shards: int
) -> int | None:
    """Choose the dim that `SHARDS` split; None if they divide no dim."""
    fits = [
        dim
        for dim, name in enumerate(logical)
        if name != "layers" and local[dim] % shards == 0
    ]
    return max(fits, key=lambda d: (logical[d] == "embed", local[d]), default=None)


def dim_of(spec: PartitionSpec, axis: str) -> int | None:
    """Return the dim that `axis` splits, or None."""
    for dim, entry in enumerate(spec):
        if axis == entry or (isinstance(entry, tuple) and axis in entry):
            return dim
    return None
