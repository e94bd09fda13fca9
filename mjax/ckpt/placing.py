"""Load a saved step onto the devices of any mesh.

A process reads the pieces that its devices need and compares each with its checksum. If
devices of several processes hold the same box (a rectangular part of an array), one
process reads it and the others receive it over the devices' network. So each box is
read from the store only once, however many replicas there are.

Source: Jiang et al. 2024 (MegaScale), arXiv:2402.15627, section 4.4 (fast recovery).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from mjax.ckpt.boxes import Box, box_of, shape_of
from mjax.hardware.xla_flags import for_collectives
from mjax.mesh.host_memory import HOST_KIND

_NUM_READERS = 8  # number of leaves that are read at the same time

Host = dict[str, dict[Box, np.ndarray]]
"""Leaf name -> box -> values that this process has read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The sources of the values of one leaf."""

    box_of: dict[Any, Box]
    """Device of the mesh -> the box that it holds."""
    source: dict[Box, Any]
    """Box -> the device from which all other devices with this box receive it."""
    is_shared: bool
    """Whether some process must receive a box that another process has read."""

    def reads(self, process: int) -> list[Box]:
        """Return the boxes that a process must read and supply."""
        return [b for b, d in self.source.items() if d.process_index == process]


def plan(leaf: jax.ShapeDtypeStruct, holders: set[int] | None = None) -> Plan | None:
    """Plan which device supplies each box of a leaf; equal on all processes.

    Args:
      leaf: shape, dtype and sharding of the leaf.
      holders: ranks of the processes that have already read all their boxes. None means
        that none has, and the plan determines which process reads each box.
    Returns:
      The plan; None if some box is on no holder.
    """
    assert leaf.sharding is not None
    boxes = _boxes_of(leaf.sharding, leaf.shape)
    groups: dict[Box, list[Any]] = {}
    for device, box in boxes.items():
        groups.setdefault(box, []).append(device)
    source = {}
    for box, devices in groups.items():
        able = [d for d in devices if holders is None or d.process_index in holders]
        if not able:
            return None
        source[box] = min(able, key=lambda device: (device.process_index, device.id))
    processes = {device.process_index for device in boxes}
    return Plan(
        box_of=boxes,
        source=source,
        is_shared=holders != processes
        and any(len({d.process_index for d in group}) > 1 for group in groups.values()),
    )


def own_boxes(leaf: jax.ShapeDtypeStruct) -> list[Box]:
    """Return the distinct boxes that the devices of this process hold."""
    assert leaf.sharding is not None
    this = jax.process_index()
    boxes = _boxes_of(leaf.sharding, leaf.shape)
    return [*dict.fromkeys(b for d, b in boxes.items() if d.process_index == this)]


def _boxes_of(sharding: jax.sharding.Sharding, shape: Sequence[int]) -> dict[Any, Box]:
    """Return device -> the box of the array that it holds, for the whole mesh."""
    indices = sharding.devices_indices_map(tuple(shape))
    return {
        device: box_of(index, shape)
        for device, index in indices.items()
        if index is not None
    }


def read(
    read_boxes: Callable[[str, list[Box]], list[np.ndarray]],
    abstract: Mapping[str, jax.ShapeDtypeStruct],
) -> Host:
    """Read the boxes that this process supplies, without using a device.

    Args:
      read_boxes: returns the values of boxes of a leaf, given its name. Several threads
        call it; its errors are passed on.
      abstract: leaf name -> shape, dtype and sharding.
    """
    wanted: dict[str, list[Box]] = {}
    this = jax.process_index()
    for name, leaf in abstract.items():
        planned = plan(leaf)
        assert planned is not None  # `plan` returns None only if holders are given
        wanted[name] = planned.reads(this)

    def read_leaf(name: str) -> dict[Box, np.ndarray]:
        boxes = wanted[name]
        return dict(zip(boxes, read_boxes(name, boxes) if boxes else [], strict=True))

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        return dict(zip(wanted, pool.map(read_leaf, wanted), strict=True))


def place(
    host: Host,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    holders: set[int] | None = None,
) -> dict[str, jax.Array]:
    """Put the values that all processes have read on the devices.

    Every process calls this. A box that another process has read arrives as a sum over
    devices, one of which has the values; all others have zeros. If such a leaf belongs
    in host memory, the sum is then moved there; these leaves are placed one by one, so
    a device holds only one of them at a time.

    Args:
      host: values that this process has read; emptied leaf by leaf.
      abstract: leaf name -> shape, dtype and NamedSharding.
      holders: as in `plan`.
    Returns:
      Leaf name -> global array.
    """
    placed: dict[str, jax.Array] = {}
    scattered: dict[str, jax.Array] = {}
    sums: dict[jax.ShapeDtypeStruct, Any] = {}
    for name, leaf in abstract.items():
        planned = plan(leaf, holders)
        assert planned is not None
        values = host.pop(name, {})
        if not planned.is_shared:
            placed[name] = _placed(leaf, planned, values)
        elif leaf.sharding is not None and leaf.sharding.memory_kind == HOST_KIND:
            if leaf not in sums:  # leaves of one type share a compiled program
                sums[leaf] = _totals({"leaf": leaf})
            parts = {"leaf": _scattered(leaf, planned, values)}
            placed[name] = _moved(sums[leaf](parts)["leaf"], leaf.sharding)
        else:
            scattered[name] = _scattered(leaf, planned, values)
    if scattered:
        leaves = {name: abstract[name] for name in scattered}
        for name, total in _totals(leaves)(scattered).items():
            placed[name] = jax.device_put(total, leaves[name].sharding)
    return placed


def _moved(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Move an array to other memory; wait, so that its old memory can be freed."""
    return jax.device_put(x, sharding).block_until_ready()


def _placed(
    leaf: jax.ShapeDtypeStruct, plan: Plan, values: Mapping[Box, np.ndarray]
) -> jax.Array:
    """Return the leaf, from boxes that this process has read for all its devices."""
    sharding = leaf.sharding
    assert sharding is not None
    own = [d for d in plan.box_of if d in sharding.addressable_devices]
    kind = sharding.memory_kind
    parts = [
        jax.device_put(
            values[plan.box_of[device]], SingleDeviceSharding(device, memory_kind=kind)
        )
        for device in own
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def _scattered(
    leaf: jax.ShapeDtypeStruct, plan: Plan, values: Mapping[Box, np.ndarray]
) -> jax.Array:
    """Return the bits of a leaf as unsigned integers [copies, *shape], to be summed.

    Each box has its values in one copy, and zeros in all other copies.
    """
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    bits = _bits(leaf)
    parts = []
    for device, box in plan.box_of.items():
        if device in sharding.addressable_devices:
            is_source = plan.source[box] == device
            part = (
                values[box].view(bits) if is_source else np.zeros(shape_of(box), bits)
            )
            parts.append(jax.device_put(part[None], device))
    axes = _replicated_axes(sharding)
    copies = math.prod(sharding.mesh.shape[axis] for axis in axes)
    return jax.make_array_from_single_device_arrays(
        (copies, *leaf.shape), NamedSharding(sharding.mesh, _stacked(sharding)), parts
    )


def _totals(leaves: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
    """Return a compiled function from leaf name -> copies to leaf name -> their sum.

    The sums are exact, because bits are added as integers.
    """
    shardings = {name: leaf.sharding for name, leaf in leaves.items()}

    def totals(scattered: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {
            name: lax.bitcast_convert_type(
                lax.psum(bits[0], _replicated_axes(shardings[name])), leaves[name].dtype
            )
            for name, bits in scattered.items()
        }

    [mesh] = {sharding.mesh for sharding in shardings.values()}
    summed = jax.shard_map(
        totals,
        mesh=mesh,
        in_specs=({name: _stacked(sharding) for name, sharding in shardings.items()},),
        out_specs={name: sharding.spec for name, sharding in shardings.items()},
    )
    return jax.jit(summed, donate_argnums=0, compiler_options=for_collectives(mesh))


def _bits(leaf: jax.ShapeDtypeStruct) -> np.dtype:
    """Return the unsigned integer type with the width of a leaf's elements."""
    return np.dtype(f"uint{8 * leaf.dtype.itemsize}")


def _stacked(sharding: Any) -> PartitionSpec:
    """Return the spec of a leaf's [copies, *shape], with one copy per replica."""
    return PartitionSpec(_replicated_axes(sharding), *sharding.spec)


def _replicated_axes(sharding: Any) -> tuple[str, ...]:
    """Return the mesh axes over which the sharding replicates."""
    used: set[str] = set()
    for entry in sharding.spec:
        used |= {entry} if isinstance(entry, str) else {*(entry or ())}
    return tuple(axis for axis in sharding.mesh.axis_names if axis not in used)
