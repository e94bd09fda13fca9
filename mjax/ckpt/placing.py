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
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mjax.ckpt.boxes import Box, boxes_of, shape_of

Host = dict[str, dict[Box, np.ndarray]]
"""What a process has read: by leaf, by box."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Where the values of one leaf come from."""

    box_of: dict[Any, Box]
    """Of every device of the mesh."""
    source: dict[Box, Any]
    """The device that every other one with this box gets it from."""
    is_shared: bool
    """Some box is on devices of several processes, and not all of them have read it."""


def plan(leaf: jax.ShapeDtypeStruct, holders: set[int] | None = None) -> Plan | None:
    """Decide who brings which box of a leaf; every process decides alike.

    Args:
      leaf: with its sharding.
      holders: the processes that have read all their boxes; None: nobody has, and the
        plan says who reads what.
    Returns:
      the plan; None where a box is with none of the holders.
    """
    assert leaf.sharding is not None
    box_of = boxes_of(leaf.sharding, leaf.shape)
    groups: dict[Box, list[Any]] = {}
    for device, box in box_of.items():
        groups.setdefault(box, []).append(device)
    source = {}
    for box, devices in groups.items():
        able = [d for d in devices if holders is None or d.process_index in holders]
        if not able:
            return None
        source[box] = min(able, key=lambda device: (device.process_index, device.id))
    processes = {device.process_index for device in box_of}
    return Plan(
        box_of=box_of,
        source=source,
        is_shared=holders != processes
        and any(len({d.process_index for d in group}) > 1 for group in groups.values()),
    )


def own_boxes(leaf: jax.ShapeDtypeStruct) -> list[Box]:
    """Return the boxes that the devices of this process hold, each once."""
    assert leaf.sharding is not None
    this = jax.process_index()
    box_of = boxes_of(leaf.sharding, leaf.shape)
    return [*dict.fromkeys(b for d, b in box_of.items() if d.process_index == this)]


def read(
    read_boxes: Callable[[str, list[Box]], list[np.ndarray]],
    abstract: Mapping[str, jax.ShapeDtypeStruct],
) -> Host:
    """Read this process' share; touches no device.

    Args:
      read_boxes: returns boxes of a leaf; what it raises passes through.
      abstract: shapes, dtypes and shardings of the leaves.
    """
    host: Host = {}
    this = jax.process_index()
    for name, leaf in abstract.items():
        planned = plan(leaf)
        assert planned is not None  # where nobody has read yet, everybody can
        wanted = [box for box, d in planned.source.items() if d.process_index == this]
        values = read_boxes(name, wanted) if wanted else []
        host[name] = dict(zip(wanted, values, strict=True))
    return host


def place(
    host: Host,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    holders: set[int] | None = None,
) -> dict[str, jax.Array]:
    """Put what the processes have read on the devices; every process calls it.

    Args:
      host: what this process has read; leaf by leaf it is let go.
      abstract: shapes, dtypes and NamedShardings.
      holders: as in `plan`.
    """
    placed = {}
    for name, leaf in abstract.items():
        planned = plan(leaf, holders)
        assert planned is not None
        placed[name] = _place(leaf, planned, host.pop(name, {}))
    return placed


def _place(
    leaf: jax.ShapeDtypeStruct, plan: Plan, values: Mapping[Box, np.ndarray]
) -> jax.Array:
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    own = {d: b for d, b in plan.box_of.items() if d in sharding.addressable_devices}
    if not plan.is_shared:
        parts = [jax.device_put(values[box], device) for device, box in own.items()]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)
    # One device of each group has the values, the others zeros; the sum is exact
    # because it is taken of the bits, as whole numbers.
    bits = np.dtype(f"uint{8 * leaf.dtype.itemsize}")
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
        (copies, *leaf.shape),
        NamedSharding(sharding.mesh, PartitionSpec(axes, *sharding.spec)),
        parts,
    )
    return _total(sharding, axes, leaf.dtype)(stacked)


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
