"""From a saved step onto the devices, on any mesh.

A process reads the pieces that its devices need and compares each with its checksum.
Where devices of several processes hold the same box (replicas), one of them reads it
and the others get it over the devices' own network: the step costs the store one
reading, however many replicas there are.

Source: Jiang et al. 2024 (MegaScale), arXiv:2402.15627, section 4.4 (fast recovery).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mjax.ckpt.boxes import Box, box_of, shape_of
from mjax.ckpt.saved_step import SavedStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """Where the values of one leaf come from, for this process."""

    leaf: jax.ShapeDtypeStruct
    box_of: dict[Any, Box]
    """Of every device of the mesh."""
    reads: list[Box]
    """What this process reads."""
    source: dict[Box, Any]
    """The device that every other one with this box gets it from."""
    is_shared: bool
    """Some box is on devices of several processes."""


Host = dict[str, dict[Box, np.ndarray]]
"""What a process has read: by leaf, by box."""


def plan(leaf: jax.ShapeDtypeStruct) -> _Plan:
    """Decide who reads which box of a leaf; every process decides alike."""
    assert leaf.sharding is not None
    boxes = _boxes_of(leaf.sharding, leaf.shape)
    holders: dict[Box, list[Any]] = {}
    for device, box in boxes.items():
        holders.setdefault(box, []).append(device)
    source = {
        box: min(devices, key=lambda device: (device.process_index, device.id))
        for box, devices in holders.items()
    }
    this = jax.process_index()
    return _Plan(
        leaf=leaf,
        box_of=boxes,
        reads=[box for box, device in source.items() if device.process_index == this],
        source=source,
        is_shared=any(
            len({device.process_index for device in devices}) > 1
            for devices in holders.values()
        ),
    )


def _boxes_of(sharding: jax.sharding.Sharding, shape: Sequence[int]) -> dict[Any, Box]:
    """Say which box of an array each device of the mesh holds."""
    indices = sharding.devices_indices_map(tuple(shape))
    return {
        device: box_of(index, shape)
        for device, index in indices.items()
        if index is not None
    }


def read(saved: SavedStep, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Host:
    """Read this process' share, checked; touches no device.

    Raises:
      DamagedError, RuntimeError: as `SavedStep.read_piece`.
    """
    host: Host = {}
    for name, leaf in abstract.items():
        wanted = plan(leaf).reads
        host[name] = dict(
            zip(wanted, saved.read_boxes(name, wanted), strict=True) if wanted else ()
        )
    return host


def place(
    host: Host, abstract: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Put what the processes have read on the devices; every process calls it.

    Args:
      host: what `read` returned here; leaf by leaf it is let go.
      abstract: shapes, dtypes and NamedShardings.
    """
    placed = {}
    for name, leaf in abstract.items():
        placed[name] = _place(plan(leaf), host.pop(name))
    return placed


def _place(plan: _Plan, values: Mapping[Box, np.ndarray]) -> jax.Array:
    sharding = plan.leaf.sharding
    assert isinstance(sharding, NamedSharding)
    own = {d: b for d, b in plan.box_of.items() if d in sharding.addressable_devices}
    if not plan.is_shared:
        parts = [jax.device_put(values[box], device) for device, box in own.items()]
        return jax.make_array_from_single_device_arrays(
            plan.leaf.shape, sharding, parts
        )
    # One device of each group has the values, the others zeros; the sum is exact
    # because it is taken of the bits, as whole numbers.
    bits = np.dtype(f"uint{8 * plan.leaf.dtype.itemsize}")
    parts = []
    for device, box in own.items():
        if plan.source[box] == device:
            part = values[box].view(bits)
        else:
            part = np.zeros(shape_of(box), bits)
        parts.append(jax.device_put(part[None], device))
    axes = _replicated_axes(sharding)
    copies = math.prod(sharding.mesh.shape[axis] for axis in axes)
    stacked = jax.make_array_from_single_device_arrays(
        (copies, *plan.leaf.shape),
        NamedSharding(sharding.mesh, PartitionSpec(axes, *sharding.spec)),
        parts,
    )
    return _total(sharding, axes, plan.leaf.dtype)(stacked)


@functools.cache
def _total(sharding: NamedSharding, axes: tuple[str, ...], dtype: Any) -> Any:
    """Compile the sum over the copies [copies, *shape] of the bits of a leaf."""

    def total(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(lax.psum(x[0], axes), dtype)

    return jax.jit(
        jax.shard_map(
            total,
            mesh=sharding.mesh,
            in_specs=PartitionSpec(axes, *sharding.spec),
            out_specs=sharding.spec,
        ),
        donate_argnums=0,
    )


def _replicated_axes(sharding: NamedSharding) -> tuple[str, ...]:
    """Return the mesh axes along which every device holds the same."""
    used: set[str] = set()
    for entry in sharding.spec:
        used |= {entry} if isinstance(entry, str) else {*(entry or ())}
    return tuple(axis for axis in sharding.mesh.axis_names if axis not in used)
